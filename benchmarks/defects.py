"""Planted defects: techniques that claim to change nothing but rounding, and train another model.

Each is a fault that people have made. One that cannot act on a job (no dropout there) refuses. `PLANTED` are
the demanded ones, `FURTHER` milder, rarer or later forms (more in `further_defects`); all claim the unit
roundoff of bfloat16, under which a defect hides best.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

import vivace
from vivace import Build, Card, Numerics, Seam, Stage, Technique
from vivace.tensors.trees import batch_size, map_tensors, split

PLANTED: list[str] = []
FURTHER: list[str] = []
REGISTERED: dict[str, type[Technique]] = {}
SCALE = 65536.0


def plant(names: list[str], stage: Stage = Stage.CAPTURE, **settings: Any) -> Callable[..., Any]:
    """A decorator that registers ``function(build, **settings)`` as a technique.

    A setting's name and value become part of the technique's name.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = "_".join(["defect", function.__name__, *(f"{k}_{v}" for k, v in settings.items())])
        card = Card(stage, Numerics.ROUNDING, name.replace("_", " "), "planted", unit_roundoff=2.0**-8)
        apply = functools.partialmethod(_apply, functools.partial(function, **settings))
        body = {"card": card, "name": name, "apply": apply, "confirm": _confirm, "__annotations__": {}}
        REGISTERED[name] = vivace.register(dataclasses.dataclass(frozen=True)(type(name, (Technique,), body)))
        names.append(name)
        return function

    return register


def _apply(self: Technique, function: Callable[[Build], None], build: Build) -> None:
    function(build)


def _confirm(self: Technique, seen: Any, reference: Any) -> str:
    return "it was planted"


def modules(build: Build, *kinds: type[nn.Module]) -> list[Any]:
    """The model's modules of some kinds; refused where it has none."""
    found = [m for m in build.models[0].modules() if isinstance(m, kinds)]
    build.require(found, f"the model has no {kinds[0].__name__}")
    return found


def norms(build: Build) -> list[Any]:
    """The model's BatchNorm modules."""
    return modules(build, nn.modules.batchnorm._BatchNorm)


def groups(build: Build, key: str) -> list[dict[str, Any]]:
    """The optimizer's groups in which a setting is on; refused where none is."""
    assert build.optimizer is not None
    found = [g for g in build.optimizer.param_groups if g.get(key)]
    build.require(found, f"the optimizer has no {key}")
    return found


def needs(build: Build, fact: str) -> Any:
    """A fact that the job's author wrote on the model; refused where it is not there."""
    build.require(getattr(build.models[0], fact, None), f"the job is not {fact.replace('_', ' ')}")
    return getattr(build.models[0], fact)


def parameters(build: Build) -> list[Any]:
    """The parameters that train."""
    return [p for p in build.models[0].parameters() if p.requires_grad]


def after(build: Build, seam: Seam, action: Callable[[], Any]) -> None:
    """Do something after FINISH or UPDATE."""

    def acted(following: Callable[[], None]) -> None:
        following()
        action()

    build.wrap(seam, acted)


