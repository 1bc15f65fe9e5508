"""More planted defects: milder, rarer, or beginning late. See `defects`, which registers them."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from defects import (
    FURTHER,
    after,
    around_gradients,
    change_batch,
    groups,
    modules,
    needs,
    norms,
    parameters,
    plant,
    times,
    with_settings,
    with_weight,
)
from torch import nn
from torch.nn import functional

from vivace import Build, Seam
from vivace.tensors.trees import map_tensors


@plant(FURTHER, factor=0.98)
@plant(FURTHER, factor=1.05)
def learning_rate(build: Build, factor: float) -> None:
    """The optimizer steps a little too far, or not far enough."""
    with_settings(build, lambda group: {"lr": group["lr"] * factor})


@plant(FURTHER)
def learning_rate_of_one_layer(build: Build) -> None:
    """One parameter moves a tenth further."""
    chosen = parameters(build)[0]
    before: list[torch.Tensor] = []

    @torch.no_grad()
    def update(following: Callable[[], None]) -> None:
        before[:] = [chosen.detach().clone()]
        following()
        chosen.add_(chosen - before[0], alpha=0.1)

    build.wrap(Seam.UPDATE, update)


@plant(FURTHER, every=8)
def update_skipped(build: Build, every: int) -> None:
    """Now and then a step is taken for one that overflowed."""
    count = iter(range(1, 10**9))
    build.wrap(Seam.UPDATE, lambda following: None if next(count) % every == 0 else following())


@plant(FURTHER)
def weights_averaged(build: Build) -> None:
    """Training goes on from a moving average of the weights."""
    before: list[torch.Tensor] = []

    @torch.no_grad()
    def update(following: Callable[[], None]) -> None:
        before[:] = [p.detach().clone() for p in parameters(build)]
        following()
        for parameter, old in zip(parameters(build), before, strict=True):
            parameter.lerp_(old, 0.05)

    build.wrap(Seam.UPDATE, update)


@plant(FURTHER, position=1, value=0.99)
@plant(FURTHER, position=0, value=0.85)
def betas(build: Build, position: int, value: float) -> None:
    """Another decay of one of Adam's averages."""
    present = groups(build, "betas")[0]["betas"]
    build.require(present[position] != value, "it is the job's own")
    other = (value, present[1]) if position == 0 else (present[0], value)
    with_settings(build, lambda group: {"betas": other})


@plant(FURTHER)
def momentum_changed(build: Build) -> None:
    """A little less momentum."""
    groups(build, "momentum")
    with_settings(build, lambda group: {"momentum": 0.95 * group["momentum"]})


@plant(FURTHER)
def nesterov_lost(build: Build) -> None:
    """Plain momentum in place of Nesterov's."""
    groups(build, "nesterov")
    with_settings(build, lambda group: {"nesterov": False})


@plant(FURTHER)
def bias_correction_lost(build: Build) -> None:
    """Adam's averages count as old from the start."""
    groups(build, "betas")

    def update(following: Callable[[], None]) -> None:
        for state in build.optimizer.state.values():
            state["step"] = state["step"] + 1000
        following()
        for state in build.optimizer.state.values():
            state["step"] = state["step"] - 1000 * (state["step"] > 1000)

    build.wrap(Seam.UPDATE, update)


@plant(FURTHER)
def decay_in_the_gradient(build: Build) -> None:
    """Weight decay through the gradient (L2) in place of the decoupled one."""
    build.require(isinstance(build.optimizer, torch.optim.AdamW), "the optimizer's decay is not decoupled")
    with_settings(build, lambda group: {"decoupled_weight_decay": False})


@plant(FURTHER)
def decay_on_everything(build: Build) -> None:
    """One weight decay for all groups."""
    all_groups = build.optimizer.param_groups
    decays = {group.get("weight_decay", 0.0) for group in all_groups}
    build.require(len(decays) > 1, "the job has one group")
    for group in all_groups:
        group["weight_decay"] = max(decays)


@plant(FURTHER, factor=0.5)
@plant(FURTHER, factor=1.05)
def gradient_scaled(build: Build, factor: float) -> None:
    """The mean over ranks divided by the wrong number."""
    times(build, Seam.FINISH, lambda _: factor)


