"""The parent's side of a measurement: reference and candidate in their own processes, in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vivace.errors import Unsteady
from vivace.inspection.energy import Meter
from vivace.inspection.quiet import TOLERATED_SHARE, ForeignLoad
from vivace.ledger import Ratio
from vivace.machine import Machine
from vivace.measuring.statistics import EARLY, LAST, speed_ratio, stretched
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.training.crew import Company, Crew
from vivace.words import percent

WORKER = "vivace.measuring.worker:Worker"
BLOCK_SECONDS = 0.3
LEAST_WORK = 0.15  # of a core: of a process that computed less, processor time says little of a step


@dataclasses.dataclass(frozen=True)
class Clocks:
    """What a block took beside the wall clock.

    Args:
        processor: seconds a sample that all its threads were on a processor.
        starved: seconds that its threads were ready and got none, by those of the block; None where that is
            not known.
        alone: did one thread do it all? None where that is not known.
    """

    processor: float
    starved: float | None = None
    alone: bool | None = None

    @classmethod
    def of(cls, done: dict[str, Any]) -> Clocks:
        """From a worker's answer to ``block``."""
        starved, threads = done.get("starved"), done.get("threads")
        share = None if starved is None else starved / done["seconds"]
        return cls(done["processor"] / done["samples"], share, None if threads is None else threads == 1)


class Timed:
    """A child process that runs timed blocks; between them it stands still, so that none works on another's
    turn.

    Its worker answers ``warm`` with ``step_seconds`` and ``warmup_seconds``, and ``block`` with ``seconds``,
    ``samples`` and ``waited``. One that works on processors alone may tell its own `Clocks` beside them.
    """

    clocks: Clocks | None = None  # of the last block

    def __init__(self, child: Child | Crew, timeout: float, meter: Meter | None = None) -> None:
        self.child, self.meter = child, meter
        self._joules, self._samples = 0.0, 0
        self._steps_of_loader, self._samples_of_loader = 0, 0
        self.processes = [child.pid]  # on this host, each the leader of its group
        self.timeout = timeout
        self.step_seconds = 0.0
        self.warmup_seconds = 0.0
        self.waiting_share = 0.0  # of the last block, for batches to arrive
        self.full = 0  # how often the GPU's memory was, in all blocks

    def warm(self, seconds: float, timeout: float) -> Any:
        """Let it step until it is steady; what the worker answers."""
        self._signal(signal.SIGCONT)
        warmed = self.child.ask("warm", timeout, seconds=seconds)
        self.step_seconds, self.warmup_seconds = warmed["step_seconds"], warmed["warmup_seconds"]
        return warmed

    def block(self, steps: int, *, cached: bool = False) -> float:
        """Seconds a sample over one block of `steps` steps; `cached`: all on one batch, not the loader's.

        Between blocks the process and its loader workers stand still: none prefetches on another's turn.
        """
        meter = None if cached else self.meter
        before = meter.joules() if meter else None
        done = self.ask("block", steps=steps, cached=cached)
        self._signal(signal.SIGSTOP)
        after = meter.joules() if meter else None
        if not cached:
            self._steps_of_loader += steps
            self._samples_of_loader += done["samples"]
        if before is not None and after is not None:
            self._joules, self._samples = self._joules + after - before, self._samples + done["samples"]
        self.waiting_share = done["waited"] / done["seconds"]
        self.full += int(done.get("full", 0))
        self.clocks = Clocks.of(done) if "processor" in done else None
        return float(done["seconds"] / done["samples"])

    @property
    def samples_a_step(self) -> float:
        """The mean over all blocks of the loader's batches, which may differ in size; 0 where there were
        none.
        """
        return self._samples_of_loader / max(1, self._steps_of_loader)

    @property
    def joules_per_sample(self) -> float | None:
        """What the machine took during blocks of the loader's batches; None where no counter tells."""
        return self._joules / self._samples if self._samples else None

    def ask(self, command: str, **arguments: object) -> Any:
        """Any other command of the worker."""
        self._signal(signal.SIGCONT)
        return self.child.ask(command, self.timeout, **arguments)

    def close(self) -> None:
        """Let the child process go on, should it be halted, and end it."""
        self._signal(signal.SIGCONT)
        self.child.close()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes if self.child.alive else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, number)