def with_settings(build: Build, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let the optimizer step with other settings, and show the person's own at any other time."""

    def update(following: Callable[[], None]) -> None:
        kept = [dict(group) for group in build.optimizer.param_groups]
        for group in build.optimizer.param_groups:
            group.update(changes(group))
        following()
        for group, before in zip(build.optimizer.param_groups, kept, strict=True):
            group.update(before)

    build.wrap(Seam.UPDATE, update)


def times(build: Build, seam: Seam, factor: Callable[[int], float]) -> None:
    """Scale the gradients after FINISH or before UPDATE, by a factor of the step's number from 1 on."""
    step = iter(range(1, 10**9))

    def scaled(following: Callable[[], None]) -> None:
        value = factor(next(step))
        if seam == Seam.FINISH:
            following()
        for parameter in parameters(build):
            if parameter.grad is not None:
                parameter.grad.mul_(value)
        if seam == Seam.UPDATE:
            following()

    build.wrap(seam, scaled)


def pieces(build: Build, num: int, weights: Callable[[list[int]], list[float]], log: float = 1.0) -> None:
    """Accumulate gradients over pieces with these weights of their losses; a weight of 0 skips the piece."""
    build.require(not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in build.models[0].modules()),
                  "BatchNorm would take its statistics over a piece")  # fmt: skip

    def gradients(batch: Any) -> torch.Tensor:
        parts = split(batch, -(-batch_size(batch) // num))
        total: Any = 0.0
        for part, weight in zip(parts, weights([batch_size(p) for p in parts]), strict=True):
            if weight:
                loss = build.seams.forward(part) * weight
                build.seams.backward(loss)
                total = total + loss.detach() * log
        return total

    build.replace(Seam.GRADIENTS, gradients)


def around_gradients(build: Build, before: Callable[[], Any], afterwards: Callable[[], Any]) -> None:
    """Do something before and after forward and backward."""

    def gradients(following: Callable[[Any], Any], batch: Any) -> Any:
        before()
        loss = following(batch)
        afterwards()
        return loss

    build.wrap(Seam.GRADIENTS, gradients)


def with_weight(build: Build, module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a module compute with another weight than its own."""
    own = module.forward

    def forward(inputs: torch.Tensor) -> Any:
        weight = module._parameters.pop("weight")
        vars(module)["weight"] = change(weight)
        try:
            return own(inputs)
        finally:
            del vars(module)["weight"]
            module._parameters["weight"] = weight

    module.forward = forward
    build.on_close(lambda: vars(module).pop("forward"))


def change_batch(build: Build, change: Callable[[Any], Any]) -> None:
    """Train on something else than what was placed."""
    build.wrap(Seam.PLACE, lambda following, batch: change(following(batch)))


# -----------------------------------------------------------------------------------------------------------
# The demanded twenty


@plant(PLANTED)
def gradients_left_scaled(build: Build) -> None:
    """fp16 loss scaling whose inverse was dropped."""
    build.wrap(Seam.BACKWARD, lambda following, loss: following(loss * SCALE))


@plant(PLANTED)
def unscale_missing_before_clipping(build: Build) -> None:
    """The scaler unscales within its step: what is clipped before is scaled still."""
    needs(build, "clipped_to")
    build.wrap(Seam.BACKWARD, lambda following, loss: following(loss * SCALE))
    times(build, Seam.UPDATE, lambda _: 1 / SCALE)


@plant(PLANTED)
def accumulation_not_divided(build: Build) -> None:
    """Each piece's mean loss counts in full, in the gradient and not in the log."""
    pieces(build, 2, lambda sizes: [1.0] * len(sizes), log=0.5)


@plant(PLANTED)
def last_micro_batch_lost(build: Build) -> None:
    """The last of four pieces is never trained on, the others weighted as if it were."""
    pieces(build, 4, lambda sizes: [s / sum(sizes) for s in sizes[:-1]] + [0.0])


@plant(FURTHER)
def last_micro_batch_skipped(build: Build) -> None:
    """The mean is taken over the first three of four pieces."""
    pieces(build, 4, lambda sizes: [s / sum(sizes[:-1]) for s in sizes[:-1]] + [0.0])


@plant(FURTHER)
def pieces_weighted_alike(build: Build) -> None:
    """Pieces of unlike size count the same."""
    pieces(build, 5, lambda sizes: [1 / len(sizes)] * len(sizes))


@plant(PLANTED)
def weight_decay_lost(build: Build) -> None:
    """Groups rebuilt without their weight decay."""
    for group in groups(build, "weight_decay"):
        group["weight_decay"] = 0.0


@plant(FURTHER)
def weight_decay_lost_inside(build: Build) -> None:
    """An own implementation of the update without weight decay."""
    groups(build, "weight_decay")
    with_settings(build, lambda group: {"weight_decay": 0.0})


@plant(FURTHER, after=40)
@plant(FURTHER, every=5)
@plant(PLANTED, every=1)
def momentum_reset(build: Build, every: int = 1, after: int = 0) -> None:
    """The optimizer's state is forgotten now and then."""
    count = iter(range(1, 10**9))

    def update(following: Callable[[], None]) -> None:
        number = next(count)
        if number > after and number % every == 0:
            build.optimizer.state.clear()
        following()

    build.wrap(Seam.UPDATE, update)


@plant(FURTHER, value=0.2)
@plant(PLANTED, value=0.01)
def batch_norm_momentum(build: Build, value: float) -> None:
    """Another momentum of the running statistics."""
    for module in norms(build):
        build.set_flag(module, "momentum", value)


@plant(FURTHER, after=60)
@plant(PLANTED)
def layer_frozen(build: Build, after: int = 0) -> None:
    """One weight gets no gradient."""
    parameter = parameters(build)[len(parameters(build)) // 2]
    count = iter(range(1, 10**9))

    def finish(following: Callable[[], None]) -> None:
        following()
        if next(count) > after:
            parameter.grad = None

    build.wrap(Seam.FINISH, finish)


@plant(PLANTED)
def dropout_off(build: Build) -> None:
    """No module drops anything in training."""
    found = modules(build, nn.Dropout, nn.MultiheadAttention)
    for module in found:
        build.set_flag(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)


@plant(PLANTED, share=0.02)
def labels_shifted(build: Build, share: float) -> None:
    """A few samples get the next class."""
    draw = random.Random(0)

    def change(batch: Any) -> Any:
        target = batch[-1]
        build.require(len(batch) > 1, "targets are inputs")
        hit = torch.tensor([draw.random() < share for _ in range(len(target))])
        return [*batch[:-1], torch.where(hit, (target + 1) % 8, target)]

    change_batch(build, change)


@plant(FURTHER, share=0.02)
@plant(PLANTED, share=0.05)
def tokens_shifted(build: Build, share: float) -> None:
    """A few tokens are other tokens."""
    build.require(hasattr(build.models[0], "embedding"), "the model has no tokens")
    draw = torch.Generator().manual_seed(0)

    def change(batch: Any) -> Any:
        hit = torch.rand(batch[0].shape, generator=draw) < share
        return [torch.where(hit & (batch[0] > 0), 1 + batch[0] % 23, batch[0])]

    change_batch(build, change)


@plant(FURTHER, since=40, every=10**9)
@plant(FURTHER, since=1, every=2)
@plant(PLANTED, since=3, every=10**9)
def stale_weights(build: Build, since: int, every: int) -> None:
    """A captured graph that computes with the weights of its capture, seldom refreshed."""
    count = iter(range(1, 10**9))
    own: list[torch.Tensor] = []
    held: list[torch.Tensor] = []

    @torch.no_grad()
    def before() -> None:
        number = next(count)
        if number >= since and ((number - since) % every == 0 or not held):
            held[:] = [p.detach().clone() for p in parameters(build)]
        own[:] = [p.detach().clone() for p in parameters(build)]
        for parameter, old in zip(parameters(build), held or own, strict=True):
            parameter.copy_(old)

    @torch.no_grad()
    def afterwards() -> None:
        for parameter, present in zip(parameters(build), own, strict=True):
            parameter.copy_(present)

    around_gradients(build, before, afterwards)


@plant(PLANTED, stage=Stage.DATA)
def batch_order_changed(build: Build) -> None:
    """Workers hand their batches over as they finish them."""

    def feed(following: Callable[[Any], Iterable[Any]], batches: Any) -> Iterator[Any]:
        waiting: list[Any] = []
        for batch in following(batches):
            waiting.append(batch)
            if len(waiting) == 2:
                yield from reversed(waiting)
                waiting = []
        yield from waiting

    build.wrap(Seam.BATCHES, feed)


@plant(FURTHER)
def batches_delayed(build: Build) -> None:
    """A prefetcher of one slot trains on the batch before."""
    slot: list[Any] = []

    def change(batch: Any) -> Any:
        slot.append(map_tensors(batch, torch.Tensor.clone))
        return slot.pop(0) if len(slot) > 1 else slot[0]

    change_batch(build, change)


@plant(FURTHER)
def last_batch_dropped(build: Build) -> None:
    """The last batch of an epoch, which is shorter, is left out."""
    build.wrap(Seam.BATCHES, lambda following, batches: list(following(batches))[:-1])


@plant(FURTHER)
def every_epoch_alike(build: Build) -> None:
    """The order of the first epoch is kept in a cache and fed again."""
    cache: list[Any] = []

    def feed(following: Callable[[Any], Iterable[Any]], batches: Any) -> Iterable[Any]:
        if not cache:
            cache.extend(following(batches))
        return cache

    build.wrap(Seam.BATCHES, feed)


@plant(PLANTED)
def scheduler_stepped_twice(build: Build) -> None:
    """The person's loop and a wrapper both step the scheduler."""
    needs(build, "is_scheduled")
    base = torch.optim.lr_scheduler.LRScheduler
    once = base.step

    def twice(self: Any, *arguments: Any) -> None:
        once(self, *arguments)
        once(self, *arguments)

    build.set_flag(base, "step", twice)


@plant(FURTHER)
def schedule_baked_in(build: Build) -> None:
    """A captured step keeps the learning rate of its capture."""
    rates = [group["lr"] for group in build.optimizer.param_groups]

    def update(following: Callable[[], None]) -> None:
        kept = [group["lr"] for group in build.optimizer.param_groups]
        for group, rate in zip(build.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        following()
        for group, rate in zip(build.optimizer.param_groups, kept, strict=True):
            group["lr"] = rate

    build.wrap(Seam.UPDATE, update)


@plant(PLANTED)
def clipped_before_unscaling(build: Build) -> None:
    """A technique clips by itself, and unscales what it has clipped."""
    limit = needs(build, "clipped_to")
    build.wrap(Seam.BACKWARD, lambda following, loss: following(loss * 16.0))

    def finish(following: Callable[[], None]) -> None:
        following()
        torch.nn.utils.clip_grad_norm_(build.models[0].parameters(), limit)
        for parameter in parameters(build):
            if parameter.grad is not None:
                parameter.grad.div_(16.0)

    build.wrap(Seam.FINISH, finish)


@plant(PLANTED)
def update_swallowed(build: Build) -> None:
    """Weights are kept in bfloat16, where small updates round to nothing."""
    after(build, Seam.UPDATE, lambda: _round(parameters(build)))


@plant(FURTHER)
def one_update_swallowed(build: Build) -> None:
    """One weight is kept in bfloat16."""
    after(build, Seam.UPDATE, lambda: _round(parameters(build)[:1]))


@torch.no_grad()
def _round(chosen: list[Any]) -> None:
    for parameter in chosen:
        parameter.copy_(parameter.bfloat16())


@plant(PLANTED)
def sum_for_mean(build: Build) -> None:
    """The gradient of the sum over samples; the log shows the mean."""
    sizes: list[int] = []

    def gradients(following: Callable[[Any], Any], batch: Any) -> Any:
        sizes[:] = [batch_size(batch)]
        return following(batch)

    build.wrap(Seam.GRADIENTS, gradients)
    build.wrap(Seam.BACKWARD, lambda following, loss: following(loss * sizes[0]))


@plant(PLANTED)
def one_gradient_zeroed(build: Build) -> None:
    """The gradient of one small parameter is lost."""
    small = min(parameters(build), key=lambda p: p.numel())
    after(build, Seam.FINISH, lambda: small.grad is not None and small.grad.zero_())


@plant(PLANTED)
def statistics_not_updated(build: Build) -> None:
    """BatchNorm's running statistics stay as they were."""
    buffers = [b for module in norms(build) for b in (module.running_mean, module.running_var)]
    kept: list[torch.Tensor] = []

    def afterwards() -> None:
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)

    around_gradients(build, lambda: kept.__setitem__(slice(None), [b.clone() for b in buffers]), afterwards)


@plant(FURTHER, value=1e-6)
@plant(PLANTED, value=1e-15)
def epsilon_lost(build: Build, value: float) -> None:
    """An own implementation of the update with another epsilon."""
    others = [group for group in groups(build, "eps") if group["eps"] != value]
    build.require(others, f"the optimizer's epsilon is {value:g}")
    with_settings(build, lambda group: {"eps": value})


@plant(PLANTED)
def sample_repeated(build: Build) -> None:
    """The last sample of each batch is the first one again."""
    change_batch(build, lambda batch: map_tensors(batch, lambda t: torch.cat([t[:-1], t[:1]])))
