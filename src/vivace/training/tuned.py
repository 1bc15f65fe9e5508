"""What `tune` found of a plan that is trained now: its ledger lies beside the plan's file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vivace.errors import FolderError
from vivace.job import Batch, Job, without_folder
from vivace.ledger import Ledger
from vivace.plan import Plan
from vivace.session.session import Session
from vivace.training.course import differences, sources_of


def consists_of(job: Job, session: Session, loader: Iterable[Batch]) -> dict[str, Any]:
    """What a job is, whatever the plan of its session, as JSON types: digests of its ``sources`` (see
    `vivace.training.course.sources_of`), and one of the ``shapes`` of its weights and the batch size.
    """
    shapes = [
        (name, tuple(tensor.shape))
        for model in session.build.models
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    ]
    size = getattr(loader, "batch_size", None)
    text = repr((shapes, getattr(getattr(loader, "batch_sampler", None), "batch_size", size)))
    return {"sources": sources_of(job), "shapes": hashlib.sha256(text.encode()).hexdigest()[:12]}


def found_by_tune(file: Path | None, plan: Plan, job: str, fingerprint: str) -> dict[str, Any]:
    """The plan's ``speedup`` and ``verdict`` on the same machine, with that ``plan`` and ``machine``, and the
    ``job`` that was tuned, for the run's checkpoints; empty where none is known, or the plan is of no `file`.

    ``doubt`` is why they are not of the job of this reference; see `doubt_of`. A ledger that cannot be read
    says nothing: the training does not depend on it.
    """
    if file is None:
        return {}
    try:
        records = Ledger((file if file.is_dir() else file.parent) / "ledger.jsonl").read()
    except (OSError, FolderError):
        return {}
    last = {record["record"]: record for record in records if record.get("record") in ("run", "result")}
    run, result = last.get("run", {}), last.get("result", {})
    try:
        if not job or run["machine"]["fingerprint"] != fingerprint or result["plan"] != plan.to_dict():
            return {}
        tuned = {key: run["job"].get(key) for key in ("name", "sources", "shapes")}
        same = without_folder(tuned["name"]) == without_folder(job)
        doubt = "" if same else f"the job that it tuned is {tuned['name']}"
        verdict = {key: value for key, value in (result["verdict"] or {}).items() if key != "curves"}
        kept = {"plan": plan.to_dict(), "machine": fingerprint, "job": tuned, "doubt": doubt}
        return {**kept, "speedup": result["speedup"], "verdict": verdict}
    except (KeyError, TypeError, AttributeError):  # of another version
        return {}


def doubt_of(kept: dict[str, Any], now: dict[str, Any]) -> str:
    """Why what `found_by_tune` returned is not of the job that is trained now; empty where it is.

    Args:
        now: what that job is, as `consists_of` has it.
    """
    if "job" not in kept:  # of a run that an older Vivace began, whose job was compared when it went on
        return ""
    then = kept["job"] or {}
    if kept.get("doubt") or not isinstance(then.get("sources"), dict):
        return kept.get("doubt") or "its ledger does not tell what the job was, as an older Vivace wrote it"
    if changed := differences(then["sources"], now["sources"]):
        return f"{', '.join(changed[:3])} has changed since"
    if then.get("shapes") != now["shapes"]:
        return "the shapes of the model's weights or the batch size have changed since"
    return ""


def of_plan(kept: dict[str, Any], plan: Plan, fingerprint: str) -> dict[str, Any]:
    """The ``speedup`` and ``verdict`` in what `found_by_tune` returned, where they are of this plan and
    machine: a run may have left its plan since, or have been carried to another machine.
    """
    if (kept.get("plan"), kept.get("machine")) != (plan.to_dict(), fingerprint):
        return {}
    return {key: kept.get(key) for key in ("speedup", "verdict")}