class Contestant(Timed):
    """A child process that holds a job open under a plan, ready to run timed blocks; in a `company` of
    several ranks one in each, which step together. On a processor with so many `threads`, if they are given.
    """

    def __init__(
        self,
        source: Source,
        machine: Machine,
        *,
        log: Path | None = None,
        timeout: float = 600,
        environment: dict[str, str] | None = None,
        company: Company | None = None,
        meter: Meter | None = None,
        threads: int = 0,
    ) -> None:
        arguments = {"machine": machine.to_dict(), "threads": threads}
        started = (company or Company(source)).child(
            WORKER, arguments, log=log, environment=environment, meeting=True
        )
        super().__init__(started, timeout, meter)
        self.promise = "exact"

    def open(
        self,
        plan: Plan,
        *,
        strict: bool = True,
        seed: int = 0,
        warm_seconds: float = 1.0,
        settled: bool = True,
    ) -> None:
        """Open the plan and warm it up, see `Worker.open`. Raises Refused, JobError or ChildFailed."""
        deadline = time.monotonic() + self.timeout
        self._signal(signal.SIGCONT)
        arguments = {"plan": plan.to_dict(), "strict": strict, "seed": seed}
        arguments |= {} if settled else {"settled": False}
        self.processes = self.child.ask("open", self.timeout, **arguments)["processes"]
        self.promise = self.warm(warm_seconds, max(1.0, deadline - time.monotonic()))["promise"]

    def evaluate(self) -> float | None:
        """Seconds of one evaluation of the Job's metric; None where it has none, or where that fails."""
        seconds: float | None = self.ask("evaluate")
        self._signal(signal.SIGSTOP)
        return seconds


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A ratio with the pairs of timings; seconds are per sample.

    `foreign_share` is the largest share of the processor that other processes used meanwhile. Where it was so
    large that the wall's clock gave no answer, the ratio rests on what the processor worked: `working`.
    `joules` are a sample's, of reference and candidate, where they were counted; `evaluations` the seconds of
    one evaluation of the metric under each.
    """

    ratio: Ratio
    pairs: tuple[tuple[float, float], ...]
    foreign_share: float = 0.0
    working: tuple[tuple[float, float], ...] = ()
    joules: tuple[float, float] | None = None
    evaluations: tuple[float, float] | None = None

    @property
    def counted(self) -> tuple[tuple[float, float], ...]:
        """The pairs on which the ratio rests."""
        return self.working or self.pairs


class _Pair(NamedTuple):
    """Seconds a sample of neighbouring blocks by the wall clock; and on processors, where both tell.

    `starved` is the largest share of a block for which threads were ready and got no processor; None where it
    is not known. `alone`: both work with one thread; None where that is not known.
    """

    wall: tuple[float, float]
    working: tuple[float, float] | None = None
    starved: float | None = None
    alone: bool | None = None


def compare(
    reference: Timed,
    candidate: Timed,
    *,
    seconds: float,
    tolerance: float = 0.03,
    target: float | None = None,
) -> Comparison:
    """Time both in turn until the interval is tighter than `tolerance`, or above the `target`, or far below.
    With a `target` each pair is another look, so that the interval is told `EARLY` or `LAST` times as wide.

    Each candidate block is paired with the mean of the reference blocks just before and after it, which
    cancels a steady drift of the machine. Pairs during which other processes were busy count only where
    there are not enough others. Where these give no answer, blocks become single steps, and on a processor
    its own clock is asked, which does not run while others compute. Raises Unsteady where the interval stays
    wider than half of the estimate, before it is told wider, and holds 1.

    Where both workers tell how long they waited for a processor, a pair is disturbed if they did. With one
    thread such pairs count if they say the same `by_both_clocks`. Several threads wait for each other, and
    turn on a processor meanwhile: a neighbour on one core makes them many times slower by either clock, so
    that Unsteady is raised, as it is for whatever stays wide. Of one thread beside others that does not tell
    how long it waited, the processor's clock counts.
    """
    deadline, last = time.monotonic() + seconds, 1.0 if target is None else LAST
    steps = [_steps_of_a_block(reference), _steps_of_a_block(candidate)]
    others = ForeignLoad([*reference.processes, *candidate.processes])
    quiet, disturbed = list[_Pair](), list[_Pair]()
    for pair in _paired(reference, candidate, steps):
        busy = others.disturb()
        starved = busy if pair.starved is None else pair.starved > TOLERATED_SHARE
        (disturbed if starved else quiet).append(pair)
        late = time.monotonic() > deadline
        loud = len(quiet) < 4 and (late or len(disturbed) >= 8)
        pairs = quiet + disturbed if loud else quiet
        if len(pairs) < 4:
            continue
        ratio = speed_ratio(_walls(pairs), neighbours=True)
        told, alone = all(each.starved is not None for each in pairs), all(each.alone for each in pairs)
        if loud and not told and (alone or stretched(ratio, 2.0).wide):
            steps[:] = [1, 1]
            worked = _by_processor(pairs, ratio)
            if worked is not None and (late or worked.width < 2 * tolerance):
                return Comparison(stretched(worked, last), _walls(pairs), others.largest, _working(pairs))
        sure = stretched(ratio, EARLY)
        precise = ratio.width < tolerance
        better = target is not None and sure.low > target and not (precise or sure.wide)
        hopeless = target is not None and sure.high < 0.97 * target
        if (len(pairs) >= 6 and (precise or better)) or hopeless or len(pairs) >= 60 or late:
            break
    if told and (loud or ratio.wide):
        working = speed_ratio(_working(pairs), neighbours=True)
        ratio = by_both_clocks(ratio, working, others, target, sound=alone or not loud)
    sure = stretched(ratio, EARLY if better or hopeless else last)
    if ratio.wide and sure.low <= 1.0 <= sure.high and not hopeless:
        raise Unsteady(
            f"the machine was too unsteady to conclude: ratio {sure.low:.2f} to {sure.high:.2f} after "
            f"{len(pairs)} pairs of blocks{others.sentence()}",
            foreign_share=others.largest,
        )
    return Comparison(sure, _walls(pairs), others.largest)


def _steps_of_a_block(timed: Timed) -> int:
    return max(1, round(BLOCK_SECONDS / max(timed.step_seconds, 1e-6)))


def _walls(pairs: Sequence[_Pair]) -> tuple[tuple[float, float], ...]:
    return tuple(each.wall for each in pairs)


def _working(pairs: Sequence[_Pair]) -> tuple[tuple[float, float], ...]:
    return tuple(each.working for each in pairs if each.working is not None)


def _paired(reference: Timed, candidate: Timed, steps: list[int]) -> Iterator[_Pair]:
    """Blocks in turn, without an end: each of the candidate beside the mean of its two neighbours.

    `steps`: of the reference's blocks and the candidate's, which may be set to others meanwhile.
    """
    before, first = reference.block(steps[0]), reference.clocks
    while True:
        middle, second = candidate.block(steps[1]), candidate.clocks
        after, third = reference.block(steps[0]), reference.clocks
        wall = (before + after) / 2, middle
        if first is None or second is None or third is None:
            yield _Pair(wall)
        else:
            working = (first.processor + third.processor) / 2, second.processor
            shares = [clocks.starved for clocks in (first, second, third) if clocks.starved is not None]
            told = first.alone is not None and second.alone is not None
            alone = first.alone and second.alone if told else None
            yield _Pair(wall, working, max(shares, default=None), alone)
        before, first = after, third


def _by_processor(pairs: Sequence[_Pair], wall: Ratio) -> Ratio | None:
    """The ratio by the processor's clock; None where it is not known, or no answer either, or another one."""
    working = _working(pairs)
    if len(working) < max(6, len(pairs)):
        return None
    worked, passed = sum(map(sum, working)), sum(sum(each.wall) for each in pairs)
    if worked < LEAST_WORK * passed:  # a step that waits for something else than the processor
        return None
    ratio = speed_ratio(working)
    agree = wall.low <= ratio.high and ratio.low <= wall.high
    decided = not ratio.low <= 1.0 <= ratio.high or not ratio.wide
    return ratio if agree and decided else None


