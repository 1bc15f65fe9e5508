"""Write the tables of measured figures from the records: records/README.md, docs/cases.md in both languages,
docs/faults.md, both READMEs' picture and their parts between the markers. <!-- tasks --> and its end, where
a README has them, hold the time to the same accuracy by task, <!-- scripts --> scripts under `vivace run`,
<!-- gpus --> ResNet-50 on GPUs.

    scripts/bench table [--check]

With --check nothing is written; the exit code is 1 where a file would change.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

import _cases
import _evidence
import _faults
import _gpus
import _picture
import _scripts
import _tasks
from cpu import DEMANDED

ROOT = Path(__file__).resolve().parent.parent
JOBS = tuple(DEMANDED)
LIMIT = 8  # envelopes: vivace.verifying.judgement.LIMIT, which tests/benchmarks/test_records.py compares
LIMITED = 4  # the column that says the share of the limit, left out where it is known of no row
UNKNOWN = "-"
NOTABLE = 0.03  # of a step, from which an operator is listed
MARKERS = re.compile(r"(<!-- (figures|evidence|scripts|tasks|gpus) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
WORDS = {
    "README.md": {
        "machine": "Measured on {device} ({features}), {cores} cores, torch {torch}:",
        "columns": (
            "job",
            "date",
            "strict fp32, samples/s",
            "the plan, 95 % interval",
            "share of the limit",
            "same model",
            "plan",
        ),
        "limited": "*Share of the limit*: what the step reaches of what this machine can do in the plan's "
        "precision, by [`vivace profile`](docs/profile.md#the-limit); a dash: not known.",
        "identical": "bit-identical",
        "kept": "yes: {worst:.1f} of {limit}",
        "broken": "no: {worst:.1f} of {limit}",
        "reference": "the job as it is",
        "nothing": "no plan kept",
        "unsteady": "no plan kept: the machine was unsteady",
        "missing": "No steady measurement yet: {jobs}.",
    },
    "README.zh-CN.md": {
        "machine": "测量环境：{device}（{features}），{cores} 核，torch {torch}：",
        "columns": (
            "任务",
            "日期",
            "严格 fp32（样本/秒）",
            "采用方案后的加速比（95% 区间）",
            "达到上限的比例",
            "是否同一模型",
            "方案",
        ),
        "limited": "“达到上限的比例”一列由 [`vivace profile`](docs/profile.md#the-limit) 给出："
        "以方案所用精度计，一步达到这台机器上限的百分之几；短横线表示未知。",
        "identical": "逐位相同",
        "kept": "是：{worst:.1f} / {limit}",
        "broken": "否：{worst:.1f} / {limit}",
        "reference": "原样训练",
        "nothing": "未采用任何方案",
        "unsteady": "未采用任何方案：机器负载不稳",
        "missing": "尚无稳定的测量结果：{jobs}。",
    },
}
HEAD = """# Records

