"""Planted defects in what acts on a script's own steps: on the call of its model, and on its update.

All of them show within one step, which is what a proof runs on copies. What waits for a later one is not
here: docs/run.md says that it is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from defects import groups, modules, parameters, plant, with_weight
from torch import nn
from torch.optim import Optimizer

from vivace import Build, Seam, Stage
from vivace.tensors.trees import map_tensors

LIVE: list[str] = []


def with_inputs(build: Build, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Call the model with something else; refused where it gets no images."""

    def call(following: Callable[[Any], Any], batch: Any) -> Any:
        function, arguments, keywords = batch
        images = [one for one in arguments if isinstance(one, torch.Tensor) and one.dim() == 4]
        build.require(images, "the model is not called with images")
        changed = (change(one) if one is images[0] else one for one in arguments)
        return following((function, tuple(changed), keywords))

    build.wrap(Seam.STEP, call)


def with_outputs(build: Build, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Hand on something else than the model returns."""
    build.wrap(Seam.STEP, lambda following, batch: map_tensors(following(batch), change))


def with_gradient(build: Build, of: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a backward pass leave another gradient of one parameter."""
    build.on_close(of.register_hook(change).remove)


def with_weights(build: Build, change: Callable[[torch.Tensor], torch.Tensor], *, all_of: bool) -> None:
    """Let linear layers and convolutions compute with other weights, all of them or the one in the middle."""
    found = [m for m in modules(build, nn.Linear, nn.Conv2d) if type(m) in (nn.Linear, nn.Conv2d)]
    for module in found if all_of else found[len(found) // 2 :][:1]:
        with_weight(build, module, change)


def with_groups(build: Build, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let the optimizer step with other settings; refused where these are its own."""
    before = [dict(group) for group in build.optimizer.param_groups]
    changes = [change(group) for group in before]
    different = any(
        was[key] != value for was, to in zip(before, changes, strict=True) for key, value in to.items()
    )
    build.require(different, "the optimizer has these settings")
    for group, to in zip(build.optimizer.param_groups, changes, strict=True):
        group.update(to)

    def restore() -> None:
        for group, was in zip(build.optimizer.param_groups, before, strict=True):
            group.update({key: was[key] for key in was if key != "params"})

    build.on_close(restore)


def around_update(build: Build, action: Callable[[Optimizer], None], *, before: bool) -> None:
    """Do something before or after each update."""
    hooked = build.optimizer.register_step_pre_hook if before else build.optimizer.register_step_post_hook
    build.on_close(hooked(lambda optimizer, *_: action(optimizer)).remove)


def updated(optimizer: Optimizer) -> list[Any]:
    """What an optimizer updates, the first parameters first."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@plant(LIVE)
def rows_for_columns(build: Build) -> None:
    """Feature maps in channels-last order are read as if they were not."""
    with_inputs(build, lambda images: images.permute(0, 2, 3, 1).reshape(images.shape))


@plant(LIVE)
def one_image_for_another(build: Build) -> None:
    """The last image of a batch is the first one again."""
    with_inputs(build, lambda images: torch.cat([images[:-1], images[:1]]))


@plant(LIVE)
def image_cut(build: Build) -> None:
    """The last column of each image is padding."""
    with_inputs(build, lambda images: nn.functional.pad(images[..., :-1], (0, 1)))


@plant(LIVE, factor=0.98)
@plant(LIVE, factor=1.1)
def outputs_scaled(build: Build, factor: float) -> None:
    """A factor is left in what the model returns."""
    with_outputs(build, lambda output: output * factor if output.is_floating_point() else output)


@plant(LIVE, factor=0.5)
@plant(LIVE, factor=1024.0)
def gradients_scaled(build: Build, factor: float) -> None:
    """The loss is scaled and the gradients are not scaled back."""
    for parameter in parameters(build):
        with_gradient(build, parameter, lambda gradient: gradient * factor)


@plant(LIVE)
def smallest_gradient_zeroed(build: Build) -> None:
    """The gradient of one small parameter is lost."""
    with_gradient(build, min(parameters(build), key=torch.Tensor.numel), torch.zeros_like)


@plant(LIVE, factor=0.9)
@plant(LIVE, factor=1.2)
def gradient_of_one_scaled(build: Build, factor: float) -> None:
    """A kernel sums one gradient over too few samples, or some of them twice."""
    found = parameters(build)
    with_gradient(build, found[len(found) // 2], lambda gradient: gradient * factor)


@plant(LIVE)
def first_gradient_turned_round(build: Build) -> None:
    """A sign is lost in the first layer."""
    with_gradient(build, parameters(build)[0], torch.neg)


@plant(LIVE)
def layer_detached(build: Build) -> None:
    """One layer computes, and learns nothing."""
    with_weights(build, torch.Tensor.detach, all_of=False)


@plant(LIVE)
def weights_in_float8(build: Build) -> None:
    """Products of weights with four bits fewer than bfloat16 has, which is claimed."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        largest = weight.detach().abs().max().clamp_min(1e-12)
        coarse = (weight.detach() / largest).to(torch.float8_e4m3fn).to(weight.dtype) * largest
        return weight + (coarse - weight).detach()

    with_weights(build, rounded, all_of=True)


@plant(LIVE)
def weights_transposed(build: Build) -> None:
    """A kernel reads square weights the wrong way round."""
    square = [
        m for m in modules(build, nn.Linear) if type(m) is nn.Linear and m.in_features == m.out_features
    ]
    build.require(square, "no layer is square")
    build.set_flag(
        square[0], "forward", lambda x: nn.functional.linear(x, square[0].weight.t(), square[0].bias)
    )


@plant(LIVE)
def bias_dropped(build: Build) -> None:
    """One layer adds no bias, as where it was to be fused into the product before."""
    found = [
        m for m in modules(build, nn.Linear, nn.Conv2d, nn.LayerNorm) if m.bias is not None and m.bias.any()
    ]
    build.require(found, "no layer has a bias")
    build.on_close(lambda module=found[-1], bias=found[-1].bias: setattr(module, "bias", bias))
    found[-1].bias = None


@plant(LIVE, stage=Stage.OPTIMIZER)
def decay_lost(build: Build) -> None:
    """The update knows no weight decay."""
    groups(build, "weight_decay")
    with_groups(build, lambda group: {"weight_decay": 0.0})


@plant(LIVE, stage=Stage.OPTIMIZER)
def decay_doubled(build: Build) -> None:
    """The weights decay twice."""
    groups(build, "weight_decay")
    with_groups(build, lambda group: {"weight_decay": 2 * group["weight_decay"]})


@plant(LIVE, stage=Stage.OPTIMIZER, factor=0.98)
@plant(LIVE, stage=Stage.OPTIMIZER, factor=1.05)
def rate_scaled(build: Build, factor: float) -> None:
    """The update takes steps of another length."""
    with_groups(build, lambda group: {"lr": factor * group["lr"]})


@plant(LIVE, stage=Stage.OPTIMIZER)
def other_momentum(build: Build) -> None:
    """SGD's momentum is another one."""
    groups(build, "momentum")
    with_groups(build, lambda group: {"momentum": 0.95 * group["momentum"]})


@plant(LIVE, stage=Stage.OPTIMIZER)
def nesterov_left_out(build: Build) -> None:
    """Momentum without Nesterov's look ahead."""
    groups(build, "nesterov")
    with_groups(build, lambda group: {"nesterov": False})


@plant(LIVE, stage=Stage.OPTIMIZER, position=0, value=0.85)
@plant(LIVE, stage=Stage.OPTIMIZER, position=1, value=0.99)
def other_betas(build: Build, position: int, value: float) -> None:
    """Adam's averages forget at another pace."""
    groups(build, "betas")
    with_groups(
        build,
        lambda group: {"betas": tuple(value if k == position else b for k, b in enumerate(group["betas"]))},
    )


@plant(LIVE, stage=Stage.OPTIMIZER)
def upwards(build: Build) -> None:
    """The update goes the other way."""
    build.require("maximize" in build.optimizer.defaults, "the optimizer cannot")
    with_groups(build, lambda group: {"maximize": not group["maximize"]})


@plant(LIVE, stage=Stage.OPTIMIZER)
def state_forgotten(build: Build) -> None:
    """Each update is the first one again."""
    build.require(build.optimizer.state, "the optimizer remembers nothing")
    around_update(build, lambda optimizer: optimizer.state.clear(), before=True)


@plant(LIVE, stage=Stage.OPTIMIZER)
def first_left_out(build: Build) -> None:
    """The first parameter is not updated."""

    def drop(optimizer: Optimizer) -> None:
        updated(optimizer)[0].grad = None

    around_update(build, drop, before=True)


@plant(LIVE, stage=Stage.OPTIMIZER)
def stepped_twice(build: Build) -> None:
    """The gradients count twice, as where the update before was not told to forget them."""

    def double(optimizer: Optimizer) -> None:
        for parameter in updated(optimizer):
            parameter.grad.mul_(2)

    around_update(build, double, before=True)


@plant(LIVE, stage=Stage.OPTIMIZER)
def weights_kept_in_half(build: Build) -> None:
    """Weights are kept in bfloat16, where small updates round to nothing."""

    @torch.no_grad()
    def rounded(optimizer: Optimizer) -> None:
        for parameter in updated(optimizer):
            parameter.copy_(parameter.bfloat16())

    around_update(build, rounded, before=False)
