"""Vivace against the best one-liner of twelve jobs, and against pytorch-autotune with as long a search.

    scripts/bench peer [JOB ...] [--budget SECONDS|fast]

Both results, and the one-liners a person would try instead (Fabric bf16-mixed, Accelerate bf16, torch.compile
alone), are timed in turn against strict fp32, each in its own process, and each is judged by the ruler. The
best one-liner is the fastest of all but Vivace, job by job, as somebody who tried them all would choose.
The peer lives in .venv-peer, made on the first call beside this environment, with the same versions of all
else; where it can be imported already, nothing is made. Without a name: the jobs that today's record lacks.
What is compared with another budget than `fast` stands beside the table and not in its mean.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _record
from peer_child import (
    FABRICS,
    PEER,
    AccelerateBf16,
    FabricBf16,
    OtherStep,
    PeerResult,
    importable,
)
from peer_timing import REFERENCE, Field, heat, ratios

import vivace
from vivace.errors import ChildFailed, JobError, Refused
from vivace.job import load
from vivace.machine import Machine
from vivace.measuring.budget import BUDGETS, parse_budget
from vivace.plan import Plan
from vivace.processes.launch import Child, Source, preload
from vivace.technique.registry import find
from vivace.verifying.verifier import Verifier

HERE = Path(__file__).resolve().parent
JOBS = (
    "resnet18",
    "resnet50",
    "mobilenet_v3_small",
    "convnext_tiny",
    "vit_small",
    "gpt",
    "bert",
    "lstm",
    "loader_bound",
    "detector",
    "bert_padded",
    "recommender",
)
NAMES = {
    "vivace": "Vivace",
    "peer": "pytorch-autotune",
    "fabric": "Fabric bf16-mixed",
    "accelerate": "Accelerate bf16",
    "compile": "torch.compile",
}
PACKAGES = ("pytorch-autotune==2.0.0", "lightning-fabric==2.6.6", "accelerate==1.15.0")
HEATS = 3
CONDITIONS = (
    "pytorch-autotune is given the job's loss and optimizer; by itself it would train with AdamW(lr=0.001).",
    "It cannot clip gradients: where the job does, the loop runs that its README offers beside result.step.",
    "Where one of its trials overruns, its search is interrupted at 1.5 times the budget and keeps its best.",
    "Its result is restored from its own cache in a fresh process; Vivace's plan is opened in one, too.",
    "It, Fabric, Accelerate and torch.compile stand on PyTorch's defaults, Vivace and the reference on "
    "strict fp32. The ruler holds all of them against strict fp32.",
    "Whoever is not on turn is stopped with all its processes, so that no loader prefetches for free.",
)
NOTES = {
    "cpu": "On a CPU this table flatters Vivace: pytorch-autotune is made for CUDA. Here it needs "
    "device='cpu', never tries bf16 or a fused optimizer, and its TF32 does nothing. The CUDA table counts.",
    "cuda": "",
}


def main() -> None:
    """Compare on the named jobs, or on all that today's record lacks; one record for all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--budget", default="fast", help="fast (120 s) or seconds, for each of both searches")
    chosen = parser.parse_args()
    asked = _record.named_jobs(parser, chosen.jobs, JOBS)
    try:
        seconds = parse_budget(chosen.budget)
    except vivace.VivaceError as error:
        parser.error(str(error))
    if seconds is None:
        parser.error("auto gives each search another budget: name one")
    if not importable(PEER):
        enter_environment()
    machine = vivace.inspect()
    record, same = opened(machine), ("machine", "versions", "vivace")
    today, before = _record.of_today(record, same), _record.newest_like(record, same)
    if today is not None:
        record = today
    elif chosen.jobs and before is not None:  # its other entries stay, so it keeps its date
        record = before
    usual = seconds == BUDGETS["fast"]
    entries = record["jobs"] if usual else record.setdefault("longer", {}).setdefault(f"{seconds:.0f}", {})
    code = _record.where()["vivace"]
    if others := [name for name, entry in entries.items() if entry.get("vivace") != code]:
        told = f"{', '.join(others)}: measured with other code, and left as it is unless named"
        print(told, file=sys.stderr)
    for name in asked if chosen.jobs else [name for name in JOBS if name not in entries]:
        begin = time.monotonic()
        entry = compared(f"peer_jobs:{name}", machine, seconds)
        command = f"scripts/bench peer {name} --budget {chosen.budget}"
        entry |= {"date": _record.today(), "command": command, "vivace": code}
        entry["seconds"] = time.monotonic() - begin
        entries[name] = entry
        for mean in ("vivace_against_best", "vivace_against_peer"):
            record[mean] = geometric_mean([job[mean] for job in record["jobs"].values()])
        _record.write(record)
        print(line(name, entry), flush=True)
    print("\n" + table(record))


