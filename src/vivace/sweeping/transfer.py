"""Learning rates that hold across widths: the maximal update parametrization (muP), for any Job.

Yang and Hu, "Feature Learning in Infinite-Width Neural Networks" (2021); Yang et al., "Tensor Programs V:
Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer" (2022), tables 3 and 8. A model and its
smaller base model are compared weight by weight: which of its two sides grew says what becomes of its
learning rate, and of the initial values of the last layer.

| weight | grew | Adam and AdamW | SGD |
|---|---|---|---|
| input weights, biases, norms | only the output side | 1 | times the growth |
| hidden weights | both | divided by the growth | 1 |
| output weights | only the input side | divided by the growth | divided by the growth |

The growth is that of the input side of a weight; of an input weight, a bias or a norm, that of its output
side. The initial values of output weights are divided by the root of the growth, on top of an initialization
whose variance is one over the input side, as torch's own are. Attention whose heads grow would also need
scores divided by the width of a head rather than its root: grow the number of heads instead. A parameter of
no layer of torch's of which one side grew, as a table of positions, counts as a bias.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from vivace.errors import JobError, Refused
from vivace.job import Job, JobFunction
from vivace.sweeping.space import Parameters
from vivace.tensors.randomness import Streams
from vivace.watching.written import schedules_in

ADAPTIVE = (torch.optim.Adam, torch.optim.AdamW)
PLAIN = (torch.optim.SGD,)
_COMES_TO = {  # where these hold the learning rates that they come to, whatever those of the groups were
    lr_scheduler.CosineAnnealingLR: "eta_min",
    lr_scheduler.CosineAnnealingWarmRestarts: "eta_min",
    lr_scheduler.ReduceLROnPlateau: "min_lrs",
    lr_scheduler.CyclicLR: "max_lrs",
}


class Transferred(JobFunction):
    """A function of parameters that returns Jobs whose learning rates mean the same at every width.

    Args:
        source: as of JobFunction.
        width: the parameter that is the width.
        base: its value at which nothing changes.
    """

    def __init__(self, source: Any, width: str, base: Any) -> None:
        super().__init__(source)
        self.width, self.base = width, base

    def __call__(self, **parameters: object) -> Job:
        """The Job of these parameters. Raises JobError as JobFunction does."""
        job = super().__call__(**parameters)
        if parameters.get(self.width, self.parameters[self.width].default) == self.base:
            return job
        return transferred(job, super().__call__(**{**parameters, self.width: self.base}))


def transferred(job: Job, base: Job) -> Job:
    """`job` with the learning rates and the initial output weights that muP gives it beside `base`.

    The models must differ in the sizes of their weights alone. Raises JobError where they do not, or where
    the optimizer is neither SGD, Adam nor AdamW.
    """
    if job.step is not None or job.optimizer is None:
        raise JobError(
            "learning rates are carried over for jobs with a loss and an optimizer, not an own step"
        )
    build, optimize = job.model, job.optimizer

    def model() -> nn.Module:
        found: nn.Module = build()
        with Streams(0):
            growths = growths_of(found, base.model())
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                if growths[name].is_output and parameter.dim() > 1:
                    parameter.div_(math.sqrt(growths[name].inside))
        return found

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = optimize(model)
        with Streams(0):
            growths = growths_of(model, base.model())
        return scaled(found, model, growths)

    scheduler = None if job.scheduler is None else partial(_scheduled, job.scheduler)
    return dataclasses.replace(job, model=model, optimizer=optimizer, scheduler=scheduler)


def _scheduled(schedule: Callable[[Any], Any], optimizer: torch.optim.Optimizer) -> Any:
    """What the Job's scheduler returns. Raises JobError where it does not multiply each group's own rate, or
    will not when it comes to a rate of its own.
    """
    before = [float(group["lr"]) for group in optimizer.param_groups]
    found = schedule(optimizer)
    given = [(type(found).__name__, [float(group["lr"]) for group in optimizer.param_groups])]
    for part in schedules_in(found):
        for name in {name for kind, name in _COMES_TO.items() if isinstance(part, kind)}:
            bound = getattr(part, name)
            rates = bound if isinstance(bound, list) else [bound] * len(before)
            given.append((f"{type(part).__name__} with {name.removesuffix('s')}={rates[0]:g}", rates))
    for what, rates in given:
        for one, new in zip(before, rates, strict=True):
            if not math.isclose(new * before[0], rates[0] * one, rel_tol=1e-6):
                raise JobError(
                    f"the Job's {what} sets learning rates itself, so that what is carried over would be "
                    "lost: give it one for each of optimizer.param_groups, or a schedule that multiplies"
                )
    return found


@dataclasses.dataclass(frozen=True)
class Growth:
    """How many times larger the two sides of a weight are than in the base model."""

    outside: float
    inside: float

    @property
    def is_output(self) -> bool:
        """Does it take in a width and give out none?"""
        return self.inside != 1.0 and self.outside == 1.0

    def rate(self, adaptive: bool) -> float:
        """What the learning rate is multiplied by."""
        if self.inside == 1.0:  # input weights, biases, norms
            return 1.0 if adaptive else self.outside
        if self.is_output or adaptive:
            return 1.0 / self.inside
        return 1.0


def growths_of(model: nn.Module, base: nn.Module) -> dict[str, Growth]:
    """The growth of each weight. Raises JobError where the models differ in more than sizes, or where modules
    of two kinds share a weight, as an embedding and the output layer may.
    """
    mine, theirs = dict(model.named_parameters()), dict(base.named_parameters())
    if mine.keys() != theirs.keys():
        name = min(mine.keys() ^ theirs.keys())
        raise JobError(
            f"models of other widths must have the same weights, and '{name}' is in one of them only"
        )
    places: dict[int, list[tuple[str, nn.Module]]] = {}
    for place, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((f"{place}.{own}".lstrip("."), module))
    found = {}
    for name, parameter in mine.items():
        if parameter.dim() != theirs[name].dim():
            raise JobError(
                f"'{name}' has {parameter.dim()} dimensions, and {theirs[name].dim()} at another width"
            )
        ratios = [a / b for a, b in zip(parameter.shape, theirs[name].shape, strict=True)]
        growths = {_growth(owner, ratios): place for place, owner in places[id(parameter)]}
        if len(growths) > 1:
            one, other, *_ = growths.values()
            raise JobError(
                f"'{one}' and '{other}' are one weight, whose learning rate would have to change in two ways "
                "with the width: untie them, or leave --transfer out"
            )
        found[name] = next(iter(growths))
    return found


def _growth(owner: nn.Module, ratios: list[float]) -> Growth:
    """Of a weight whose sizes have grown by `ratios`."""
    if len(ratios) < 2:
        return Growth(math.prod(ratios), 1.0)
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):  # (entries, width): looked up
        return Growth(ratios[1], 1.0)
    if isinstance(owner, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):  # (in, out, ...)
        return Growth(ratios[1], ratios[0] * math.prod(ratios[2:]))
    found = Growth(ratios[0], math.prod(ratios[1:]))
    multiplied = isinstance(owner, nn.Linear | nn.Bilinear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if found.is_output and not multiplied:  # added, as the places of tokens are
        return Growth(found.inside, 1.0)
    return found


def scaled(
    optimizer: torch.optim.Optimizer, model: nn.Module, growths: dict[str, Growth]
) -> torch.optim.Optimizer:
    """The optimizer with its groups cut so that each weight has its own multiple of the learning rate.

    Schedules multiply each group's own rate, and go on as before. Raises JobError where muP has no rule.
    """
    if not isinstance(optimizer, (*ADAPTIVE, *PLAIN)):
        kind = type(optimizer).__name__
        raise JobError(f"learning rates are carried over for SGD, Adam and AdamW, not for {kind}")
    adaptive = isinstance(optimizer, ADAPTIVE)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    if any(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise JobError(
            "learning rates are carried over for the weights of the model, and the optimizer has others, too"
        )
    for group in optimizer.param_groups:
        by_rate: dict[float, list[Any]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(growths[names[id(parameter)]].rate(adaptive), []).append(parameter)
        groups += [
            {**group, "params": some, "lr": group["lr"] * rate} | _decay(group, rate)
            for rate, some in by_rate.items()
        ]
    optimizer.param_groups = groups
    return optimizer


def _decay(group: dict[str, Any], rate: float) -> dict[str, Any]:
    """What AdamW takes off a weight is learning rate times decay, and does not depend on the width."""
    decoupled = group.get("decoupled_weight_decay", False)  # which Adam may be told, too
    return {"weight_decay": group["weight_decay"] / rate} if decoupled else {}


def coordinate_check(
    function: JobFunction,
    width: str,
    widths: Sequence[int],
    fixed: Parameters,
    *,
    steps: int = 4,
    seeds: int = 2,
) -> dict[str, float]:
    """How much a few steps change the outputs of each layer, as an exponent of the width: 0 where layers of
    every width learn alike, clearly above 0 where wide ones leave the range.

    Each of `widths` is trained for `steps` steps on its first batches, under `seeds` seeds. Raises Refused
    where a layer's output does not move.
    """
    sizes: dict[str, list[tuple[float, float]]] = {}
    for size in widths:
        for seed in range(seeds):
            for layer, moved in _movement(function(**{**fixed, width: size}), steps, seed).items():
                sizes.setdefault(layer, []).append((math.log(size), math.log(moved)))
    return {layer: _slope(points) for layer, points in sizes.items()}


def _movement(job: Job, steps: int, seed: int) -> dict[str, float]:
    """The root mean square of what some steps change in each layer's output on the first batch."""
    assert job.optimizer is not None
    assert job.loss is not None
    with Streams(seed):
        model = job.model()
        optimizer, batches = job.optimizer(model), list(zip(range(steps), job.data(), strict=False))
        first = batches[0][1]
        before = _outputs(model, job, first)
        for _, batch in batches:
            optimizer.zero_grad()
            job.loss(model, batch).backward()
            optimizer.step()
        after = _outputs(model, job, first)
    moved = {layer: float((after[layer] - before[layer]).square().mean().sqrt()) for layer in before}
    still = [layer for layer, size in moved.items() if not size]
    if still:
        raise Refused(f"the output of '{still[0]}' does not move")
    return moved


def _outputs(model: nn.Module, job: Job, batch: object) -> dict[str, torch.Tensor]:
    """What each linear layer, convolution and embedding gives out, in training mode."""
    found: dict[str, torch.Tensor] = {}
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)

    def keep(name: str) -> Any:
        return lambda module, inputs, output: found.__setitem__(name, output.detach().clone())

    hooks = [m.register_forward_hook(keep(n)) for n, m in model.named_modules() if isinstance(m, kinds)]
    try:
        with torch.no_grad():
            assert job.loss is not None
            job.loss(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of a straight line through points, by least squares."""
    x = math.fsum(a for a, _ in points) / len(points)
    y = math.fsum(b for _, b in points) / len(points)
    return math.fsum((a - x) * (b - y) for a, b in points) / math.fsum((a - x) ** 2 for a, _ in points)
