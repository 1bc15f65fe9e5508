"""What `tune` found of a plan that is trained now: its ledger lies beside the plan's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.errors import FolderError
from vivace.ledger import Ledger
from vivace.plan import Plan


def found_by_tune(file: Path, plan: Plan, job: str, fingerprint: str) -> dict[str, Any]:
    """The plan's ``speedup`` and ``verdict``, of the same job on the same machine, with that ``plan`` and
    ``machine``, for the run's checkpoints; empty where none is known.

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
        kept = {"plan": plan.to_dict(), "machine": fingerprint}
        return {**kept, "speedup": result["speedup"], "verdict": verdict}
    except (KeyError, TypeError, AttributeError):  # of another version
        return {}


def of_plan(kept: dict[str, Any], plan: Plan, fingerprint: str) -> dict[str, Any]:
    """The ``speedup`` and ``verdict`` in what `found_by_tune` returned, where they are of this plan and
    machine: a run may have left its plan since, or have been carried to another machine.
    """
    if (kept.get("plan"), kept.get("machine")) != (plan.to_dict(), fingerprint):
        return {}
    return {key: kept.get(key) for key in ("speedup", "verdict")}
