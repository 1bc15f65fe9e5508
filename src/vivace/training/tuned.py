"""What `tune` found of a plan that is trained now: its ledger lies beside the plan's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.errors import FolderError
from vivace.ledger import Ledger
from vivace.plan import Plan


def found_by_tune(file: Path, plan: Plan, job: str, fingerprint: str) -> dict[str, Any]:
    """The plan's ``speedup`` and ``verdict``, of the same job on the same machine; empty where none is known.

    A ledger that cannot be read says nothing: the training does not depend on it.
    """
    try:
        records = Ledger(file.parent / "ledger.jsonl").read()
    except (OSError, FolderError):
        return {}
    last = {record["record"]: record for record in records if record.get("record") in ("run", "result")}
    run, result = last.get("run", {}), last.get("result", {})
    try:
        same = (run["job"]["name"], run["machine"]["fingerprint"]) == (job, fingerprint)
        if not same or result["plan"] != plan.to_dict():
            return {}
        verdict = {key: value for key, value in (result["verdict"] or {}).items() if key != "curves"}
        return {"speedup": result["speedup"], "verdict": verdict}
    except (KeyError, TypeError, AttributeError):  # of another version
        return {}
