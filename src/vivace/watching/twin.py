"""The twin: the job's own model and optimizer a second time, on which steps are repeated under the reference.

It is built before the training's own, so that names in the person's file that the job's functions set point
to the model that is trained. Between watched steps it waits on the host and holds no optimizer states.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import nn

from vivace.job import Batch, Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.profiling.record.signals import raised_by_handler
from vivace.profiling.record.silence import nothing_written, silence
from vivace.session.opening import call, reopened, start
from vivace.session.session import Session
from vivace.tensors import randomness
from vivace.tensors.modules import named_buffers, named_modules, named_parameters
from vivace.tensors.optimizers import state_of_optimizer
from vivace.tensors.outside import Attributes, Outside, assign, attributes, changed, is_persons
from vivace.tensors.trees import fields_of, is_object, map_tensors, tensors
from vivace.torch_internals.modules import is_compiled
from vivace.torch_internals.tensors import version_of
from vivace.verifying.displacement import Outcome, State, Tensors
from vivace.verifying.facts import Facts, facts_of_modules, facts_of_session
from vivace.verifying.halves import Halves, Place
from vivace.verifying.masks import Unlike
from vivace.verifying.states import Snapshot, decay_of, kept_states, restore
from vivace.verifying.tap import random_state
from vivace.watching.between import sums_of
from vivace.watching.written import Code, code_of_schedules, may_change_anything

SETTLING_STEPS = 8  # a loss scale halves until it fits
NO_OUTPUTS = torch.zeros(1)
WRITES = "the job writes a file while it trains, and a repetition would write into it, too"
TAKES = "{} may take from an iterator or write through a writer, and neither can be put back"
FREEZES = "{} trains no more, and the job's own code may freeze weights in a step that was not repeated"
COMPILES = "the job compiles its model, or a function, itself: looked at, that computes otherwise"


class LeavesATrace(Unlike):
    """A step of the job changes what cannot be put back."""


@dataclasses.dataclass(frozen=True)
class Before:
    """What a step begins with, on the host: states of model, optimizers and techniques, random streams, the
    settings of the optimizers, and what the job keeps in Python; of tensors outside of the model that are too
    large to be copied, sums, of open files how far they are written, and of modules whether they are in
    training mode.
    """

    snapshot: Snapshot
    kept: dict[str, Any]
    streams: dict[str, Any]
    settings: Facts
    attributes: Attributes
    outside: Outside
    large: list[torch.Tensor]
    places: list[int | None]
    modes: dict[str, bool]

    @classmethod
    def of(cls, session: Session, twin: Twin, step: int) -> Before:
        """Copies of it, after `step` steps."""
        optimizers = [map_tensors(state_of_optimizer(o), to_host) for o in session.optimizers]
        state = State(*(_mapped(part, to_host) for part in named(session)))
        streams = randomness.capture(session.build.device)
        snapshot = Snapshot(state, optimizers, step, decay_of(session))
        found = attributes(session.build.models)
        settings, outside = facts_of_session(session), outside_of(session, twin)
        large = [sums_of(tensor) for tensor in outside.large]
        places = places_in(outside.files)
        modes = {name: module.training for name, module in named_modules(session.build.models)}
        kept = kept_states(session)
        return cls(snapshot, kept, streams, settings, found, outside, large, places, modes)

    def require_repeatable(self, twin: Twin) -> None:
        """Raises LeavesATrace where to look at the step, or to repeat it, would change the training."""
        if self.outside.one_way:
            raise LeavesATrace(TAKES.format("a step"))
        if self.outside.compiled or any(is_compiled(m) for m in modules_of(twin.session)):
            raise LeavesATrace(COMPILES)

    def require_unwritten(self) -> None:
        """Raises LeavesATrace where the step wrote, or read, an open file."""
        if places_in(self.outside.files) != self.places:
            raise LeavesATrace(WRITES)

    def wrote_large(self) -> bool:
        """Has a tensor that is too large to be put back other numbers by now? Its version does not tell:
        averages of weights are often written to their ``.data``.
        """
        return not all(map(torch.equal, self.large, map(sums_of, self.outside.large)))

    def put_back(self, session: Session) -> None:
        """Let a session be as it was then."""
        restore(session, self.snapshot)
        self.outside.put_back()
        for name, state in self.kept.items():
            session.build.kept[name].load_state_dict(state)
        randomness.restore(self.streams, session.build.device)


@dataclasses.dataclass
class Seen:
    """What a look at a step shows beside its outcome: the placed batch, gradients before the update, and the
    settings of modules while the loss is computed. `fault` is what went wrong in looking.
    """

    batch: Any = None
    versions: tuple[int, ...] = ()  # of the data's own batch, when it was placed
    placing_drew = False  # did torch draw random numbers when the batch was placed?
    gradients: Tensors = dataclasses.field(default_factory=dict)
    modules: Facts | None = None
    fault: Exception | None = None


class Twin:
    """Repeats steps of a job. Raises what building a job raises (see `start`)."""

    def __init__(self, job: Job, machine: Machine, seed: int) -> None:
        self.job = job
        outside = Outside((job.model, job.optimizer, job.scheduler), [])
        if outside.one_way:
            raise LeavesATrace(TAKES.format("the Job's model(), optimizer() or scheduler()"))
        try:
            with silence():  # the training's own will say it
                self.session = start(job, Plan(), machine, seed=seed)
                self.scheduler = call(job, "scheduler", self.session.optimizer) if job.scheduler else None
        finally:
            outside.put_back()
        self.device = self.session.build.device
        self.schedule_code = code_of_schedules(self.scheduler)
        functions = (job.loss, job.on_gradients, job.metric, job.data, job.validation)
        self.code = Code((*functions, *self.schedule_code.things), self.session.build.models)
        self.schedules_freely = may_change_anything(self.scheduler)
        self.settings = facts_of_session(self.session)
        self.modules: Facts | None = None
        self.moving: set[tuple[int, str, str]] = set()  # attributes that a step changes
        self.turning: set[str] = set()  # weights that a step freezes, or lets train again
        self._leave()

    def is_part_of(self, session: Session) -> bool:
        """Does the job hand out one model again and again?"""
        own, trained = (
            {id(t) for m in s.build.models for t in (*m.parameters(), *m.buffers())}
            for s in (self.session, session)
        )
        return bool(own & trained)

    @contextmanager
    def entered(self, plan: Plan | None = None) -> Iterator[Session]:
        """Open it under the reference, or under `plan`; then every flag of the process is as before."""
        for model in self.session.build.models:
            model.to(self.device)
        self.session = reopened(self.session, self.job, plan or Plan(), lambda: None)
        try:
            yield self.session
        finally:
            self._leave()

    def _leave(self) -> None:
        self.session.close()
        for optimizer in self.session.optimizers:
            optimizer.state.clear()
        for model in self.session.build.models:
            for parameter in model.parameters():
                parameter.grad = None
            if self.device.type == "cuda":
                model.to("cpu")

    def run(
        self,
        before: Before,
        batch: Batch,
        *,
        draws: AbstractContextManager[Any] | None = None,
        noise: AbstractContextManager[Any] | None = None,
    ) -> Outcome:
        """The step from `before` on a placed batch, by the session that is open now."""
        session = self.session
        restore(session, before.snapshot)
        before.outside.put_back()
        models = session.build.models
        self._take_over(before)
        attributes_before = attributes(models)
        trained = {name: parameter.requires_grad for name, parameter in named_parameters(models)}
        randomness.restore(before.streams, self.device)
        with unheard(), noise or nullcontext(), draws or nullcontext(), seen(session) as found:
            try:
                loss = session.step(_copied(batch, torch.Tensor.clone))
            finally:
                self.modules = found.modules
        self.moving |= set(changed(attributes(models), attributes_before))
        self.turning |= {name for name, p in named_parameters(models) if p.requires_grad != trained[name]}
        after = State(*(_mapped(part, torch.Tensor.clone) for part in named(session)))
        return outcome_of(loss, after, found.gradients)

    def _take_over(self, before: Before) -> None:
        """What a step changes, and what the job's own code may have changed since the last one repeated here,
        such as a schedule that thaws weights.
        """
        models = self.session.build.models
        taken = {
            key: before.attributes[key]
            for key in changed(attributes(models), before.attributes)
            if key in before.attributes and (key in self.moving or self._may_assign(key, before))
        }
        assign(models, taken)
        for name, parameter in self._turned(before):
            if name in self.turning or self._may_turn(parameter, before):
                parameter.requires_grad_(not parameter.requires_grad)
        if self.schedule_code.may_turn_modes:
            for name, module in named_modules(models):
                module.training = before.modes.get(name, module.training)

    def require_known_freezing(self, before: Before) -> None:
        """Raises Unlike where weights train no more, and the job's own code may have frozen them in a step
        that was not repeated: nobody knows whether it did, or the plan.
        """
        for name, parameter in self._turned(before):
            known = name in self.turning or self._may_turn(parameter, before)
            if parameter.requires_grad and self.code.may_freeze and not known:
                raise Unlike(FREEZES.format(name))

    def _turned(self, before: Before) -> list[tuple[str, nn.Parameter]]:
        """The twin's weights that do not train as the real step's did, or train and those did not."""
        return [
            (name, parameter)
            for name, parameter in named_parameters(self.session.build.models)
            if before.settings.get(f"requires_grad of {name}", parameter.requires_grad)
            != parameter.requires_grad
        ]

    def _may_turn(self, parameter: nn.Parameter, before: Before) -> bool:
        """May the job have frozen this weight between two steps, or let it train again in an earlier one?"""
        if parameter.requires_grad:
            return self.schedule_code.may_freeze
        return self.schedule_code.may_thaw or (self.code.may_thaw and before.snapshot.position > 0)

    def _may_assign(self, key: tuple[int, str, str], before: Before) -> bool:
        part = dict(self.session.build.models[key[0]].named_modules()).get(key[1])
        of_torch = type(part).__module__.startswith("torch.nn.")
        return self.code.may_assign(key[2].rpartition(".")[2], before.attributes[key], of_torch)

    def halves(self, plan: Plan, before: Before, batch: Batch) -> dict[Place, list[bool]]:
        """Which results the plan's precision part stores in 16 bits; see `Halves`."""
        precision = plan.precision
        if not precision.techniques:
            return {}
        with self.entered(precision) as session:
            for _ in range(SETTLING_STEPS if session.build.kept else 0):
                self.run(before, batch)
            noted = Halves()
            self.run(before, batch, noise=noted)
        return noted.places()