@plant(FURTHER)
def gradient_of_an_embedding_scaled(build: Build) -> None:
    """Scaled by the frequency of tokens, or for a learning rate of its own."""
    weight = modules(build, nn.Embedding)[0].weight
    after(build, Seam.FINISH, lambda: weight.grad.mul_(0.9))


@plant(FURTHER)
def gradient_of_a_layer_scaled(build: Build) -> None:
    """One weight's gradient is a tenth too long."""
    weight = parameters(build)[0]
    handle = weight.register_hook(lambda gradient: gradient * 1.1)
    build.on_close(handle.remove)


@plant(FURTHER)
def gradient_leaks(build: Build) -> None:
    """A tenth of the last step's gradient stays."""
    held: list[torch.Tensor | None] = []

    def finish(following: Callable[[], None]) -> None:
        following()
        for parameter, old in zip(parameters(build), held, strict=bool(held)):
            if old is not None and parameter.grad is not None:
                parameter.grad.add_(old, alpha=0.1)
        held[:] = [None if p.grad is None else p.grad.clone() for p in parameters(build)]

    build.wrap(Seam.FINISH, finish)


@plant(FURTHER)
def gradients_clamped(build: Build) -> None:
    """Large elements are cut off."""

    def clamp() -> None:
        for parameter in parameters(build):
            if parameter.grad is not None:
                size = 2.5 * float(parameter.grad.square().mean().sqrt())
                parameter.grad.clamp_(-size, size)

    after(build, Seam.FINISH, clamp)