def say(words: str) -> None:
    """Progress, on standard error."""
    print(f"{datetime.datetime.now():%H:%M:%S} {words}", file=sys.stderr, flush=True)


def opened(machine: Machine) -> dict[str, Any]:
    """A record without jobs yet."""
    record = _record.opened("peer", "scripts/bench peer", machine)
    for package in PACKAGES:
        name = package.partition("==")[0]
        try:
            record["versions"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            record["versions"][name] = "not installed"
    return {
        **record,
        "conditions": CONDITIONS,
        "note": NOTES[machine.device.kind],
        "vivace_against_best": None,
        "vivace_against_peer": None,
        "jobs": {},
        "longer": {},  # seconds of another budget: jobs, which the mean leaves out
    }


def compared(reference: str, machine: Machine, seconds: float) -> dict[str, Any]:
    """One job's entry: both searches for `seconds`, then the interleaved run, then the ruler."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "compiled"),
            "PYTORCH_AUTOTUNE_CACHE": str(Path(folder) / "peer.json"),
        }
        rows = {name: {"status": "measured", "reason": ""} for name in NAMES}
        say(f"{reference}: Vivace searches")
        rows["vivace"] |= tuned(reference, seconds, Path(folder) / "tune")
        say("pytorch-autotune searches")
        rows["peer"] |= searched(reference, seconds, environment)
        field = contestants(reference, Plan.from_dict(rows["vivace"]["plan"]), rows)
        if (
            machine.device.kind == "cpu"
        ):  # importing them may touch a GPU, which no process may before it forks
            preload([module for module in (PEER, *FABRICS, "accelerate") if importable(module)])
        job = load(reference)
        source = Source(job)
        rows["peer"]["step"] = (
            "result.step" if job.on_gradients is None else "own loop with result.autocast()"
        )
        heats = []
        for seed in range(1, HEATS + 1):
            say(f"heat {seed} of {HEATS}: {', '.join(field)}")
            heats.append(heat(source, machine, field, environment, seed, seconds / 2 / HEATS))
        for name, found in ratios(heats, REFERENCE).items():
            rows[name] |= found
        say("the ruler judges")
        for name, verdict in judged(source, machine, field, environment, seconds / 4).items():
            rows[name]["verdict"] = verdict
    speeds = [1 / turn[REFERENCE] for done in heats for turn in done.turns]
    best = fastest_other(rows)
    return {
        "strict_fp32_samples_per_second": sorted(speeds)[len(speeds) // 2],
        "best": best,
        "vivace_against_best": ratios(heats, best).get("vivace", {}).get("ratio") if best else None,
        "vivace_against_peer": ratios(heats, "peer").get("vivace", {}).get("ratio"),
        "turns": [len(done.turns) for done in heats],
        "disturbed": [done.disturbed for done in heats],
        "contestants": rows,
    }


def tuned(reference: str, seconds: float, folder: Path) -> dict[str, Any]:
    """What Vivace finds, and how."""
    result = _record.tuned(reference, seconds, folder)
    fields = ("techniques", "status", "reason", "ratio", "warmup_seconds", "predicted", "role")
    trials = [trial.to_dict() for trial in result.trials]
    return {
        "plan": result.plan.to_dict(),
        "tuner_reason": result.reason,
        "tuner_seconds": result.seconds,
        "trials": [{field: trial[field] for field in fields} for trial in trials],
    }


def searched(reference: str, seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the peer finds, and how; it stays in the peer's cache."""
    if not importable(PEER):
        return {"status": "not installed", "reason": "pytorch-autotune is not installed"}
    begin = time.monotonic()
    try:
        with Child("peer_child:PeerSearch", Source(reference), environment=dict(environment)) as child:
            return child.ask("run", 10 * seconds + 600, seconds=seconds)
    except (ChildFailed, JobError) as error:
        return {"status": "failed", "reason": str(error), "tuner_seconds": time.monotonic() - begin}


def contestants(reference: str, plan: Plan, rows: dict[str, dict[str, Any]]) -> Field:
    """Plans to time, and whether on top of strict fp32: what a person would run otherwise is not.

    What cannot run is left out, and its row says why.
    """
    others: dict[str, type[OtherStep]] = {
        "peer": PeerResult,
        "fabric": FabricBf16,
        "accelerate": AccelerateBf16,
    }
    field: Field = {REFERENCE: (Plan(), True), "vivace": (plan, True)}
    for name, kind in others.items():
        if not any(map(importable, kind.modules)):
            rows[name] |= {"status": "not installed", "reason": f"{kind.label} is not installed"}
        elif rows[name]["status"] == "measured":
            settings = {"job": reference} if kind is PeerResult else {}
            field[name] = (Plan([kind(**settings)]), False)
    return {**field, "compile": (Plan([find("compile")()]), False)}


def judged(
    source: Source, machine: Machine, field: Field, environment: Mapping[str, str], seconds: float
) -> dict[str, dict[str, Any]]:
    """The ruler's verdict on every contestant; a crash of the ruler's process is one of that contestant."""
    verdicts: dict[str, dict[str, Any]] = {}
    verifier: Verifier | None = None
    for name, (plan, _) in field.items():
        if name == REFERENCE:
            continue
        verifier = verifier or Verifier(source, machine, environment=dict(environment))
        try:
            found = verifier.judge(plan, seconds=seconds).to_dict()
            fields = (
                "kept",
                "promise",
                "loss_envelopes",
                "displacement_envelopes",
                "steps",
                "seeds",
                "reason",
            )
            verdicts[name] = {key: found[key] for key in fields}
        except (Refused, ChildFailed, JobError) as error:
            verdicts[name] = {"kept": None, "reason": f"it could not be judged: {error}"}
            verifier.close()
            verifier = None
    if verifier is not None:
        verifier.close()
    return verdicts


def fastest_other(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Who of all but Vivace is fastest, whatever the ruler says of it; empty where nobody could be timed."""
    found = {name: row["ratio"]["estimate"] for name, row in rows.items() if row.get("ratio")}
    found.pop("vivace", None)
    return max(found, key=lambda name: found[name], default="")


def geometric_mean(found: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    """The geometric mean of ratios, with the interval of a mean of independent ones; None where none is."""
    known = [ratio for ratio in found if ratio]
    if not known:
        return None
    logs = [{key: math.log(value) for key, value in ratio.items()} for ratio in known]
    middle = sum(log["estimate"] for log in logs) / len(logs)
    below = math.sqrt(sum((log["estimate"] - log["low"]) ** 2 for log in logs)) / len(logs)
    above = math.sqrt(sum((log["high"] - log["estimate"]) ** 2 for log in logs)) / len(logs)
    return {"estimate": math.exp(middle), "low": math.exp(middle - below), "high": math.exp(middle + above)}


def line(name: str, entry: dict[str, Any]) -> str:
    """One job in words: each contestant's ratio to strict fp32 and what the ruler says."""
    cells = [f"{NAMES[key]} {cell(row)}" for key, row in entry["contestants"].items()]
    return f"{name}: Vivace against {best(entry)}; {'; '.join(cells)}"


def best(entry: dict[str, Any]) -> str:
    """``the best one-liner, Fabric bf16-mixed, 1.10x (1.08-1.12)``."""
    known = f"the best one-liner, {NAMES[entry['best']]}," if entry["best"] else "one-liners"
    return f"{known} {interval(entry['vivace_against_best'])}"


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table, with its note."""
    columns = ["job", "Vivace / best one-liner", "Vivace / pytorch-autotune", *NAMES.values()]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    longer = record.get("longer", {})
    rows = {f"{name}, {seconds} s": job for seconds, jobs in longer.items() for name, job in jobs.items()}
    for name, entry in (record["jobs"] | rows).items():
        cells = [name, *(interval(entry[f"vivace_against_{other}"]) for other in ("best", "peer"))]
        lines.append(f"| {' | '.join([*cells, *map(cell, entry['contestants'].values())])} |")
    behind = [name for name, entry in record["jobs"].items() if behind_beyond_noise(entry)]
    lines += [f"\nVivace is slower beyond noise on: {', '.join(behind)}"] if behind else []
    lines.append(f"\nGeometric mean over the best one-liner: {interval(record['vivace_against_best'])}")
    lines.append(f"Geometric mean over pytorch-autotune: {interval(record['vivace_against_peer'])}")
    return "\n".join([*lines, *filter(None, [record["note"]])])


def behind_beyond_noise(entry: dict[str, Any]) -> bool:
    """Is Vivace's result known to be slower than the best one-liner?"""
    return bool(entry["vivace_against_best"]) and entry["vivace_against_best"]["high"] < 1


def cell(row: dict[str, Any]) -> str:
    """``1.52x (1.50-1.54), same model`` or why there is no figure."""
    verdict = row.get("verdict") or {}
    words = {True: "same model", False: "NOT the same model", None: "not judged"}[verdict.get("kept")]
    return f"{interval(row['ratio'])}, {words}" if row.get("ratio") else f"{row['status']}: {row['reason']}"


def interval(ratio: dict[str, float] | None) -> str:
    """``1.52x (1.50-1.54)``."""
    return f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "not measured"


def enter_environment() -> None:
    """Go on inside .venv-peer; where it cannot be made, go on here, and the rows say what is missing."""
    folder = HERE.parent / ".venv-peer"
    python = folder / "bin" / "python"
    if Path(sys.prefix).resolve() == folder.resolve():
        return
    try:
        make_environment(folder, python)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"without pytorch-autotune, because .venv-peer could not be made: {error}", file=sys.stderr)
        return
    os.execv(python, [str(python), __file__, *sys.argv[1:]])


def make_environment(folder: Path, python: Path) -> None:
    """An environment with this one's versions of everything, and the peers: by uv where it is present."""
    stamp = folder / "peer-stamp"
    mine = sorted(
        f"{found.name}=={found.version}"
        for found in importlib.metadata.distributions()
        if found.name and found.name != "vivace"
    )
    wanted = "\n".join([sys.version, *PACKAGES, *mine])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    print("making .venv-peer", file=sys.stderr)
    uv = shutil.which("uv")
    make = [uv, "venv", "--quiet", "--clear"] if uv else [sys.executable, "-m", "venv", "--clear"]
    into = [uv, "pip", "install", "--quiet", "--python", str(python)]
    install = into if uv else [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*make, *(["--python", sys.executable] if uv else []), str(folder)], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(mine))
        constraints.flush()
        what = ["-e", f"{HERE.parent}[recipes]", *PACKAGES]
        subprocess.run([*install, "-c", constraints.name, *what], check=True)
    stamp.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