@contextmanager
def unheard() -> Iterator[None]:
    """Inside, nobody hears what the job prints, warns of and logs. Raises LeavesATrace where it opens a file
    to write, before anything is written.
    """
    with silence(), nothing_written(lambda _: LeavesATrace(WRITES)):
        yield


def places_in(files: list[Any]) -> list[int | None]:
    """How far each file is read or written; None where that is not known."""
    found: list[int | None] = []
    for file in files:
        try:
            found.append(file.tell())
        except (OSError, ValueError):  # a pipe, or closed
            found.append(None)
    return found


@contextmanager
def seen(session: Session, begin_piece: Callable[[], None] = lambda: None) -> Iterator[Seen]:
    """Look at the step that `session` takes inside. `begin_piece` is called before each forward pass."""
    found = Seen()

    def look(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # the step itself must not fail because somebody looks
            if raised_by_handler(error):
                raise
            found.fault = error

    def see_modules() -> None:
        begin_piece()
        found.modules = found.modules or facts_of_modules(session.build.models)

    def see_gradients() -> None:
        for name, parameter in named_parameters(session.build.models):
            if parameter.grad is not None:
                found.gradients[name] = to_host(parameter.grad)

    def forward(following: Callable[[Any], Any], batch: Batch) -> Any:
        look(see_modules)
        return following(batch)

    def update(following: Callable[[], Any]) -> Any:
        look(see_gradients)
        return following()

    with session.seams.observed(forward=forward, update=update):
        yield found


@contextmanager
def placing(session: Session, found: Seen) -> Iterator[None]:
    """Keep a copy of the batch as the plan places it, in plain memory order, on `found`."""

    def place(following: Callable[[Any], Any], batch: Batch) -> Any:
        state = random_state()
        placed = following(batch)
        found.versions = versions_of(batch)
        found.placing_drew = not torch.equal(state, random_state())
        try:
            found.batch = _copied(placed, _plain_copy)
        except Exception as error:
            if raised_by_handler(error):
                raise
            found.fault = error
        return placed

    with session.seams.observed(place=place):
        yield


def outcome_of(loss: object, after: State, gradients: Tensors) -> Outcome:
    """What a single step left behind."""
    value = float(torch.as_tensor(loss).detach())
    return Outcome([value], after, NO_OUTPUTS, random_state(), drew=False, gradients=gradients)


def outside_of(session: Session, twin: Twin) -> Outside:
    """What a step of a job reaches in Python, but for its models: a name of the job's may still be that of
    the twin's.
    """
    models = (*session.build.models, *twin.session.build.models)
    return Outside((twin.job.loss, twin.job.on_gradients), models, store="cpu")


def modules_of(session: Session) -> Iterator[nn.Module]:
    """All parts of its models."""
    for model in session.build.models:
        yield from model.modules()


def named(session: Session) -> tuple[Tensors, Tensors]:
    """The session's own parameters and buffers, by name, as they are."""
    models = session.build.models
    return (
        {name: p.detach() for name, p in named_parameters(models)},
        {name: b.detach() for name, b in named_buffers(models)},
    )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, so that watching takes no memory of the device while the step runs."""
    return tensor.detach().to_dense().to("cpu", copy=True)


def free() -> None:
    """Give back the memory of what is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def versions_of(batch: Batch) -> tuple[int, ...]:
    """How often each tensor was written; always 0 of those that do not count it."""
    return tuple(0 if tensor.is_inference() else version_of(tensor) for tensor in tensors(batch))


def _copied(batch: Batch, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a batch that a step may edit: of its tensors, its arrays, and objects of a person's class."""

    def copied(part: Any) -> Any:
        return of_tensor(part) if isinstance(part, torch.Tensor) else copy.deepcopy(part)

    return map_tensors(batch, copied, _is_opaque)


def _is_opaque(part: object) -> bool:
    """Does nobody look into it for tensors, though a step may write into it?"""
    looked_into = (tuple, list, dict, UserDict)
    if isinstance(part, numpy.ndarray):
        return True
    return is_persons(part) and not (isinstance(part, looked_into) or is_object(part) or fields_of(part))


def _plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _mapped(part: Tensors, function: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {name: function(tensor) for name, tensor in part.items()}
