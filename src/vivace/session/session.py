"""Session: a job opened under a plan: an object with `step(batch)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, Self

import torch

from vivace.errors import InputError, JobError
from vivace.job import Batch
from vivace.mechanisms.strided import mend_strided
from vivace.plan import Plan
from vivace.technique import Build, Numerics, Seam
from vivace.technique.registry import acting
from vivace.technique.step import Step
from vivace.tensors import objects
from vivace.tensors.optimizers import forget_gradients
from vivace.tensors.trees import is_object, map_tensors


class Session:
    """Built by `attach` or `start`. Closing it restores every process flag and the person's objects.

    `seams` is the composed step, which `Step.observed` watches.
    """

    def __init__(
        self,
        plan: Plan,
        build: Build,
        *,
        loss: Callable[[Any, Any], Any] | None,
        step: Callable[[Any], Any] | None,
        on_gradients: Callable[[Any], Any] | None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self.plan = plan
        self.build = build
        self.model = build.models[0] if len(build.models) == 1 else None
        self.optimizer = build.optimizer
        self.built: Any = self.model  # what the Job's model() returned, where a Job was opened
        self._bystanders: list[torch.Tensor] = []
        self.optimizers = build.optimizers = list(optimizers)
        self._loss = build.loss = loss
        self._on_gradients = build.on_gradients = on_gradients
        defaults: dict[Seam, Callable[..., Any]] = {
            Seam.BATCHES: lambda loader: loader,
            Seam.VALIDATION: lambda loader: loader,
            Seam.PLACE: partial(place, device=build.device),
            Seam.FORWARD: self._default_forward,
            Seam.BACKWARD: torch.Tensor.backward,
            Seam.ACCUMULATING: nullcontext,
            Seam.GRADIENTS: self._default_gradients,
            Seam.FINISH: lambda: None,
            Seam.UPDATE: lambda: self.optimizer.step() and None,  # type: ignore[union-attr]
            Seam.STEP: step or self._default_step,
        }
        sharding = any(technique.card.shards_weights for technique in plan.techniques)
        try:
            if loss is not None:
                _require_arguments(loss)
            if plan.techniques:
                mend_strided(build)
            for technique in plan.techniques:
                with acting(technique):
                    build.begin(technique)
                    build.require(not sharding or technique.card.acts_on_shards, technique.card.on_shards)
                    technique.apply(build)
            if loss is not None and self.optimizer is not None:
                _require_no_closure(self.optimizer)
            self.seams = build.compose(defaults)
        except BaseException:
            self.close()
            raise

    def belong_to_job(self, built: object) -> None:
        """The session trains what a Job's model() returned, and so answers for all of its gradients: those of
        weights that no optimizer has would otherwise add up from step to step.
        """
        self.built = built
        if not self.build.own_step:
            groups = self.optimizer.param_groups  # type: ignore[union-attr]
            updated = {id(weight) for group in groups for weight in group["params"]}
            weights = (p for model in self.build.models for p in model.parameters() if p.requires_grad)
            self._bystanders = [weight for weight in weights if id(weight) not in updated]

    @property
    def promise(self) -> Numerics:
        """The largest change of numbers that this plan causes on this job."""
        return self.build.numerics

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on one batch; returns the detached mean loss, without waiting for the device."""
        seams = self.seams
        with self._on_device():
            return seams.step(seams.place(batch))

    def plain_step(self, batch: Batch) -> torch.Tensor:
        """One step without what wraps it whole, such as a captured graph, which hides its operators.

        A step of the person's own is taken as it is.
        """
        if self.build.own_step:
            return self.step(batch)
        with self._on_device():
            return self._default_step(self.seams.place(batch))

    def _on_device(self) -> AbstractContextManager[Any]:
        """Inside, CUDA's current device is the model's: streams, graphs and kernels of Triton go there."""
        if self.build.device.type != "cuda" or self.build.own_step:  # an own step may use several devices
            return nullcontext()
        return torch.cuda.device(self.build.device)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """One pass over a loader, fed as the plan says."""
        return iter(self.seams.batches(loader))

    def validation(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The same batches as the loader gives, for the metric."""
        return self.seams.validation(loader)

    def place(self, batch: Batch) -> Any:
        """A batch on the device, as the plan puts it there."""
        return self.seams.place(batch)

    def whole(self) -> AbstractContextManager[None]:
        """Inside, this process can use the model alone, for reading. All ranks enter it together."""
        return nullcontext() if self.build.shards is None else self.build.shards.whole()

    def forget(self) -> None:
        """Drop what was recorded of the loss and the model's Python, because that has changed."""
        for callback in self.build.forget_callbacks:
            callback()

    def close(self) -> None:
        """Undo everything that the plan changed, last change first; nothing steps or feeds afterwards."""
        self.seams = Step(dict.fromkeys(Seam, _closed))
        try:
            self.build.close()
        finally:
            self.build.seams = self.seams  # those of the plan hold this session, and so its model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _default_forward(self, batch: Batch) -> torch.Tensor:
        assert self._loss is not None
        loss = self._loss(self.model, batch)
        if not isinstance(loss, torch.Tensor):
            raise JobError(f"the loss is {type(loss).__name__}; it must be a tensor, the mean over the batch")
        if loss.numel() != 1:
            raise JobError(
                f"the loss has the shape {tuple(loss.shape)}; it must be one number, the mean over the batch"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise JobError("the loss depends on no weight that is trained: all are frozen, or it is detached")
        return loss

    def _default_gradients(self, batch: Batch) -> torch.Tensor:
        seams = self.seams
        loss = seams.forward(batch)
        seams.backward(loss)
        return loss.detach()

    def _default_step(self, batch: Batch) -> torch.Tensor:
        seams = self.seams
        groups = self.optimizer.param_groups  # type: ignore[union-attr]
        for weights in (self._bystanders, *(group["params"] for group in groups)):
            for weight in weights:
                weight.grad = None  # of somebody else, such as a metric that differentiates
        try:
            loss = seams.gradients(batch)
            seams.finish()
            if self._on_gradients is not None:
                with nullcontext() if self.build.shards is None else self.build.shards.reading():
                    self._on_gradients(self.model)
            seams.update()
        finally:  # a step that failed half-way leaves nothing to be added to the next one's gradients
            forget_gradients(self.optimizer)  # type: ignore[arg-type]
            for weight in self._bystanders:
                weight.grad = None
        return loss


def place(batch: Batch, *, device: torch.device) -> Any:
    """Move every tensor of a batch to `device`; tensors that are there already are returned as they are."""

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=part.is_pinned())
        return objects.moved(part, device)

    return map_tensors(batch, move, is_object)


def _closed(*_: object) -> NoReturn:
    raise InputError(
        "this session is closed, and its plan undone: use it before close() and inside its `with`, or attach "
        "again"
    )


def _require_arguments(loss: Callable[[Any, Any], Any]) -> None:
    """Raises JobError for what cannot be called with a model and a batch, such as torch's own losses."""
    name = getattr(loss, "__name__", f"{type(loss).__name__}()")
    of_torch = getattr(loss, "__module__", None) in ("torch.nn.functional", "torch.nn.modules.loss")
    if of_torch and not hasattr(loss, "__wrapped__"):  # what wraps one of torch's has its module's name
        raise JobError(
            f"the loss is called with the model and a batch, and {name} takes outputs and targets: write "
            f"loss=lambda model, batch: {name}(model(batch[0]), batch[1]), or as your batches are"
        )
    try:
        signature = inspect.signature(loss, follow_wrapped=False)  # a decorator's own, not its function's
    except ValueError:  # of a function that does not say
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise JobError(
            f"the loss is called with the model and a batch, and {name} takes {signature}: it must take "
            "these two"
        ) from None


def _require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises JobError for one whose step cannot be called alone, such as LBFGS."""
    try:  # of the class: schedules and trainers wrap the method of the object
        asked = inspect.signature(type(optimizer).step).parameters.get("closure")
    except ValueError:  # of a method that does not say
        return
    if asked is not None and asked.default is asked.empty:
        name = type(optimizer).__name__
        raise JobError(
            f"{name} computes the loss itself, by a function that its step takes, and with loss= no such "
            f"function is given: write a step= of your own that calls {name}'s"
        )