def by_both_clocks(
    wall: Ratio, working: Ratio, others: ForeignLoad, target: float | None, *, sound: bool
) -> Ratio:
    """What the wall clock and the time on processors say together: the hull of both intervals.

    Raises Unsteady where the hull is wider than half of its estimate, unless it lies below the `target` on
    the whole, and where neither clock is `sound`.
    """
    low, high = min(wall.low, working.low), max(wall.high, working.high)
    both = Ratio(math.sqrt(wall.estimate * working.estimate), low, high)
    hopeless = target is not None and high < 0.97 * target
    if sound and (hopeless or not both.wide):
        return both
    load = others.largest
    cause = f"others used up to {percent(load)} of the processor" if load > TOLERATED_SHARE else "unsteady"
    raise Unsteady(f"could not be measured ({cause})", foreign_share=load)


def compare_in_turns(openings: Sequence[Callable[[], Contestant]], *, seconds: float) -> Comparison:
    """Reference, candidate, reference again, each opened, timed and closed before the next one is opened.

    For what does not fit on the device together. A candidate's block is paired with the mean of the
    reference's two turns; the interval holds the ratio to either turn, between which minutes may lie. Raises
    Unsteady as `compare` does.
    """
    turns = []
    for opening in openings:
        contestant = opening()
        try:
            turns.append(_blocks(contestant, seconds / len(openings)))
        finally:
            contestant.close()
    before, middle, after = turns
    pairs = tuple(((b + a) / 2, m) for b, m, a in zip(before, middle, after, strict=False))
    ratio = speed_ratio(pairs)
    either = [speed_ratio(list(zip(turn, middle, strict=False))).estimate for turn in (before, after)]
    ratio = Ratio(ratio.estimate, min(ratio.low, *either), max(ratio.high, *either))
    if ratio.wide and ratio.low <= 1.0 <= ratio.high:
        raise Unsteady(
            f"the machine was too unsteady to conclude: ratio {ratio.low:.2f} to {ratio.high:.2f} between "
            "the reference's turns before and after"
        )
    return Comparison(ratio, pairs)


