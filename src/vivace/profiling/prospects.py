"""What techniques could bring to the step that was seen, by the bounds on their cards. Torch-free."""

from __future__ import annotations

from typing import Any

from vivace.ledger import Profile
from vivace.profiling.seen import Seen
from vivace.technique import registry

WORTH_A_TRIAL = 1.05


def prospects(seen: Seen) -> list[dict[str, Any]]:
    """Techniques whose card allows a gain on this device, the largest first; `tune` measures them."""
    profile = as_profile(seen)
    rows = []
    for offer in registry.offers(profile, seen.machine):
        card, (low, high) = offer.cls.card, offer.gain
        if seen.device in card.devices and high >= WORTH_A_TRIAL:
            gain = {"low": round(low, 3), "high": round(high, 3)}
            rows.append({"technique": offer.cls.name, "summary": card.summary, "gain": gain})
    return sorted(rows, key=lambda row: -row["gain"]["high"])


def as_profile(seen: Seen) -> Profile:
    """The same facts in the form that technique cards read."""
    record, shares = seen.record, seen.shares
    operators = seen.operator_seconds
    total = sum(operators.values()) or 1.0
    loader = seen.loader
    optimizers = record.get("optimizers") or []
    dtypes = record.get("parameter_dtypes") or []
    return Profile(
        device=seen.device,
        step_seconds=seen.step_seconds,
        shares={phase: shares[phase] for phase in ("data", "place", "forward", "backward", "update")},
        operator_shares={name: seconds / total for name, seconds in operators.items()},
        num_operators=seen.trace.get("num_operators", 0),
        page_faults=record.get("page_faults") or 0.0,
        parameter_bytes=record.get("parameter_bytes") or 0,
        peak_bytes=record.get("held_bytes", 0) + seen.trace.get("rise_bytes", 0),
        features={
            **(record.get("features") or {}),
            "batch_size": int(record.get("samples") or 1),
            "dtype": dtypes[0] if dtypes else None,
            "optimizer": optimizers[0] if optimizers else None,
            "num_parameters": record.get("num_parameters"),
            "num_threads": seen.flags.get("threads"),
            "own_step": False,
            "loader": {
                "is_dataloader": bool(loader),
                "num_workers": loader.get("num_workers"),
                "batch_size": loader.get("batch_size"),
                "dataset_length": loader.get("dataset_length"),
            },
        },
    )
