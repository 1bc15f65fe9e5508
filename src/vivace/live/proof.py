"""Does a plan's step do what the script's step does? A kept step is run again on copies, under the reference,
under shadows that only round otherwise, and under the plan, and held against the ruler's envelope.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import statistics
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from vivace import words
from vivace.errors import Refused, ran_out_of_memory
from vivace.live.hosted import Hosted, step_alone
from vivace.live.kept import (
    CannotKeep,
    Kept,
    KeptCall,
    KeptUpdate,
    apart_on,
    failed,
    from_outside,
    gradients_of,
    outside_of,
    weights_behind,
)
from vivace.live.leavings import Left, left_by, otherwise
from vivace.live.ranks import alone
from vivace.live.spending import Clock
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.profiling.record.signals import raised_by_handler
from vivace.profiling.record.silence import nothing_written, silence
from vivace.technique import Numerics, Stage
from vivace.tensors import randomness
from vivace.tensors.outside import of_library
from vivace.tensors.trees import tensors
from vivace.torch_internals import compiler
from vivace.verifying.displacement import (
    Outcome,
    State,
    Tensors,
    distances,
    identical,
    is_measured,
    moved_square,
    output_distance,
    real,
    resolution,
    scale_and_residual,
)
from vivace.verifying.draws import LogicalDraws
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.halves import Halves, Place
from vivace.verifying.judgement import check, envelope_of, summary
from vivace.verifying.shadow import FINEST_ROUNDOFF, Rounding

FEW_SHADOWS, SHADOWS = 3, 8  # the few are enough for what stays within half of the limit
NEARLY_EXACT = (Stage.PROCESS, Stage.OPTIMIZER)  # so near to the script's step that no shadow is asked
REPLAYS_TO_BEGIN = 5  # what a kept step costs before anything is judged
ROUNDED_AGAIN = 2  # steps of a plan that looks broken, which round otherwise
# Envelopes. Stricter than the ruler, which has many steps: whom it refuses wrongly loses speed alone.
LIMIT = 5.0

SAME_GRADIENT = 1e-3  # of a replay beside the script's own: atomics may sum otherwise
NOISY_REPLAY = 2.0  # times as long as a replay without rounding noise


@dataclasses.dataclass
class Replay:
    """What a run of the kept step left behind; `each` are the outputs one by one, `left` all for the script
    to find; `inside` is what drew random numbers inside of its kernel.
    """

    outcome: Outcome
    each: list[torch.Tensor]
    left: Left
    inside: set[str]
    wall_seconds: float
    cpu_seconds: float


@dataclasses.dataclass
class _Stepped:
    """What is known right after a step on copies; `drawn` is the state of torch's random numbers, and
    `result` what the call returned.
    """

    result: object
    gradients: Tensors
    drawn: torch.Tensor
    inside: set[str]
    wall_seconds: float
    cpu_seconds: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`kept`, or the `reason`; `score` is the worst figure in envelopes, of `LIMIT` that are allowed."""

    kept: bool
    reason: str = ""
    score: float = 0.0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON types."""
        return {**dataclasses.asdict(self), "limit": LIMIT}


class TooLong(Exception):
    """A verdict takes longer than it may."""


class Proof:
    """Replays of one kept step. Raises CannotKeep where the reference does not repeat it."""

    def __init__(self, kept: Kept, machine: Machine, clock: Clock) -> None:
        self.kept, self.machine, self.clock = kept, machine, clock
        self._shadows: dict[
            tuple[float, str], tuple[dict[Place, list[bool]], list[dict[Measure, float]]]
        ] = {}
        self.may_compile = False  # what a plan compiles, the first time
        self.replay_seconds = 0.0  # with its copies
        self._until = math.inf  # by the wall's clock: no step is begun that would end later
        self._went_on: set[Plan] = set()  # whose verdicts took longer than they might
        self.rearranged = False  # did a replay draw random numbers in another order than the script?
        root = kept.things[0]
        if kept.lacking is not None:
            raise kept.lacking
        apart_on(kept.device)
        try:
            self.before = State(
                {n: p.detach().clone() for n, p in root.named_parameters() if p.requires_grad},
                {n: b.detach().clone() for n, b in root.named_buffers()},
            )
            with alone():
                if threading.active_count() > 1:
                    kept.others_draw = self._not_drawn_from()
                self.gradients = self._from_outside()
                begin = clock.wall()
                self.reference = self.replay(Plan())
        except CannotKeep:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            raise failed(f"a copy of its model fails: {type(error).__name__}", error) from None
        self.replay_seconds = clock.wall() - begin
        # As the script draws, and compiled code.
        self._unordered = self.replay(Plan(), ordered=False) if self.rearranged else self.reference
        self._require_the_same_step(self._unordered)

    def expected_seconds(self, plan: Plan) -> float:
        """What `judge` will take, about; at most, once that has come to no end."""
        own = 1 + 2 * any(t.card.stage == Stage.OPTIMIZER for t in plan.techniques)
        _, shadows = self._shadows.get(self._key(plan), ({}, []))
        wanted = FEW_SHADOWS
        if plan in self._went_on:
            wanted = SHADOWS + ROUNDED_AGAIN
        elif plan.promise == Numerics.EXACT or all(t.card.stage in NEARLY_EXACT for t in plan.techniques):
            wanted = 0
        more = max(0, wanted - len(shadows))
        return self.replay_seconds * (own + (more > 0) + NOISY_REPLAY * more)

    def end(self, plan: Plan) -> float:
        """Let go of all that is kept; about the seconds of another proof of a plan."""
        cost, device = REPLAYS_TO_BEGIN * self.replay_seconds + self.expected_seconds(plan), self.kept.device
        vars(self.kept).clear()
        vars(self).clear()
        apart_on(device)
        return cost

    def replay(
        self,
        plan: Plan,
        noise: AbstractContextManager[Any] | None = None,
        *,
        ordered: bool = True,
        given: Tensors | None = None,
    ) -> Replay:
        """Run the kept step on fresh copies, or where gradients are `given` its update alone. Raises Refused,
        and whatever the model raises under the plan.
        """
        things = self.kept.copies()
        stepped = self._stepped(plan, things, noise, ordered=ordered, given=given)
        each = [real(o.detach()).double() for o in tensors(stepped.result) if is_measured(o)]
        outcome = self._outcome(things[0], stepped.gradients, stepped.drawn)
        left = left_by(things[0], things[2:], stepped.result)
        return Replay(outcome, each, left, stepped.inside, stepped.wall_seconds, stepped.cpu_seconds)

    def _require_time(self, seconds: float) -> None:
        """Raises TooLong where so many more are not there."""
        if self.clock.wall() + seconds > self._until:
            raise TooLong

    def times(self, plan: Plan, things: tuple[Any, ...]) -> tuple[float, float]:
        """Seconds by the wall's clock and by the processor's of one more step of copies that may have made
        some already. Raises what `replay` does.
        """
        root, optimizers, *call = things
        root.zero_grad(set_to_none=True)
        stepped = self._stepped(plan, (root, optimizers, *copy.deepcopy(call)), None, ordered=False)
        return stepped.wall_seconds, stepped.cpu_seconds

    def _stepped(
        self,
        plan: Plan,
        things: tuple[Any, ...],
        noise: AbstractContextManager[Any] | None,
        *,
        ordered: bool,
        given: Tensors | None = None,
    ) -> _Stepped:
        root, optimizers, arguments, keywords = things
        if not plan.compiles:
            self._require_time(self.replay_seconds)
        draws = LogicalDraws(attention=False)
        alike: AbstractContextManager[Any] = nullcontext()
        if plan.compiles:  # whose random numbers cannot be led
            alike, ordered = compiler.equal_random_numbers(), False
        writes = nullcontext() if plan.compiles else nothing_written(CannotKeep)  # a compiler keeps files
        with _unnoticed(self.kept, writes) as said, alike:
            hosted = Hosted(
                plan, root, optimizers[0], self.machine, parts=self.kept.parts, may_compile=self.may_compile
            )
            try:
                self._wait()
                begin = self.clock.wall(), self.clock.cpu()
                with noise or nullcontext(), draws if ordered else nullcontext():
                    result = self._gradients_of(hosted, root, arguments, keywords, given)
                gradients = gradients_of(root)
                self._unscale(root)
                for optimizer in optimizers:
                    step_alone(optimizer)
                self._wait()
                wall, cpu = self.clock.wall() - begin[0], self.clock.cpu() - begin[1]
            finally:
                hosted.close()
            drawn = self.kept.random["torch"] if "torch" in self.kept.others_draw else torch.get_rng_state()
        self.rearranged = self.rearranged or draws.rearranged
        if any(one.getvalue() for one in said):
            raise CannotKeep("its model prints while it runs, and a copy of it would print as well")
        return _Stepped(result, gradients, drawn, draws.inside, wall, cpu)

    def _gradients_of(
        self,
        hosted: Hosted,
        root: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        given: Tensors | None,
    ) -> object:
        """Run the call and the backward pass, where they are kept; else put gradients where they were.

        Returns what the call did.
        """
        if given is None and not self.kept.whole:
            given = self.kept.of_weights
        if given is not None:
            for name, parameter in root.named_parameters():
                if name in given:
                    parameter.grad = given[name].clone()
            return None
        with self.kept.precision():
            result = hosted.call(getattr(root, self.kept.method), arguments, keywords)
        outputs = list(tensors(result))
        self._require_time(0.0)  # what is compiled, is compiled in two parts
        pairs = [(o, g) for o, g in zip(outputs, self.gradients, strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return result

    def _unscale(self, root: nn.Module) -> None:
        if self.kept.scale != 1.0:
            for parameter in root.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.kept.scale)

    def _from_outside(self) -> list[Any]:
        if not isinstance(self.kept, KeptCall):
            return []
        root, optimizers, arguments, keywords = self.kept.copies()
        with _unnoticed(self.kept, nothing_written(CannotKeep)):
            with self.kept.precision():
                outputs = list(tensors(getattr(root, self.kept.method)(*arguments, **keywords)))
            if len(outputs) != len(self.kept.gradients):
                raise CannotKeep("a copy of its model returns another number of tensors")
            self._require_own_weights(outputs, root, optimizers)
            return from_outside(outputs, self.kept.gradients)

    def _not_drawn_from(self) -> frozenset[str]:
        """The random streams that the call leaves where they are. Another thread of the script may draw from
        these meanwhile, as one that makes batches does: they are not put back.
        """
        kept = self.kept
        root, optimizers, arguments, keywords = kept.copies()
        every = randomness.capture()
        if not all(of_library(type(optimizer).__module__) for optimizer in optimizers):
            return frozenset()  # which may draw as well
        if not kept.whole:
            return frozenset(every)
        kept.others_draw = frozenset(every)
        try:
            with _unnoticed(kept, nothing_written(CannotKeep)), kept.precision():
                getattr(root, kept.method)(*arguments, **keywords)
        finally:
            moved = randomness.moved(every, randomness.capture())
            randomness.restore({stream: every[stream] for stream in moved})
        return frozenset(every) - moved

    def _require_own_weights(
        self, outputs: list[torch.Tensor], root: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """A backward pass must give gradients to copies alone."""
        assert isinstance(self.kept, KeptCall)
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        own = {id(parameter) for group in [root.parameters(), *groups] for parameter in group}
        for weight in weights_behind(outputs):
            if id(weight) in own:
                continue
            if (name := self.kept.names.get(id(weight))) is None:
                raise CannotKeep("its model uses weights that are no part of it")
            raise CannotKeep(left_to_the_original(name))

    def _outcome(self, root: nn.Module, gradients: Tensors, drawn: torch.Tensor) -> Outcome:
        after = State(
            {n: p.detach() for n, p in root.named_parameters() if n in self.before.parameters},
            {n: b.detach() for n, b in root.named_buffers()},
        )
        drew = not torch.equal(drawn, self.kept.random["torch"])
        return Outcome([1.0], after, torch.ones(1), drawn, drew, gradients)

    def _wait(self) -> None:
        if self.kept.device.type == "cuda":
            torch.cuda.synchronize(self.kept.device)

    def _require_the_same_step(self, again: Replay) -> None:
        """The replay's gradients, or its weights where the update alone is kept, must be the script's own."""
        if isinstance(self.kept, KeptUpdate):
            before, after = self.before.parameters, again.outcome.after.parameters
            theirs = {n: self.kept.after[n] - before[n] for n in after}
            if not apart({n: after[n] - before[n] for n in after}, theirs) <= SAME_GRADIENT:
                raise CannotKeep("a copy of its optimizer takes another step")
            return
        theirs, ours = self.kept.of_weights, again.outcome.gradients
        unused = [name for name in self.before.parameters if name in theirs and name not in ours]
        if unused:
            raise CannotKeep(left_to_the_original(unused[0]))
        found = apart(ours, theirs)
        if not found <= SAME_GRADIENT:
            raise CannotKeep(
                f"a copy of its step gives other gradients ({words.percent(found)} off): its loss may use "
                "the weights beside the model, or its model may draw or remember something of its own"
            )

    def judge(self, plan: Plan) -> Verdict:
        """Is the plan's step the same but for rounding?"""
        begin = self.clock.wall()
        verdict = self._judged(plan)
        return dataclasses.replace(verdict, seconds=self.clock.wall() - begin)

    def judge_until(self, plan: Plan, moment: float) -> Verdict | None:
        """The same; None where it is not known by that `moment` of the wall's clock. Ask again, and
        the shadows that were run are still there.
        """
        self._until = moment
        try:
            return self.judge(plan)
        except TooLong:
            self._went_on.add(plan)
            return None
        finally:
            self._until = math.inf

    def _judged(self, plan: Plan) -> Verdict:
        try:
            if reason := self._other_update(plan):
                return Verdict(False, reason)
            found = self.replay(plan)
        except Refused as refused:
            return Verdict(False, str(refused))
        except (CannotKeep, TooLong):
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            return Verdict(False, under_it(error))
        try:
            return self._held(plan, found)
        except Refused as refused:
            return Verdict(False, str(refused))

    def _other_update(self, plan: Plan) -> str:
        """What is wrong with the part of a plan that acts on the update, given the reference's gradients: how
        products round explains nothing of that, and would hide it.
        """
        update = Plan(t for t in plan.techniques if t.card.stage == Stage.OPTIMIZER)
        if not update.techniques:
            return ""
        given = self.reference.outcome.gradients
        reference, found = (self.replay(each, given=given) for each in (Plan(), update))
        smallest = resolution(reference.outcome, self.before)
        roundoff = max(update.unit_roundoff, FINEST_ROUNDOFF)
        document, _ = _summary(self._distances(found, reference), smallest, roundoff)
        return "" if document["kept"] else f"of its update: {document['reason']}"

    def _held(self, plan: Plan, found: Replay) -> Verdict:
        """Raises Refused where a step that only rounds otherwise fails."""
        reference = self._unordered if plan.compiles else self.reference
        if plan.promise == Numerics.EXACT:
            if not _apart(found, reference):
                return Verdict(True)
            again = self.replay(Plan(), ordered=reference is self.reference)
            if not _apart(again, reference):  # but for the plan, every bit is as it was
                return Verdict(False, "it promises the same bits, and its step has others")
        if plan.precision.techniques and not _apart(found, reference):
            return Verdict(False, "it changed nothing: every number of its step is as without it")
        if reason := otherwise(found.left, reference.left):
            return Verdict(False, reason)
        if not torch.equal(found.outcome.random_state, reference.outcome.random_state):
            return Verdict(False, "its model draws other random numbers under it")
        if not plan.compiles and found.inside != reference.inside:
            return Verdict(
                False, "its masks are drawn inside of kernels, under it of others: no step compares"
            )
        if [t.shape for t in found.each] != [t.shape for t in reference.each]:
            return Verdict(False, "its model returns tensors of other shapes under it")
        values = self._distances(found, reference)
        document, score = self._checked(plan, values)
        if (not document["kept"] or score > LIMIT) and self._may_be_rounding(plan, values):
            document, score = self._checked(plan, self._of_several(plan, values))
        if document["kept"] and score > LIMIT:
            reason = f"its step is {score:.2g} envelopes off, and rounding explains {LIMIT:.0f}"
            return Verdict(False, reason, score)
        return Verdict(document["kept"] is True, document["reason"] if not document["kept"] else "", score)

    def _checked(self, plan: Plan, values: dict[Measure, float]) -> tuple[dict[str, Any], float]:
        """The ruler's summary of a plan's distances, and the worst score."""
        roundoff = self._roundoff(plan)
        for count in (0, FEW_SHADOWS, SHADOWS):
            document, score = _summary(values, self._ground(plan, count), roundoff)
            if document["kept"] and score <= LIMIT / 2:
                break
        return document, score

    def _may_be_rounding(self, plan: Plan, values: dict[Measure, float]) -> bool:
        """Can steps that round otherwise show that rounding alone put the plan's step off? It makes no number
        infinite; and torch runs nothing compiled while operators are rounded.
        """
        return not plan.compiles and all(map(math.isfinite, values.values()))

    def _of_several(self, plan: Plan, values: dict[Measure, float]) -> dict[Measure, float]:
        """The medians over the plan's step and more of them that only round otherwise: a ReLU that rounding
        alone turned over, in one of them, is no fault of the plan's, and a fault is in all.
        """
        found = [values]
        for seed in range(ROUNDED_AGAIN):
            noise = Rounding(self._roundoff(plan), seed=SHADOWS + seed, halves={})
            found.append(self._rounded(plan, noise))
        return {name: statistics.median(each[name] for each in found) for name in values}

    def _rounded(self, plan: Plan, noise: Rounding) -> dict[Measure, float]:
        """Distances of a step that only rounds otherwise. Raises Refused where that one fails."""
        try:
            return self._distances(self.replay(plan, noise), self.reference)
        except (CannotKeep, TooLong):
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            what = f"its model fails where products are rounded at random: {type(error).__name__}"
            raise Refused(str(failed(what, error))) from None

    def _distances(self, replay: Replay, reference: Replay) -> dict[Measure, float]:
        """The ruler's, and of each output; an output's scale shows what is small in each of its numbers."""
        found = distances(replay.outcome, reference.outcome, self.before, {}, 1)
        known = (Quantity.LOSS, Quantity.EVALUATION)
        found = {measure: value for measure, value in found.items() if measure.quantity not in known}
        for index, (mine, theirs) in enumerate(zip(replay.each, reference.each, strict=True)):
            found[Measure(Quantity.OUTPUT, moment=str(index))] = output_distance(mine, theirs)
            a, b = mine.flatten(), theirs.flatten()
            scale, _ = scale_and_residual(float(a @ b), float(b @ b), float(a @ a), 0.0)
            found[Measure(Quantity.OUTPUT_SCALE, moment=str(index))] = scale
        return {name: value if math.isfinite(value) else math.inf for name, value in found.items()}

    def _roundoff(self, plan: Plan) -> float:
        """The coarser of the plan's and the script's own."""
        return max(plan.unit_roundoff, self.kept.unit_roundoff, FINEST_ROUNDOFF)

    def _key(self, plan: Plan) -> tuple[float, str]:
        return self._roundoff(plan), plan.precision.id

    def _ground(self, plan: Plan, count: int) -> dict[Measure, float]:
        """Envelopes of the distances, from so many shadows that store in half what the plan does; of none,
        what the numbers themselves resolve: no envelope is smaller.
        """
        smallest = resolution(self.reference.outcome, self.before)
        if not count:
            return smallest
        key = roundoff, _ = self._key(plan)
        if key not in self._shadows:
            halves: dict[Place, list[bool]] = {}
            precision = plan.precision
            if precision.techniques or self.kept.autocasts:
                noted = Halves()
                self.replay(precision, noted)
                halves = noted.places()
            self._shadows[key] = halves, []
        halves, runs = self._shadows[key]
        while len(runs) < count:
            noise = Rounding(roundoff, seed=len(runs), halves=halves)
            runs.append(self._rounded(Plan(), noise))
        return envelope_of(runs, 1.0, smallest)


