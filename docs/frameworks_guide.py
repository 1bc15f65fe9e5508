"""Write the tables of the guide to frameworks and compute APIs from the newest records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_guide import OUT, table

from vivace import words
from vivace.inspection.table import API_KEYS, ceiling_in_words

RECORDS = Path(__file__).resolve().parent.parent / "records"
NOTHING = "No machine has been measured yet: `scripts/bench {}` writes the record.\n"


def newest(benchmark: str) -> list[dict[str, Any]]:
    """The newest record of each machine."""
    folders = sorted(folder for folder in (RECORDS / benchmark).glob("*") if folder.is_dir())
    found = [sorted(folder.glob("*.json")) for folder in folders]
    return [json.loads(files[-1].read_text(encoding="utf-8")) for files in found if files]


def section(record: dict[str, Any]) -> str:
    """One machine: a table for each job, or of what could not take part, the reason."""
    machine = record["machine"]
    parts = [
        f"Measured on {record['date']}: {machine['device']}, {machine['cores']} cores, torch "
        f"{record['versions']['torch']}; {_pins(record['pins'])}. Load of the machine "
        f"before: {record['load_before']:.1f}; where it is not near 0, others used it meanwhile.\n"
    ]
    for job in dict.fromkeys(row["job"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["job"] == job]
        heads = (
            "job " + job,
            "times PyTorch eager",
            "samples/s",
            "first step",
            "compiling",
            f"to {words.percent(record['accuracy'])}",
            "memory",
            "lines",
            "same",
        )
        parts.append(table(heads, [_cells(row, record["allowed_envelopes"]) for row in rows]))
        parts += [f"{row['contender']}: {row['reason']}\n" for row in rows if row["status"] != "measured"]
    return "\n".join(parts)


def _pins(pins: dict[str, dict[str, str]]) -> str:
    found = {name: version for packages in pins.values() for name, version in packages.items()}
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items()))


def _cells(row: dict[str, Any], allowed: float) -> list[str]:
    if row["status"] != "measured":
        return [row["contender"], "not measured", *[""] * 7]
    ratio, envelopes = row["ratio"], row.get("envelopes")
    if row["setting"] == "tuned":
        same = "proven by tune"
    elif row["setting"] == "strict":
        same = f"yes: {envelopes:.2g} of {allowed:.0f}"
    else:
        same = "not fp32"
    return [
        row["contender"],
        f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})",
        words.number(row["samples_per_second"]),
        words.duration(row["to_first_step_seconds"]),
        words.duration(row["compile_seconds"]),
        _reached(row),
        words.size(row["peak_bytes"]),
        str(row["lines"]),
        same,
    ]


def _reached(row: dict[str, Any]) -> str:
    if row["accuracy_seconds"] is None:
        return f"not in {row['accuracy_steps']} steps"
    return f"{words.duration(row['accuracy_seconds'])}, {row['accuracy_steps']} steps"


def apis_section(record: dict[str, Any]) -> str:
    """One machine: what each API reached beside torch, and why the others reached nothing."""
    machine = record["machine"]
    head = f"Measured on {record['date']}: {machine['device']}, {machine['cores']} cores.\n"
    columns = {f"torch: {kind}": facts for kind, facts in record["torch"].items()} | record["apis"]
    rows = [
        [name, *(ceiling_in_words(key, facts[key]["value"]) if key in facts else "" for key in API_KEYS)]
        for name, facts in columns.items()
    ]
    heads = ("through", *(key.replace("_", " ") for key in API_KEYS))
    steps = [f"- {name}: {text}" for name, text in record["apis_next"].items()]
    return "\n".join([head, table(heads, rows), *steps, ""])


def main() -> None:
    """Write the tables."""
    for benchmark, made in (("frameworks", section), ("apis", apis_section)):
        found = [made(record) for record in newest(benchmark)]
        text = "\n".join(found) or NOTHING.format(benchmark)
        (OUT / f"{benchmark}.inc").write_text(text, encoding="utf-8")
