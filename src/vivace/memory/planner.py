"""The cheapest decisions for the blocks of a model under a memory budget, by dynamic programming.

A block is kept, recomputed whole or but for its expensive results, or stored in another form. When the
backward pass reaches block i, the blocks before it hold what their decisions keep, and block i itself is
whole again. So the peak is the largest, over i, of the sum before i plus what block i needs while it is
worked on: a knapsack whose limit holds at every prefix. States that need more memory and more time than
another are dropped; the optimum is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vivace import words
from vivace.errors import AnswerIsNo

STATES = 4_000  # above this many states, bytes are rounded up to a grid
POINTS, POINTS_STATES = 20, 500  # of the curve of memory against time


class Choice(NamedTuple):
    """What is done with one block: a technique's name and its word for the way, see `Technique.ways`."""

    technique: str
    word: str


KEEP = Choice("", "keep")


@dataclasses.dataclass(frozen=True)
class Option:
    """One decision for one block.

    Args:
        name: what is done.
        held_bytes: what stays for the backward pass, beyond what every decision keeps.
        working_bytes: what lives while the block's backward pass runs; at least `held_bytes`.
        seconds: more than keeping costs, over a step.
    """

    name: Choice
    held_bytes: int
    working_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Decision:
    """One option for each block, the peak in bytes above the base, and the seconds that it costs."""

    names: tuple[Choice, ...]
    peak_bytes: int
    seconds: float


class _State(NamedTuple):
    held: int
    peak: int
    seconds: float
    chain: tuple[Any, ...]  # the last choice and the chain before it: a list would be copied for each state

    def decision(self) -> Decision:
        """What was decided, in the order of the blocks."""
        names, chain = list[Choice](), self.chain
        while chain:
            name, chain = chain
            names.append(name)
        return Decision(tuple(reversed(names)), self.peak, self.seconds)


def decide(blocks: Sequence[Sequence[Option]], budget_bytes: int) -> Decision:
    """The cheapest decisions whose peak is within `budget_bytes`.

    Raises AnswerIsNo with the smallest peak that is possible.
    """
    best = _search(blocks, budget_bytes, 1, STATES) or smallest(blocks)  # the grid may have missed it
    if best.peak_bytes > budget_bytes:
        raise AnswerIsNo(
            f"no plan for the blocks fits into {words.size(budget_bytes)} of activations; the smallest "
            f"possible is {words.size(best.peak_bytes)}"
        )
    return best


def smallest(blocks: Sequence[Sequence[Option]]) -> Decision:
    """The decisions with the smallest peak; among these the cheapest."""
    states = [_State(0, 0, 0.0, ())]
    for options in blocks:
        grown = [_after(state, option, 1) for state in states for option in options]
        states = _undominated(grown, lambda state: state.peak)
    least = min(states, key=lambda state: (state.peak, state.seconds))
    return _search(blocks, least.peak, 1, STATES) or least.decision()


def pareto(blocks: Sequence[Sequence[Option]]) -> list[Decision]:
    """The curve of memory against time: up to `POINTS` decisions, from the smallest to the fastest."""
    first = smallest(blocks)
    everything = sum(max(o.working_bytes for o in options) for options in blocks)
    fastest = decide(blocks, everything)
    found = [first]
    for number in range(1, POINTS - 1):
        budget = first.peak_bytes + (fastest.peak_bytes - first.peak_bytes) * number // (POINTS - 1)
        found.append(_search(blocks, budget, 1, POINTS_STATES) or first)
    found.append(decide(blocks, fastest.peak_bytes))
    curve: list[Decision] = []
    for decision in found:
        if not curve or decision.seconds < curve[-1].seconds:
            curve.append(decision)
    return curve


def _search(blocks: Sequence[Sequence[Option]], budget: int, unit: int, most: int) -> Decision | None:
    """The best decision, with held bytes rounded up to `unit` or, above so many states, to more; None where
    nothing fits.
    """
    states = [_State(0, 0, 0.0, ())]
    for options in blocks:
        grown = [
            _after(state, option, unit)
            for state in states
            for option in options
            if state.held + option.working_bytes <= budget
        ]
        states = _undominated(grown, lambda state: state.seconds)
        if len(states) > most:
            return _search(blocks, budget, max(2 * unit, budget // most), most)
    if not states:
        return None
    return min(states, key=lambda state: (state.seconds, state.peak)).decision()


def _after(state: _State, option: Option, unit: int) -> _State:
    return _State(
        -(-(state.held + option.held_bytes) // unit) * unit,
        max(state.peak, state.held + option.working_bytes),
        state.seconds + option.seconds,
        (option.name, state.chain),
    )


def _undominated(states: list[_State], price: Callable[[_State], float]) -> list[_State]:
    """Of states that hold the same bytes or more, only those with a lower price; equal ones by their peak."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s.held, price(s), s.peak)):
        if not kept or price(state) < price(kept[-1]):
            kept.append(state)
    return kept
