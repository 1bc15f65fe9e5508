"""Is each row of a stack the same model as alone? Held against the row's own first steps, by the ruler."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from vivace.errors import Refused, ran_out_of_memory
from vivace.sweeping.stacking.rows import Row
from vivace.sweeping.stacking.stack import Stack
from vivace.tensors.outside import Outside, attributes, changed
from vivace.verifying.displacement import Outcome, State, distances, identical, resolution
from vivace.verifying.figures import Measure
from vivace.verifying.shadow import FINEST_ROUNDOFF, Rounding
from vivace.verifying.states import clone, decay_of, state_of
from vivace.watching.between import sums_of
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
        """The proof in a few words, with its worst figure where it is not exact."""
        if self.exact:
            return "exact: bit-identical"
        return f"rounding: worst {self.score:.2g} of {STEP_LIMIT:.0f} allowed ({self.figure})"


def worst(proofs: Sequence[Proof]) -> Proof:
    """The one that is farthest from exact."""
    return max(proofs, key=lambda proof: (not proof.exact, proof.score))


class Tightest:
    """Of the envelopes of rows that were judged before, the smallest one by measure."""

    def __init__(self) -> None:
        self._of: list[Envelopes] = []

    def add(self, envelopes: Envelopes) -> None:
        """Those of one more row."""
        self._of.append(envelopes)

    @property
    def num(self) -> int:
        """How many shadows they come from."""
        return sum(envelopes.num for envelopes in self._of)

    def of(self, measure: Measure) -> float:
        """NaN where no row has this measure."""
        found = (envelopes.of(measure) for envelopes in self._of)
        return min((value for value in found if not math.isnan(value)), default=math.nan)


@dataclasses.dataclass(frozen=True)
class _Alone:
    """What a row did in its own first steps, and where its stream then stood."""

    before: State
    batches: list[Any]
    outcome: Outcome
    drawn: torch.Tensor


def prove(stack: Stack, joining: Sequence[Row], known: Tightest) -> dict[int, Proof | Refused]:
    """Take the first steps of the joining rows alone and in the stack, which is afterwards as it was before.

    A row is held against the `known` envelopes first. Only where it is not within a single one of the
    tightest, of the `STEP_LIMIT` allowed, has it its own made, which takes most of the time.

    By the number of each joining row, what was found; Refused with what is not the same. Raises Refused where
    the stack as a whole cannot take a step.
    """
    saved = stack.saved()
    found: dict[int, Proof | Refused] = {}
    alone: dict[int, _Alone] = {}
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
            found[row.number] = _compared(stack, saved, row, fused[row.number], alone[row.number], known)
    return found


class _InPython:
    """What the steps of a row reach beside weights and buffers, as it is now."""

    def __init__(self, row: Row) -> None:
        self._models = [row.model]
        self._outside = Outside((row.job.loss, row.job.on_gradients), self._models)
        self._large = [sums_of(tensor) for tensor in self._outside.large]
        self._attributes = attributes(self._models)

    def moved(self) -> str:
        """What has another value since; empty where nothing has."""
        names = [name for _, _, name in changed(attributes(self._models), self._attributes)]
        large = map(sums_of, self._outside.large)
        outside = self._outside.moved() or not all(map(torch.equal, self._large, large))
        return next(iter(names), "what its functions hold" if outside else "")


def _alone(stack: Stack, row: Row, saved: Any) -> _Alone:
    before, batches = state_of(row.session), list(islice(row.batches(row.epoch), STEPS))
    kept = _InPython(row)
    outcome = _steps(stack, row, batches)
    drawn = row.streams["cuda" if row.device.type == "cuda" else "torch"]
    stack.put_back(saved)
    if kept.moved():  # the same steps once more: what is not counted on is a note of the last step
        kept = _InPython(row)
        _steps(stack, row, batches)
        stack.put_back(saved)
        if what := kept.moved():
            raise Refused(f"its steps count in Python ({what}), where a stack has one place for all runs")
    return _Alone(before, batches, outcome, drawn)


def _envelopes(stack: Stack, saved: Any, row: Row, alone: _Alone) -> Envelopes:
    """How far rounding alone moves the row's steps."""
    found, decay = Envelopes(), decay_of(row.session)
    for seed in range(SHADOWS):
        with Rounding(FINEST_ROUNDOFF, seed=seed, halves={}):
            shadow = _steps(stack, row, alone.batches)
        stack.put_back(saved)
        found.add(distances(shadow, alone.outcome, alone.before, decay, STEPS))
    return found


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
        if ran_out_of_memory(error):
            raise Refused("the memory does not hold the runs as one") from error
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
    stack: Stack, saved: Any, row: Row, fused: Outcome, alone: _Alone, known: Tightest
) -> Proof | Refused:
    reference, before = alone.outcome, alone.before
    if not torch.equal(fused.random_state, alone.drawn):
        return Refused("it draws random numbers that it would not draw alone")
    if len(fused.losses) != len(reference.losses):
        return Refused(f"{len(fused.losses)} batches came, and {len(reference.losses)} alone")
    if not identical(fused, reference):
        return Proof(True, 0.0, "")
    figures = distances(fused, reference, before, decay_of(row.session), STEPS)
    smallest = resolution(reference, before)
    finding = judged(figures, known, smallest, FINEST_ROUNDOFF)
    if not (finding.kept and finding.score <= 1.0):
        own = _envelopes(stack, saved, row, alone)
        finding = judged(figures, own, smallest, FINEST_ROUNDOFF)
        if finding.kept:
            known.add(own)
    if finding.kept:
        return Proof(False, finding.score, finding.figure)
    return Refused(finding.fault or "it cannot be judged")