def left_to_the_original(name: str) -> str:
    """What is said of a weight that a copy of the model has no copy of."""
    return (
        f"its copy leaves '{name}' to the original: a function in the model, such as a lambda, holds a part "
        "of it"
    )


def under_it(error: Exception) -> str:
    """Why a plan is not tried, with which a copy of the script's step fails."""
    if ran_out_of_memory(error):
        return "the memory does not hold a copy of the step under it"
    return f"the model fails under it: {type(error).__name__}: {error}"


def apart(mine: Tensors, theirs: Tensors) -> float:
    """The distance of two sets of tensors beside the size of theirs."""
    gap = size = 0.0
    for name, own in theirs.items():
        other = mine.get(name, torch.zeros_like(own))
        gap += moved_square(other, own)
        size += moved_square(own, torch.zeros_like(own))
    return math.sqrt(gap / size) if size else math.inf


def _summary(
    values: dict[Measure, float], envelopes: dict[Measure, float], roundoff: float
) -> tuple[dict[str, Any], float]:
    """The ruler's summary of distances, and the worst score."""
    checks = [_check(name, value, envelopes.get(name, 0.0), roundoff) for name, value in values.items()]
    document = summary(checks)
    return document, max(_finite(document["loss_envelopes"]), _finite(document["displacement_envelopes"]))