Written by `scripts/bench table` from the files beside it; edit none of them. A record is one run of
`vivace tune` on one job: `records/<job>/<machine>/<date>.json`, with every trial, its interval, every refusal
and its reason. The figure is the confirmation's: fresh processes, against strict fp32, with its 95 %
interval; *no plan kept* means that none was faster beyond noise, kept its promise and was confirmed.
*Demanded* is what the lower end had to reach. *Limit* is the share that the plan's step reaches of what this
machine can do in its precision, by [`vivace profile`](../docs/profile.md). *Same model* is the largest
distance from the reference in envelopes of rounding, of which {limit} are allowed;
[how Vivace verifies](../docs/how-it-verifies.md) says what an envelope is. At the end stands what the other
benchmarks asked and found.
"""


def main() -> None:
    """Write the files, or say which would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where a file would change"
    )
    check = parser.parse_args().check
    stale = [path for path, text in wanted(read(ROOT / "records")).items() if _present(path) != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date: run scripts/bench table' if check else 'written'}")
    if check:
        raise SystemExit(1 if stale else 0)
    for path, text in wanted(read(ROOT / "records")).items():
        path.write_text(text, encoding="utf-8")


def read(folder: Path) -> list[dict]:
    """All records, by machine and job, the newest first. One without the benchmark's name is of `cpu`."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/*/*.json")]
    records = [{"benchmark": "cpu", **record} for record in records]
    records.sort(key=lambda record: record["date"], reverse=True)
    return sorted(records, key=lambda record: (record["machine"]["fingerprint"], record["job"]))


def wanted(records: list[dict]) -> dict[Path, str]:
    """The files and what they should hold."""
    tuned = [record for record in records if record["benchmark"] == "cpu"]
    trained = _tasks.together(record for record in records if record["benchmark"] == "accuracy")
    others = [record for record in records if record["benchmark"] not in ("cpu", "accuracy")]
    others = sorted([*others, *trained], key=_job_and_machine)
    headlines = [record for record in others if record["benchmark"] not in _evidence.DETAILS]
    files = {ROOT / "records" / "README.md": overview(tuned) + evidence(others, "README.md", "", None)}
    files |= {ROOT / "docs" / name: _cases.page(trained, tuned, name) for name in _cases.WORDS}
    unmodified = [record for record in others if record["benchmark"] == "scripts"]
    befell = [record for record in others if record["benchmark"] == "faults"]
    files[ROOT / "docs" / "faults.md"] = _faults.page(befell)
    for name in WORDS:
        path = ROOT / name
        parts = {"figures": table(tuned, name), "evidence": evidence(headlines, name, "records/", 1)}
        parts["scripts"] = _scripts.table(unmodified, name)
        parts["tasks"] = _tasks.table(trained, name)
        parts["gpus"] = _gpus.table((one for one in others if one["benchmark"] == "gpu"), name)
        found = sorted(match[2] for match in MARKERS.finditer(_present(path)))
        if not {"evidence", "figures"} <= set(found) or len(set(found)) < len(found):
            raise SystemExit(
                f"{name} needs <!-- figures --> and <!-- evidence --> with their ends, each once, and may "
                "have <!-- tasks -->, <!-- scripts --> and <!-- gpus --> once"
            )
        text = MARKERS.sub(lambda match, parts=parts: match[1] + parts[match[2]] + match[3], _present(path))
        files[path] = text
        files |= {ROOT / _picture.name_of(name): drawn} if (drawn := _picture.picture(trained, name)) else {}
    return files


def evidence(records: list[dict], file: str, prefix: str, most: int | None) -> str:
    """What the other benchmarks found, by the newest record of each job: its first `most` answers."""
    newest = [next(group) for _, group in itertools.groupby(records, key=_job_and_machine)]
    rows = list(_evidence.rows(newest, file, prefix, most))
    return "\n" + _grid(_evidence.WORDS[file]["columns"], rows) + "\n\n" if rows else "\n"


def table(records: list[dict], file: str) -> str:
    """The newest record of each job and machine, in the words of a README."""
    words = WORDS[file]
    newest = [next(group) for _, group in itertools.groupby(records, key=_job_and_machine)]
    parts = []
    for _, group in itertools.groupby(newest, key=lambda record: record["machine"]["fingerprint"]):
        rows = list(group)
        machine = rows[0]["machine"]
        machine = {**machine, "features": ", ".join(machine["features"])}
        parts.append(words["machine"].format(**machine, torch=_versions(rows, "torch")))
        columns = [words["columns"], *(_cells(row, words) for row in rows)]
        limited = any(reached(row) != UNKNOWN for row in rows)
        if not limited:
            columns = [(*cells[:LIMITED], *cells[LIMITED + 1 :]) for cells in columns]
        parts.append(_grid(columns[0], columns[1:]))
        parts += [words["limited"]] if limited else []
    known = {record["job"] for record in records}
    missing = [f"`{job}`" for job in JOBS if job not in known]
    parts += [words["missing"].format(jobs=", ".join(missing))] if missing else []
    return "\n" + "\n\n".join(parts) + "\n\n"


def _cells(row: dict, words: dict) -> tuple[str, ...]:
    return (
        f"`{row['job']}`",
        row["date"],
        f"{row['baselines']['strict_fp32']:,.0f}",
        figure(row, words),
        reached(row),
        verdict(row, words),
        plan(row) or words["reference"],
    )


def overview(records: list[dict]) -> str:
    """records/README.md: every record, under its machine."""
    parts = [HEAD.format(limit=LIMIT)]
    columns = (
        "job",
        "date",
        "strict fp32",
        "defaults",
        "the plan",
        "demanded",
        "limit",
        "same model",
        "plan",
    )
    for fingerprint, group in itertools.groupby(records, key=lambda record: record["machine"]["fingerprint"]):
        rows = list(group)
        machine = rows[0]["machine"]
        parts.append(f"## {machine['device']}, {machine['cores']} cores (`{fingerprint}`)\n")
        parts.append("Speeds in samples a second; *defaults*: PyTorch as it comes.\n")
        parts.append(_grid(columns, map(_row, rows)))
        parts += split(rows)
        parts.append("\n| job | date | command | vivace | versions |\n|---|---|---|---|---|")
        for row in rows:
            versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
            cells = (f"`{row['job']}`", row["date"], f"`{row['command']}`", row["vivace"], versions)
            parts.append(_line(cells))
        parts.append("")
    return "\n".join(parts)


def _row(record: dict) -> tuple[str, ...]:
    words, baselines = WORDS["README.md"], record["baselines"]
    met = record["speedup"]["low"] >= record["demanded"]
    return (
        f"[`{record['job']}`]({record['job']}/{record['machine']['fingerprint']}/{record['date']}.json)",
        record["date"],
        f"{baselines['strict_fp32']:,.0f}",
        f"{baselines['default']:,.0f}" if baselines["default"] else "not measured",
        figure(record, words),
        f"{record['demanded']}, {'reached' if met else '**missed**'}",
        reached(record),
        verdict(record, words),
        plan(record) or words["reference"],
    )


def figure(record: dict, words: dict) -> str:
    """``2.82x (2.78-2.87)``, or that nothing was kept."""
    if not record["plan"]:
        unsteady = any("too unsteady" in trial["reason"] for trial in record["trials"])
        return words["unsteady" if unsteady else "nothing"]
    ratio = record["speedup"]
    return f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"


def reached(record: dict) -> str:
    """``38 %`` of what the machine reaches in the plan's precision; a dash where that is not known."""
    limit = record.get("limit", {})
    return UNKNOWN if limit.get("share") is None else f"{_least(limit) / limit['step_seconds']:.0%}"


def _least(limit: dict) -> float:
    """Seconds of the limit; older records count what beat its ceiling with the ceiling's time."""
    beaten = ((row["bound_seconds"] or 0.0) - (_own(row) or 0.0) for row in limit["operators"])
    return limit["bound_seconds"] - sum(beaten)


def _own(row: dict) -> float | None:
    """Seconds of an operator's own limit, which it did not beat; None where it is not known."""
    return None if row["bound_seconds"] is None else min(row["bound_seconds"], row["seconds"])


def split(records: list[dict]) -> list[str]:
    """Where steps of plans go: milliseconds of each kind of operator, and the least that it takes here."""
    known = [record for record in records if reached(record) != UNKNOWN]
    if not known:
        return []
    rows = []
    for record in known:
        limit, step = record["limit"], 1e3 * record["limit"]["step_seconds"]
        cells = [f"`{record['job']}`", record["date"], f"{step:.0f} of {1e3 * _least(limit):.0f}"]
        for row in limit["operators"]:
            if row["seconds"] >= NOTABLE * limit["step_seconds"]:
                own = _own(row)
                least = "" if own is None else f" of {1e3 * own:.0f}"
                cells.append(f"{row['operator']} {1e3 * row['seconds']:.0f}{least}")
        rows.append((*cells[:3], ", ".join(cells[3:])))
    columns = ("job", "date", "ms of a step, of the limit's", "of which, each beside its own limit")
    return ["", _grid(columns, rows)]


def verdict(record: dict, words: dict) -> str:
    """Was the promise kept, and how far from the reference is the worst figure?"""
    if not record["plan"] or record["kept"] is None:
        return words["reference"]
    worst = max(record["loss_envelopes"], record["displacement_envelopes"])
    if record["kept"] and record["promise"] == "exact":
        return words["identical"]
    return words["kept" if record["kept"] else "broken"].format(worst=worst, limit=LIMIT)


def plan(record: dict) -> str:
    """``bf16_weights + compile (regional=True)``; empty for the reference."""
    names = []
    for name, settings in record["plan"].items():
        chosen = ", ".join(f"{key}={value}" for key, value in settings.items())
        names.append(f"{name} ({chosen})" if chosen else name)
    return " + ".join(names)


def _job_and_machine(record: dict) -> tuple[str, str]:
    return record["machine"]["fingerprint"], record["job"]


def _versions(records: list[dict], package: str) -> str:
    return ", ".join(sorted({record["versions"][package] for record in records}))


def _grid(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join([_line(columns), "|" + "---|" * len(columns), *map(_line, rows)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _present(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    main()
