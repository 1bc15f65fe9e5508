"""A row: one run of a stack, with the person's own model, optimizer and data, as `train` opens them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vivace.data.damage import Damage
from vivace.data.order import ordered
from vivace.errors import Refused
from vivace.job import Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.session.opening import call, fed, schedulers_of, start
from vivace.sweeping.space import Parameters
from vivace.sweeping.stacking.tables import in_order
from vivace.sweeping.trial import comparable
from vivace.tensors.randomness import SeededStreams, capture, derive, restore, same_host_state
from vivace.torch_internals.modules import all_hooks, has_step_hooks, is_compiled
from vivace.training.evaluation import Evaluation
from vivace.training.resuming import schedule_of

_MODES = "the mode of its modules"
_PLAIN = (int, float, str, bool, type(None), torch.dtype)


class Row:
    """A run in strict fp32, opened from zero.

    Its random streams stand where they do at the first step of the same run alone; `generator` is that of the
    device, for what a stack draws in its place.
    """

    def __init__(self, number: int, parameters: Parameters, job: Job, machine: Machine, seed: int) -> None:
        self.number, self.parameters, self.job, self.seed = number, parameters, comparable(job), seed
        if job.step is not None:
            raise Refused("the job has a step of its own, which cannot be looked into")
        if job.damaged != "raise":
            raise Refused(f"the job leaves out damaged samples (damaged='{job.damaged}')")
        if job.on_trained is not None:
            raise Refused("the job has on_trained, which is called with the model of a run alone")
        self.session = start(job, Plan(), machine, seed=seed)
        self.device = self.session.build.device
        self.model: nn.Module = self.session.build.models[0]
        self.optimizer: torch.optim.Optimizer = self.session.optimizers[0]
        with SeededStreams(derive(seed, "data")):
            self.loader = call(job, "data")
        self.scheduler = schedule_of(job, self.optimizer)
        self.evaluation = Evaluation(job, self.session, seed, in_order)
        self.streams = capture(self.device)
        self.generator = torch.Generator(self.device)
        self._kind = "cuda" if self.device.type == "cuda" else "torch"
        self.generator.set_state(self.streams[self._kind])
        self.steps = self.epoch = 0
        self.metric: float | None = None
        self.loss = math.nan
        self._require_plain()
        self._begun = self._given()

    def take_up(self, steps: int, epoch: int, streams: dict[str, Any]) -> None:
        """Stand where an earlier process has kept this run; its weights and optimizer are loaded already."""
        self.steps, self.epoch, self.streams = steps, epoch, streams
        self.generator.set_state(streams[self._kind])

    def streams_now(self) -> dict[str, Any]:
        """Where the random streams stand: in a stack only that of the device moves."""
        return {**self.streams, self._kind: self.generator.get_state()}

    def batches(self, epoch: int) -> Iterator[Any]:
        """The placed batches of an epoch, as `train` feeds them to this run alone."""
        source = ordered(self.loader, seed=self.seed, epoch=epoch, damage=Damage.of(self.job))
        return map(self.session.place, fed(self.session, source, derive(self.seed, epoch, "feed")))

    def step_alone(self, batch: object) -> float:
        """The person's own step on a placed batch, on this row's own streams.

        Raises Refused where it draws from Python's or NumPy's, of which a stack has one for all.
        """
        restore(self.streams, self.device)
        loss = float(self.session.step(batch))
        after = capture(self.device)
        if not same_host_state(self.streams, after):
            raise Refused("the step draws from Python's or NumPy's random numbers")
        self.streams = after
        return loss

    def step_scheduler(self) -> None:
        """What `train` does after a step or an epoch."""
        for scheduler in schedulers_of(self.scheduler):
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(self.metric if self.metric is not None else self.loss)
            else:
                scheduler.step()

    def note_modes(self) -> None:
        """Take the modes as they are for those of the beginning: the person's own step has been run."""
        self._begun[_MODES] = self._given()[_MODES]

    def require_as_begun(self) -> None:
        """Raises Refused where the job has since changed what a stack looks at only at the beginning."""
        now = self._given()
        changed = [what for what, before in self._begun.items() if now[what] != before]
        if changed:
            raise Refused(f"the job changes {changed[0]} while it trains, which a stack would not follow")

    def _given(self) -> dict[str, Any]:
        modules, groups = list(self.model.modules()), self.optimizer.param_groups
        return {
            "which weights are trained": [p.requires_grad for p in self.model.parameters()],
            "which weights its optimizer has": [[id(p) for p in group["params"]] for group in groups],
            "how its optimizer updates": [[v for v in g.values() if isinstance(v, bool)] for g in groups],
            _MODES: [module.training for module in modules],
            "the rate of its dropout": [module.p for module in modules if type(module) is nn.Dropout],
        }

    def close(self) -> None:
        """Undo what opening the session changed."""
        self.session.close()

    def _require_plain(self) -> None:
        """Raises Refused where the model holds what a stack cannot take its part of."""
        for name, module in self.model.named_modules():
            where = f"{type(module).__name__} '{name}'" if name else type(module).__name__
            if all_hooks(module):
                raise Refused(f"{where} has hooks, which would see all runs at once")
            if is_compiled(module):
                raise Refused(f"{where} is compiled")
            if isinstance(module, nn.RNNBase):
                raise Refused(f"{where} is recurrent: its kernel takes the weights of one model only")
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise Refused(f"{where} has sparse gradients")
        if has_step_hooks(self.optimizer):
            raise Refused("its optimizer has hooks, which wait for an update of its own")
        own = {id(parameter) for parameter in self.model.parameters()}
        if any(id(p) not in own for group in self.optimizer.param_groups for p in group["params"]):
            raise Refused("its optimizer also trains weights that are not the model's")
        wrong = [name for name, p in self.model.named_parameters() if p.dtype != torch.float32]
        if wrong:
            raise Refused(f"'{wrong[0]}' is not of 32-bit floating-point numbers")
        if self.job.scheduler_every == "step" and isinstance(
            self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
        ):
            raise Refused("ReduceLROnPlateau is stepped each step")