def _check(measure: Measure, value: float, envelope: float, roundoff: float) -> dict[str, Any]:
    """The ruler's figure. Inputs that hold few numbers may all be rounded in one direction."""
    floor = roundoff / 4 if measure.quantity == Quantity.OUTPUT_SCALE else None
    return check(measure, 0, value, envelope, roundoff, floor=floor)


def _apart(mine: Replay, theirs: Replay) -> bool:
    different = identical(mine.outcome, theirs.outcome)
    return bool(different) or not all(torch.equal(a, b) for a, b in zip(mine.each, theirs.each, strict=True))


def _finite(value: float) -> float:
    return value if value == value else 0.0


@contextlib.contextmanager
def _unnoticed(kept: Kept, writes: AbstractContextManager[None]) -> Iterator[list[io.StringIO]]:
    """Inside, copies of a kept step run; afterwards it is as if they had not. Gives what they print."""
    with _as_it_began(kept), torch.enable_grad(), silence() as said, writes:
        yield said


@contextlib.contextmanager
def _as_it_began(kept: Kept) -> Iterator[None]:
    """Random numbers, and what the model keeps outside of itself, as the kept step found them; afterwards the
    script's go on where they were.
    """
    before, begun = (
        {stream: state for stream, state in states.items() if stream not in kept.others_draw}
        for states in (randomness.capture(kept.device), kept.random)
    )
    outside = outside_of(*kept.things[:2])
    randomness.restore(begun, kept.device)
    try:
        kept.outside.put_back()
        yield
    finally:
        randomness.restore(before, kept.device)
        outside.put_back()
