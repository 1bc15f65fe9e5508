"""Predicted memory of training steps against torch's own CUDA allocator, without a GPU; writes a record.

    scripts/bench gpu_memory [NETWORK ...]

Each network under each plan on the stand-in of tests/cuda_stand_in, which needs a C compiler. Predicted is
what `vivace.memory.predict` says without a GPU; real is what torch's allocator hands out and reserves, though
not what cuDNN takes. Demanded: the peak within 3 %, what is reserved within 8 %.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import _peaks
import _record

import vivace

HERE = Path(__file__).resolve().parent
DEMANDED = {"peak": 3.0, "reserved": 8.0}  # percent


def main() -> None:
    """Compare the named networks, or all of them, and record the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(_peaks.NETWORKS))
    chosen = parser.parse_args()
    names = _record.named_jobs(parser, chosen.networks, list(_peaks.NETWORKS))
    stand_in, rows = _stand_in(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, stand_in.opened(Path(folder)) as machine:
        for name in names:
            asked = json.dumps([[name, plan] for plan in _peaks.PLANS])
            printed = machine.python((HERE / "_peaks.py").read_text(), asked, HERE)
            rows += json.loads(printed.splitlines()[-1])
            for row in rows[-len(_peaks.PLANS) :]:
                print(_line(row), flush=True)
    if failed := sum("failed" in row for row in rows):
        sys.exit(f"{failed} of {len(rows)} pairs failed: nothing is recorded")
    summary = _summary(rows)
    print(json.dumps(summary))
    if not chosen.networks:
        record = _record.opened("gpu_memory", "scripts/bench gpu_memory", vivace.inspect())
        _record.write({**record, "demanded_percent": DEMANDED, **summary, "rows": rows})


def _stand_in() -> ModuleType:
    """The module that builds the stand-in."""
    path = HERE.parent / "tests" / "cuda_stand_in" / "conftest.py"
    spec = importlib.util.spec_from_file_location("cuda_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(row: dict[str, Any]) -> str:
    title = f"{row['network']:18} {row['plan']:13}"
    if "failed" in row or "refused" in row:
        return f"{title} {row.get('refused') or 'FAILED: ' + row['failed']}"
    sizes = (
        f"{key} {row[f'predicted_{key}'] / 2**20:8.1f} of {row[f'real_{key}'] / 2**20:8.1f} MiB "
        f"{row[f'error_percent_{key}']:+6.2f} %"
        for key in DEMANDED
    )
    return f"{title} {'   '.join(sizes)}"


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many pairs there are, the largest errors, and how many pairs are within what is demanded."""
    found: dict[str, Any] = {"pairs": sum("refused" not in row for row in rows)}
    for key, demanded in DEMANDED.items():
        errors = [abs(row[f"error_percent_{key}"]) for row in rows if "refused" not in row]
        found[f"worst_percent_{key}"] = max(errors)
        found[f"within_{key}"] = sum(error <= demanded for error in errors)
    return found


if __name__ == "__main__":
    main()