def structure_of(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Equal for runs that may share a stack: modules with their settings, weights, groups of the optimizer,
    and the code of the loss with the plain values in it. Rates of dropout may differ.
    """
    modules = [(name, type(module).__qualname__, _settings(module)) for name, module in model.named_modules()]
    weights = [(n, tuple(t.shape), t.requires_grad) for n, t in model.named_parameters()]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    return (
        repr(modules),
        repr(weights),
        repr(groups),
        type(optimizer).__qualname__,
        repr(_code(job.loss)),
        repr(_code(job.on_gradients)),
        job.scheduler_every,
    )


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    rate = {"p"} if type(module) is nn.Dropout else set()
    return [
        (name, value if isinstance(value, _PLAIN) else _code(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training" and name not in rate
    ]


def _code(thing: Any) -> Any:
    """What of a function tells it from another one: its code, and the plain values that it holds."""
    if isinstance(thing, _PLAIN):
        return thing
    if isinstance(thing, tuple | list):
        return [_code(part) for part in thing]
    if isinstance(thing, functools.partial):
        return _code(thing.func), _code(thing.args), [(k, _code(v)) for k, v in thing.keywords.items()]
    if isinstance(thing, nn.Module):
        return type(thing).__qualname__, _settings(thing)
    code = getattr(thing, "__code__", None)
    if code is None:
        return type(thing).__qualname__
    held = [cell.cell_contents for cell in thing.__closure__ or ()]
    shallow = [value if isinstance(value, _PLAIN) else _shallow(value) for value in held]
    return code.co_code.hex(), [c for c in code.co_consts if isinstance(c, _PLAIN)], shallow


def _shallow(value: object) -> Any:
    if isinstance(value, nn.Module):
        return type(value).__qualname__, _settings(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
