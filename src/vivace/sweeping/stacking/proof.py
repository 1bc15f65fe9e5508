"""Is each row of a stack the same model as alone? Held against the row's own first steps, by the ruler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from vivace.errors import Refused
from vivace.sweeping.stacking.rows import Row
from vivace.sweeping.stacking.stack import Stack
from vivace.verifying.displacement import Outcome, State, distances, identical, resolution
from vivace.verifying.shadow import FINEST_ROUNDOFF, Rounding
from vivace.verifying.states import clone, decay_of, state_of
from vivace.watching.findings import STEP_LIMIT, Envelopes, judged

STEPS = 3
SHADOWS = 3
_NO_OUTPUTS = torch.zeros(1)


@dataclasses.dataclass(frozen=True)
class Proof:
    """`exact`: losses, weights and buffers are bit-identical; else `score` of `STEP_LIMIT` envelopes is the
    worst figure, named `figure`.
    """

    exact: bool
    score: float
    figure: str

    @property
    def sentence(self) -> str:
        """In a few words."""
        if self.exact:
            return "exact: bit-identical"
        return f"rounding: worst {self.score:.2g} of {STEP_LIMIT:.0f} allowed ({self.figure})"


def worst(proofs: Sequence[Proof]) -> Proof:
    """The one that is farthest from exact."""
    return max(proofs, key=lambda proof: (not proof.exact, proof.score))


def prove(stack: Stack, joining: Sequence[Row]) -> dict[int, Proof | Refused]:
    """Take the first steps of the joining rows alone and in the stack, which is afterwards as it was before.

    By the number of each joining row, what was found; Refused with what is not the same. Raises Refused where
    the stack as a whole cannot take a step.
    """
    saved = stack.saved()
    found: dict[int, Proof | Refused] = {}
    alone: dict[int, tuple[Outcome, Envelopes, State, dict[str, float], Any]] = {}
    for row in joining:
        try:
            alone[row.number] = _alone(stack, row, saved)
        except Refused as refused:
            found[row.number] = refused
    try:
        fused = _fused(stack, [row for row in joining if row.number in alone])
    finally:
        stack.put_back(saved)
    for row in joining:
        if row.number in alone:
            found[row.number] = _compared(row, fused[row.number], *alone[row.number])
    return found


def _alone(stack: Stack, row: Row, saved: Any) -> tuple[Outcome, Envelopes, State, dict[str, float], Any]:
    """The row's own steps, how far rounding alone moves them, and where its stream then stands."""
    before, decay = state_of(row.session), decay_of(row.session)
    batches = list(islice(row.batches(row.epoch), STEPS))
    reference = _steps(stack, row, batches)
    drawn = row.streams["cuda" if row.device.type == "cuda" else "torch"]
    stack.put_back(saved)
    envelopes = Envelopes()
    for seed in range(SHADOWS):
        with Rounding(FINEST_ROUNDOFF, seed=seed, halves={}):
            shadow = _steps(stack, row, batches)
        stack.put_back(saved)
        envelopes.add(distances(shadow, reference, before, decay, STEPS))
    return reference, envelopes, before, decay, drawn


def _steps(stack: Stack, row: Row, batches: Sequence[Any]) -> Outcome:
    with stack.lent(stack.rows.index(row)):
        losses = [row.step_alone(clone(batch)) for batch in batches]
    return Outcome(losses, state_of(row.session), _NO_OUTPUTS, _NO_OUTPUTS, drew=False)


def _fused(stack: Stack, joining: Sequence[Row]) -> dict[int, Outcome]:
    losses: list[torch.Tensor] = []
    try:
        for leaves in islice(stack.feed.epoch(stack.rows), STEPS):
            losses.append(stack.step(leaves))
    except Refused:
        raise
    except RuntimeError as error:  # torch's words for what `vmap` cannot do, or a person's for theirs
        raise Refused(f"torch cannot compute the runs as one: {str(error).splitlines()[0]}") from error
    places = {row.number: slot for slot, row in enumerate(stack.rows)}
    found = {}
    for row in joining:
        curve = [float(loss[places[row.number]]) for loss in losses]
        found[row.number] = Outcome(
            curve, state_of(row.session), _NO_OUTPUTS, row.generator.get_state(), drew=False
        )
    return found


def _compared(
    row: Row,
    fused: Outcome,
    reference: Outcome,
    envelopes: Envelopes,
    before: State,
    decay: dict[str, float],
    drawn: torch.Tensor,
) -> Proof | Refused:
    if not torch.equal(fused.random_state, drawn):
        return Refused("it draws random numbers that it would not draw alone")
    if len(fused.losses) != len(reference.losses):
        return Refused(f"{len(fused.losses)} batches came, and {len(reference.losses)} alone")
    if not identical(fused, reference):
        return Proof(True, 0.0, "")
    figures = distances(fused, reference, before, decay, STEPS)
    finding = judged(figures, envelopes, resolution(reference, before), FINEST_ROUNDOFF)
    if finding.kept:
        return Proof(False, finding.score, finding.figure)
    return Refused(finding.fault or "it cannot be judged")
