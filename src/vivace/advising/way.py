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
        loaded = Plan.load(plan)
        nhwc = any(technique.name == "channels_last" for technique in loaded.techniques)
        found, how = _of_plan(loaded, subject.precision)
        how = f"predicted {how}; what else the plan brings comes on top"
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


def in_words(precision: str) -> str:
    """A precision as predictions name it, for people."""
    kind, _, dtype = precision.partition("_")
    return ("mixed precision" + (dtype and f" with {dtype}")) if kind == "amp" else precision


def _of_plan(plan: Plan, own: str) -> tuple[str, str]:
    """The precision of a plan's cards for a job whose `own` precision it may leave as it is, and a sentence
    on it."""
    slot, stage = "precision", Stage.PRECISION
    half = [one for one in plan.techniques if one.card.slot == slot and one.card.stage == stage]
    if half and own in WEIGHT_BYTES:  # neither autocast nor copies in half precision change such weights
        name = half[0].name
        return own, f"in {own}, the job's own; the plan's {name} is for weights in fp32 and not counted"
    if half:
        found = "amp_bf16" if half[0].card.unit_roundoff == UNIT_ROUNDOFF["bfloat16"] else "amp_fp16"
        return found, f"as the plan says, in {in_words(found)}"
    if own not in ("fp32", "tf32"):  # of the weights themselves, or of an autocast of the job's own
        return own, f"in {in_words(own)}, the job's own, which the plan leaves"
    cards = [technique.card for technique in plan.techniques]
    if any(card.stage == Stage.PROCESS and card.unit_roundoff == UNIT_ROUNDOFF["tf32"] for card in cards):
        return "tf32", "as the plan says, in tf32"
    return "fp32", "in strict fp32, since the plan names no other precision"
