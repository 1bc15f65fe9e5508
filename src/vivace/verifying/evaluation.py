"""Asking the plain model for its outputs in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from vivace.errors import ran_out_of_memory
from vivace.job import Batch, Job
from vivace.session.opening import seed_everything
from vivace.session.session import Session
from vivace.tensors.randomness import Streams
from vivace.tensors.trees import map_tensors, tensors
from vivace.verifying.displacement import State, output_distance, spread_of
from vivace.verifying.draws import LogicalDraws
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.judgement import LIMIT, check
from vivace.verifying.states import InPython, clone, load_state, state_of

HELD_OUT, HELD_OUT_FACTOR = "validation batch ", 2.0
CHANGES = 2  # times what the loss may not read is changed,
FAR = 10.0  # and by so many times the outputs' spread


class Way(NamedTuple):
    """Are all modules put into evaluation mode, or torch's own alone; and are gradients on?"""

    whole: bool
    gradients: bool


# The first that a job's loss bears.
WAYS = (Way(True, False), Way(True, True), Way(False, False), Way(False, True))


class Evaluation:
    """The plain model's outputs in evaluation mode, on one placed batch and on those that are held out.

    Some models put out something else in that mode than their loss takes: torchvision's detectors return
    boxes, as many as they find, instead of losses, and GoogLeNet leaves auxiliary outputs away. For these,
    which the first evaluation tells, only torch's own modules are put into that mode (what BatchNorm and
    Dropout do is what a plan could spoil), and the outputs are those with which the model trains. A loss that
    differentiates by itself, as a gradient penalty does, is evaluated with gradients on.
    """

    def __init__(self, job: Job, batch: Batch) -> None:
        self.job = job
        self.batch = batch
        self.held_out: list[Any] = []
        self.way: Way | None = None
        self.python: InPython | None = None  # with which to evaluate, where steps change that
        self.unread: list[torch.Tensor | None] = []
        self.called = [""]  # the modules whose outputs are looked at: the model, or what the loss calls of it

    def hold_out(self, session: Session, batches: Sequence[Batch]) -> None:
        """Look from now on also at such of these, validation data as they are loaded, as the loss can take,
        and leave out what the loss does not read of the outputs, such as those of padding (`unread`).

        Nobody promised that it takes any; and those that are not finite say nothing.
        """
        self(session, state_of(session))
        for batch in batches if self.way is not None else ():
            try:
                placed = session.place(batch)
                outputs = self._outputs(session, self.way or WAYS[0], placed)
            except Exception:  # a person's code on other data than it was made for
                continue
            self.held_out += [placed] if outputs.isfinite().all() else []
        if self.way is not None:
            self.unread = [self._unread(session, self.way, b) for b in (self.batch, *self.held_out)]

    def _unread(self, session: Session, way: Way, batch: Batch) -> torch.Tensor | None:
        """Which numbers of the outputs the loss does not read: it has no gradient there, and is the same bit
        for bit whatever they are. None where it reads all, or has no gradients in evaluation.
        """
        changed = _Changed()
        try:
            slopes = changed.slopes(lambda: self._loss(session, Way(way.whole, True), batch, changed))
            if not any(bool((slope == 0).any()) for slope in slopes):
                return None
            unread = [slope == 0 for slope in slopes]
            plain = self._loss(session, way, batch, changed)
            for seed in range(CHANGES):
                changed.where, changed.seed = unread, seed
                if not torch.equal(self._loss(session, way, batch, changed).detach(), plain.detach()):
                    return None
        except Exception:  # whatever a person's model puts out
            return None
        return torch.cat([where.flatten() for where in unread])

    def everywhere(self, session: Session, state: State) -> list[torch.Tensor]:
        """Of the batch and of each that is held out, all floating-point outputs with the weights and buffers
        of `state`.
        """
        return [self(session, state), *self._of_held_out(session)]

    def __call__(self, session: Session, state: State) -> torch.Tensor:
        """All floating-point and complex outputs with the weights and buffers of `state`, as one vector; a
        single zero for a job with its own step.
        """
        load_state(session, state)
        if self.job.loss is None:
            return torch.zeros(1)
        if self.way is not None:
            return self._outputs(session, self.way, self.batch)
        for way in WAYS:
            outputs: list[torch.Tensor] = []
            try:
                self._loss(session, way, self.batch, _keep(outputs))
            except Exception as error:
                if ran_out_of_memory(error) or way == WAYS[-1]:
                    raise
                continue
            self.way = way
            if outputs:
                return torch.cat(outputs)
            self.called = self._outermost(session, way)
            return self._outputs(session, way, self.batch)
        raise AssertionError

    def _outermost(self, session: Session, way: Way) -> list[str]:
        """The names of the modules that the loss calls by itself, where it does not call the model: one with
        a method that gives the loss, for example.
        """
        (model,), hooks, names, inside = session.build.models, list[Any](), list[str](), list[str]()

        def enter(name: str, *_: object) -> None:
            names.extend([name] if not inside and name not in names else [])
            inside.append(name)

        def leave(*_: object) -> None:
            inside.pop()

        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(enter, name)))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            self._loss(session, way, self.batch, lambda *_: None)
        finally:
            for hook in hooks:
                hook.remove()
        return names

    def as_it_is(self, session: Session) -> list[torch.Tensor]:
        """As `everywhere` of the session's weights as they are, under random streams that go on as before."""
        if self.job.loss is None or self.way is None:
            return [torch.zeros(1)]
        with Streams(0, session.build.device):
            return [self._outputs(session, self.way, self.batch), *self._of_held_out(session)]

    def _of_held_out(self, session: Session) -> list[torch.Tensor]:
        return [self._outputs(session, self.way or WAYS[0], batch) for batch in self.held_out]

    def _outputs(self, session: Session, way: Way, batch: Batch) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        self._loss(session, way, batch, _keep(outputs))
        return torch.cat(outputs) if outputs else torch.zeros(1)

    def _loss(self, session: Session, way: Way, batch: Batch, at_outputs: Callable[..., Any]) -> torch.Tensor:
        assert self.job.loss is not None
        (model,) = session.build.models
        modes = [(module, module.training) for module in model.modules()]
        hooks = [model.get_submodule(name).register_forward_hook(at_outputs) for name in self.called]
        before = InPython.of(session, self.job, self.python) if self.python is not None else None
        try:
            if self.python is not None:
                self.python.put_back(session)
            if way.whole:
                model.eval()
            else:
                for module in filter(_of_torch, model.modules()):
                    module.training = False
            seed_everything(2)
            with session.whole(), torch.set_grad_enabled(way.gradients), LogicalDraws():
                loss: torch.Tensor = self.job.loss(model, clone(batch))
                return loss
        finally:
            for module, mode in modes:
                module.training = mode
            for hook in hooks:
                hook.remove()
            if before is not None:
                before.put_back(session)


