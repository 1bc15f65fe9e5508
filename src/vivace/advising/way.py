"""In what precision and memory order a job is predicted: a plan's, those asked for, or the usual ones.
Imports no torch."""

from __future__ import annotations

import os

from vivace.advising.source import WEIGHT_BYTES, Subject
from vivace.errors import InputError
from vivace.plan import Plan
from vivace.technique.contract import UNIT_ROUNDOFF, Stage

MIXED = ("auto", "amp", "amp_fp16", "amp_bf16")  # in which convolutions are usually run on channels last


def way(
    subject: Subject, precision: str, channels_last: bool | None, plan: str | os.PathLike[str] | None
) -> tuple[str, bool, str]:
    """Precision, memory order, and a sentence on both: those of a plan, those asked for, or the usual
    ones."""
    if plan is not None:
        if precision != "auto" or channels_last is not None:
            raise InputError(
                "--plan says precision and memory order: give no --precision or --channels-last beside it"
            )
        found, nhwc = _of_plan(Plan.load(plan), subject.precision)
        how = f"predicted as the plan says, in {found}; what else it brings comes on top"
        return ("profiled" if found == subject.precision else found), nhwc, how
    own = precision == "auto" and subject.precision in WEIGHT_BYTES
    meant = "profiled" if own else precision
    nhwc = usual_order(subject, meant) if channels_last is None else channels_last
    order = "; images channels last" if nhwc else ""
    if precision != "auto":
        return precision, nhwc, f"predicted in {precision}, as asked for{order}"
    if own:
        return precision, nhwc, f"predicted in {subject.precision}, the job's own{order}"
    usual = "in mixed precision" + (", images channels last" if nhwc else "")
    return precision, nhwc, f"predicted {usual}, as is usual; --precision or --plan says otherwise"


def usual_order(subject: Subject, precision: str) -> bool:
    """Are images channels last? In mixed precision where convolutions do most of the work; in other numbers
    as the job was profiled."""
    return subject.demand.convolutional if precision in MIXED else subject.channels_last


def _of_plan(plan: Plan, own: str) -> tuple[str, bool]:
    """The precision and memory order of a plan's cards for a job whose `own` precision it may leave as it
    is."""
    nhwc = any(technique.name == "channels_last" for technique in plan.techniques)
    cards = [technique.card for technique in plan.techniques]
    half = [card.unit_roundoff for card in cards if card.slot == "precision"]
    if half and own not in ("fp16", "bf16"):
        return ("amp_bf16" if max(half) == UNIT_ROUNDOFF["bfloat16"] else "amp_fp16"), nhwc
    if own not in ("fp32", "tf32"):  # of the weights themselves, or of an autocast of the job's own
        return own, nhwc
    tf32 = any(card.stage == Stage.PROCESS and card.unit_roundoff == UNIT_ROUNDOFF["tf32"] for card in cards)
    return ("tf32" if tf32 else "fp32"), nhwc
