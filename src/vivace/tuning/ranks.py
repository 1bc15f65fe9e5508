"""What changes where several ranks train together: each plan needs what makes them train one model."""

from __future__ import annotations

import dataclasses
from typing import Any

from vivace.errors import InputError
from vivace.ledger import Profile
from vivace.plan import Plan
from vivace.technique import Numerics, Technique
from vivace.training.crew import needed_by


def joined(plan: Plan, other: Plan) -> Plan:
    """`plan` with the techniques of `other`, which displace those of the same name or slot."""
    for technique in other.techniques:
        plan = plan.adding(technique)
    return plan


def chosen(plan: Plan, needed: Plan) -> tuple[Technique, ...]:
    """The techniques of a plan that are not needed, or that have other settings than what is needed."""
    return tuple(one for one in plan.techniques if one not in needed.techniques)


def here(law: dict[str, Any]) -> dict[str, Any]:
    """Of what was measured on several ranks and follows for other numbers, the part about those ranks."""
    return next(row for row in law["expected"] if row["measured"])


def of_ranks(profile: Profile, measured: dict[str, Any], num_here: int) -> Profile:
    """The profile of one rank's part as that of all of them together.

    Args:
        measured: what `Law.on` says of the ranks that were measured.
        num_here: how many of them share this machine.
    """
    step = measured["step_seconds"]
    exchange = measured["seconds"]["communication"] / step
    shares = {part: share * (1 - exchange) for part, share in profile.shares.items()}
    num = measured["ranks"]
    features = profile.features | {"ranks": num, "ranks_here": num_here, "loading_limit": ""}
    return dataclasses.replace(
        profile, step_seconds=step, shares=shares | {"communication": exchange}, features=features
    )


def require_searchable(num_ranks: int, allow: Numerics) -> None:
    """Raises InputError where a search on so many ranks was asked for what it cannot do."""
    if needed_by(num_ranks).promise > allow:
        raise InputError(
            f"{num_ranks} ranks average their gradients, which rounds, and {allow.name} is allowed: give "
            "--allow rounding, or start tune without torchrun"
        )


def require_allowed(num_ranks: int, promise: Numerics, allow: Numerics) -> None:
    """Raises InputError where the job on so many ranks, without any plan, promises more than is allowed."""
    if promise > allow:
        semantic = promise == Numerics.SEMANTICS
        why = " (BatchNorm takes its statistics over one rank's samples)" if semantic else ""
        raise InputError(
            f"on {num_ranks} ranks this job promises {promise.name} whatever the plan{why}, and {allow.name} "
            f"is allowed: give --allow {promise.name.lower()}, or start tune without torchrun"
        )