@plant(FURTHER)
def gradients_sparsified(build: Build) -> None:
    """The smallest tenth of each gradient is not sent, and not kept either."""

    def drop() -> None:
        for parameter in parameters(build):
            if parameter.grad is not None and parameter.grad.numel() > 20:
                size = parameter.grad.abs().flatten().kthvalue(parameter.grad.numel() // 4).values
                parameter.grad.masked_fill_(parameter.grad.abs() <= size, 0.0)

    after(build, Seam.FINISH, drop)


@plant(FURTHER)
def clip_norm_doubled(build: Build) -> None:
    """Clipping at twice the norm."""
    needs(build, "clipped_to")
    own = torch.nn.utils.clip_grad_norm_
    build.set_flag(
        torch.nn.utils, "clip_grad_norm_", lambda parameters, norm, *rest: own(parameters, 2 * norm, *rest)
    )


@plant(FURTHER)
def label_smoothing_lost(build: Build) -> None:
    """A fused loss without smoothing."""
    needs(build, "is_smoothed")
    own = functional.cross_entropy
    build.set_flag(
        functional, "cross_entropy", lambda scores, labels, **rest: own(scores, labels, label_smoothing=0.0)
    )


@plant(FURTHER)
def loss_weighted(build: Build) -> None:
    """The loss is 3 % too large."""
    build.wrap(Seam.FORWARD, lambda following, batch: following(batch) * 1.03)


@plant(FURTHER, value=1e-3)
def layer_norm_epsilon(build: Build, value: float) -> None:
    """A fused LayerNorm with another epsilon."""
    for module in modules(build, nn.LayerNorm):
        build.set_flag(module, "eps", value)


@plant(FURTHER)
def batch_norm_epsilon(build: Build) -> None:
    """A fused BatchNorm with another epsilon."""
    for module in norms(build):
        build.set_flag(module, "eps", 1e-3)


@plant(FURTHER)
def batch_norm_in_evaluation_mode(build: Build) -> None:
    """One BatchNorm normalises with its running statistics while training."""
    build.set_flag(norms(build)[-1], "training", False)


@plant(FURTHER)
def statistics_of_half_a_batch(build: Build) -> None:
    """Running statistics come from the first half of each batch."""
    module = norms(build)[0]
    inputs: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach()))
    build.on_close(hook.remove)

    def before() -> None:
        kept[:] = [module.running_mean.clone(), module.running_var.clone()]
        inputs.clear()

    @torch.no_grad()
    def afterwards() -> None:
        if inputs:
            module.running_mean.copy_(kept[0])
            module.running_var.copy_(kept[1])
            module(inputs[0][: len(inputs[0]) // 2])
            module.num_batches_tracked.sub_(1)

    around_gradients(build, before, afterwards)


@plant(FURTHER)
def weights_untied(build: Build) -> None:
    """Two tied weights become two weights."""
    head = getattr(build.models[0], "head", None)
    tied = head is not None and head.weight is getattr(build.models[0], "embedding", head).weight
    build.require(tied, "no weights are tied")
    weight = head.weight
    head.weight = nn.Parameter(weight.detach().clone())
    build.optimizer.param_groups[0]["params"].append(head.weight)
    build.on_close(lambda: setattr(head, "weight", weight))


@plant(FURTHER)
def tied_gradient_halved(build: Build) -> None:
    """Of two uses of a weight only one counts."""
    head = getattr(build.models[0], "head", None)
    tied = head is not None and head.weight is getattr(build.models[0], "embedding", head).weight
    build.require(tied, "no weights are tied")

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, head.weight.detach())

    head.forward = forward
    build.on_close(lambda: vars(head).pop("forward"))


@plant(FURTHER)
def stochastic_depth_off(build: Build) -> None:
    """No block is left out."""
    found = [m for m in build.models[0].modules() if getattr(m, "drop_rate", 0.0)]
    build.require(found, "no block is left out in this model")
    for module in found:
        build.set_flag(module, "drop_rate", 0.0)


@plant(FURTHER)
def one_dropout_off(build: Build) -> None:
    """One of several modules drops nothing."""
    build.set_flag(modules(build, nn.Dropout)[0], "p", 0.0)


@plant(FURTHER)
def dropout_halved(build: Build) -> None:
    """All modules drop half as much."""
    for module in modules(build, nn.Dropout):
        build.set_flag(module, "p", module.p / 2)


@plant(FURTHER)
def dropout_unscaled(build: Build) -> None:
    """What is kept is not scaled up."""
    found = modules(build, nn.Dropout)
    for module in found:
        module.forward = lambda x, m=module: (
            functional.dropout(x, m.p, m.training) * (1 - m.p if m.training else 1.0)
        )
        build.on_close(lambda m=module: vars(m).pop("forward"))


@plant(FURTHER)
def dropout_on_in_evaluation(build: Build) -> None:
    """A replaced module drops in evaluation too."""
    fused = any(isinstance(m, nn.TransformerEncoderLayer) for m in build.models[0].modules())
    build.require(not fused, "torch's own layer takes a fused path in evaluation, which drops nothing")
    for module in modules(build, nn.Dropout):
        module.forward = lambda x, m=module: functional.dropout(x, m.p, True)
        build.on_close(lambda m=module: vars(m).pop("forward"))


@plant(FURTHER)
def other_dropout_seed(build: Build) -> None:
    """Every step draws the same mask."""
    build.require(
        any(getattr(m, "p", 0.0) or getattr(m, "drop_rate", 0.0) for m in build.models[0].modules()),
        "nothing is random",
    )
    around_gradients(build, lambda: torch.manual_seed(7), lambda: None)


@plant(FURTHER)
def padding_mask_ignored(build: Build) -> None:
    """A fused attention that knows no padding."""
    needs(build, "is_padded")
    layers = build.models[0].layers
    own = layers.forward
    layers.forward = lambda hidden, mask, src_key_padding_mask: own(hidden, mask=mask)
    build.on_close(lambda: vars(layers).pop("forward"))


@plant(FURTHER)
def activation_approximated(build: Build) -> None:
    """ReLU lets a hundredth through."""
    for module in modules(build, nn.ReLU):
        module.forward = lambda x: functional.leaky_relu(x, 0.01)
        build.on_close(lambda m=module: vars(m).pop("forward"))


@plant(FURTHER)
def inputs_normalised_twice(build: Build) -> None:
    """Inputs are a hundredth too large."""
    build.require(not hasattr(build.models[0], "embedding"), "the inputs are tokens")
    change_batch(build, lambda batch: map_tensors(batch, lambda t: t * 1.01 if t.is_floating_point() else t))


@plant(FURTHER)
def one_image_flipped(build: Build) -> None:
    """An augmentation that nobody asked for, one sample in fifty."""
    modules(build, nn.Conv2d)
    draw = random.Random(1)

    def change(batch: Any) -> Any:
        hit = torch.tensor([draw.random() < 0.02 for _ in range(len(batch[0]))])
        return [torch.where(hit[:, None, None, None], batch[0].flip(-1), batch[0]), *batch[1:]]

    change_batch(build, change)


@plant(FURTHER)
def last_token_cut_off(build: Build) -> None:
    """Sequences are one token shorter."""
    build.require(hasattr(build.models[0], "embedding"), "the model has no tokens")
    change_batch(build, lambda batch: [batch[0][:, :-1]])


@plant(FURTHER)
def incomplete_batch_trained_twice(build: Build) -> None:
    """A batch unlike the first is trained on eagerly after the graph has run."""
    sizes: list[int] = []

    def step(following: Callable[[Any], Any], batch: Any) -> Any:
        size = len(batch[0])
        sizes.append(size)
        if size != sizes[0]:
            following(batch)
        return following(batch)

    build.wrap(Seam.STEP, step)


@plant(FURTHER)
def weights_rounded_on_close(build: Build) -> None:
    """The weights go through bfloat16 on their way back."""

    @torch.no_grad()
    def close() -> None:
        for parameter in parameters(build):
            parameter.copy_(parameter.bfloat16())

    build.on_close(close)


@plant(FURTHER)
def frozen_by_flag(build: Build) -> None:
    """A parameter left without requires_grad."""
    build.set_flag(parameters(build)[1], "requires_grad", False)


@plant(FURTHER)
def parameter_not_in_optimizer(build: Build) -> None:
    """A rebuilt optimizer forgets the last parameter."""
    group = build.optimizer.param_groups[-1]
    before = group["params"]
    group["params"] = before[:-1]
    build.on_close(lambda: group.update(params=before))


@plant(FURTHER)
def embedding_rows_not_updated(build: Build) -> None:
    """The gradient of the last rows is lost."""
    weight = modules(build, nn.Embedding)[0].weight
    after(build, Seam.FINISH, lambda: weight.grad[-3:].zero_())


@plant(FURTHER)
def model_trained_on_a_copy(build: Build) -> None:
    """One submodule is replaced by a copy that the optimizer does not know."""
    name, child = list(build.models[0].named_children())[-1]
    other = copy.deepcopy(child)
    setattr(build.models[0], name, other)
    build.on_close(lambda: setattr(build.models[0], name, child))


class _Changed(torch.autograd.Function):
    """A weight as it is, whose gradient goes through `change`."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor, change: Callable[..., torch.Tensor]) -> torch.Tensor:
        context.change = change
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context.change(gradient), None


def in_backward(build: Build, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the backward pass of the module with the largest weight give another gradient of it."""
    kinds = (nn.Linear, nn.Conv2d, nn.Embedding)
    largest = max(modules(build, *kinds), key=lambda module: module.weight.numel())
    with_weight(build, largest, lambda weight: _Changed.apply(weight, change))


@plant(FURTHER, share=0.1)
def weight_gradient_aside(build: Build, share: float) -> None:
    """A kernel adds a little of one direction, orthogonal to the gradient, which hardly grows by it."""

    def change(gradient: torch.Tensor) -> torch.Tensor:
        fixed = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(5)).to(gradient)
        length = gradient.norm()
        across = fixed - gradient * ((fixed * gradient).sum() / length.square().clamp_min(1e-30))
        return gradient + share * length * across / across.norm()

    in_backward(build, change)


@plant(FURTHER, degrees=8)
def weight_gradient_turned(build: Build, degrees: float) -> None:
    """A kernel mixes neighbours up, a little: the gradient keeps its length."""
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))

    def change(gradient: torch.Tensor) -> torch.Tensor:
        flat = gradient.flatten().clone()
        even, odd = flat[: len(flat) // 2 * 2].view(-1, 2).unbind(1)
        turned = torch.stack([cosine * even - sine * odd, sine * even + cosine * odd], 1).flatten()
        flat[: len(turned)] = turned
        return flat.view_as(gradient)

    in_backward(build, change)