class _Changed:
    """A forward hook that keeps outputs, and puts other numbers in their place `where` that is said."""

    def __init__(self) -> None:
        self.where: list[torch.Tensor] = []
        self.seed = 0
        self._kept: list[torch.Tensor] = []

    def slopes(self, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """The gradient of a loss for each tensor that was put out; ones where it reads nothing of it, so that
        a tensor counts as a whole or by its numbers.
        """
        value = loss()
        found = torch.autograd.grad(value, self._kept, allow_unused=True)
        return [
            torch.ones_like(t) if g is None or not g.any() else g
            for t, g in zip(self._kept, found, strict=True)
        ]

    def __call__(self, module: nn.Module, arguments: object, output: object) -> Any:
        """Keep them, and give what stands in their place."""
        numbers = torch.Generator().manual_seed(self.seed)
        if not self.where:
            self._kept += [t for t in tensors(output) if t.is_floating_point()]
            return None
        waiting = iter(self.where)

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            noise = torch.randn(tensor.shape, generator=numbers).to(tensor)
            return torch.where(next(waiting), tensor + FAR * spread_of(tensor) * noise, tensor)

        return map_tensors(output, changed)


def checks_of(
    mine: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    roundoff: float,
    when: str = "",
    unread: Sequence[torch.Tensor | None] = (),
) -> list[dict[str, Any]]:
    """The figures of evaluations under a plan, beside the plain model's with the same weights; but for what
    is `unread`.

    The least spread of outputs is that of the first ones: few samples of validation data may give all but
    the same. Few of them also round unevenly, so twice the limit holds. What is not finite in the plain model
    says nothing: of the first ones that is told.
    """
    found, least = [], 0.0
    for number, (ours, theirs) in enumerate(zip(mine, plain, strict=False)):
        if number and not theirs.isfinite().all():
            continue
        left_out = unread[number] if number < len(unread) else None
        if left_out is not None and left_out.shape == ours.shape == theirs.shape:
            ours, theirs = ours[~left_out], theirs[~left_out]
        apart = _apart(ours, theirs, least)
        least = spread_of(theirs) if not number else least
        measure, limit = Measure(Quantity.EVALUATION_UNDER_PLAN), LIMIT * (HELD_OUT_FACTOR if number else 1)
        known = math.nan if theirs.isnan().any() else 0.0  # of what rounds; bit for bit it can be told
        figure = check(measure, 0, apart, known, roundoff, floor=roundoff / 4, limit=limit)
        name = f"{measure}, {HELD_OUT}{number}" if number else f"{measure}"
        found.append(figure | {"name": f"{name}, {when or 'from step 0'}"})
    return found


def _apart(ours: torch.Tensor, theirs: torch.Tensor, least: float) -> float:
    """Their distance; what is no number in both says nothing, and beside a number it is infinitely far."""
    gaps = theirs.isnan()
    if ours.shape == theirs.shape and gaps.any():
        if not torch.equal(ours.isnan(), gaps):
            return math.inf
        ours, theirs = ours[~gaps], theirs[~gaps]
    return output_distance(ours, theirs, least)


def _of_torch(module: nn.Module) -> bool:
    """Is its behaviour in evaluation mode torch's own? A container has none."""
    homes = {base.__module__ for base in type(module).__mro__ if base is not nn.Module}
    return any(home.startswith("torch.nn.modules.") and not home.endswith(".container") for home in homes)


def _keep(outputs: list[torch.Tensor]) -> Callable[..., None]:
    def keep(module: nn.Module, arguments: object, output: object) -> None:
        for tensor in tensors(output):
            numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            if numbers.is_floating_point():
                outputs.append(numbers.detach().float().flatten())

    return keep