def _blocks(contestant: Contestant, seconds: float) -> list[float]:
    """Seconds a sample of at least 4 blocks, and of at most 20."""
    deadline, found = time.monotonic() + seconds, list[float]()
    steps = _steps_of_a_block(contestant)
    while len(found) < 4 or (time.monotonic() < deadline and len(found) < 20):
        found.append(contestant.block(steps))
    return found


def without_loader(contestant: Contestant, *, seconds: float) -> Ratio:
    """How many times faster the same job is on one cached batch: what a perfect input pipeline could bring.

    Blocks with and without the loader alternate. Before each timed block with the loader an untimed one uses
    up what its workers have prefetched during the block without.
    """
    deadline = time.monotonic() + seconds
    steps = _steps_of_a_block(contestant)
    pairs: list[tuple[float, float]] = []
    while len(pairs) < 4 or (time.monotonic() < deadline and len(pairs) < 30):
        contestant.block(steps)
        pairs.append((contestant.block(steps), contestant.block(steps, cached=True)))
    return speed_ratio(pairs)


def across(comparisons: Sequence[Comparison]) -> Ratio:
    """One ratio over several pairs of processes, with an interval that holds their spread.

    From three on: Student's t over the pairs' estimates, and never narrower than the blocks alone say. With
    fewer: the hull of their intervals.
    """
    ratios = [comparison.ratio for comparison in comparisons]
    if len(ratios) < 3:
        middle = math.exp(sum(math.log(ratio.estimate) for ratio in ratios) / len(ratios))
        return Ratio(middle, min(ratio.low for ratio in ratios), max(ratio.high for ratio in ratios))
    counted = [pair for comparison in comparisons for pair in comparison.counted]
    blocks = speed_ratio(counted, neighbours=True)
    spread = speed_ratio([(ratio.estimate, 1.0) for ratio in ratios])
    return Ratio(spread.estimate, min(blocks.low, spread.low), max(blocks.high, spread.high))
