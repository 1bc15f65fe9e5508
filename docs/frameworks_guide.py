"""Write the tables of the guide to frameworks and compute APIs from the newest records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_guide import OUT, table

from vivace import words

RECORDS = Path(__file__).resolve().parent.parent / "records" / "frameworks"
NOTHING = "No machine has been measured yet: `scripts/bench frameworks` writes the record.\n"


def newest() -> list[dict[str, Any]]:
    """The newest record of each machine."""
    folders = sorted(folder for folder in RECORDS.glob("*") if folder.is_dir())
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
        return [row["contender"], "not measured", *[""] * 6]
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
        words.size(row["peak_bytes"]),
        str(row["lines"]),
        same,
    ]


def main() -> None:
    """Write the tables."""
    found = [section(record) for record in newest()]
    (OUT / "frameworks.inc").write_text("\n".join(found) or NOTHING, encoding="utf-8")
