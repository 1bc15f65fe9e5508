"""What a few steps did to a model, and how far that is from what the reference's steps did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from vivace.tensors.trees import same_numbers
from vivace.verifying.figures import Measure, Quantity

Tensors = dict[str, torch.Tensor]
TINY = 1e-37  # below it numbers may be taken for zero
CHUNK = 2**18  # numbers of a tensor that are compared at once: in float64 they stay in a core's cache
FP32_UNIT = 2.0**-23  # in the last place, beside the number
BATCH_SHARE = 0.1  # of a batch's statistics that BatchNorm's running mean takes in by default (momentum)


@dataclasses.dataclass
class State:
    """Parameters and buffers by name, as copies on the device."""

    parameters: Tensors
    buffers: Tensors

    @classmethod
    def mean(cls, states: Sequence[State]) -> State:
        """The mean of several states, tensor by tensor; whole numbers are the first's."""
        return cls(_mean([s.parameters for s in states]), _mean([s.buffers for s in states]))


@dataclasses.dataclass
class Outcome:
    """What a lockstep run left behind: its losses, its state, the plain model's outputs in evaluation mode,
    the random stream's state, whether the run drew from it, and of the first step the gradients and the
    stream after each evaluation of the loss. `spread` is the standard deviation of a mean's runs.
    """

    losses: list[float]
    after: State
    outputs: torch.Tensor
    random_state: torch.Tensor
    drew: bool
    gradients: Tensors = dataclasses.field(default_factory=dict)
    streams: list[int] = dataclasses.field(default_factory=list)
    spread: float = 0.0


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean of runs under several random streams."""
    losses = [sum(values) / len(values) for values in zip(*(o.losses for o in outcomes), strict=True)]
    outputs = torch.stack([o.outputs for o in outcomes]).mean(0)
    first = outcomes[0]
    gradients = _mean([o.gradients for o in outcomes])
    after = State.mean([o.after for o in outcomes])
    spread = math.sqrt(sum(_square(o.after, after) for o in outcomes) / len(outcomes))
    return Outcome(losses, after, outputs, first.random_state, first.drew, gradients, spread=spread)


def _square(mine: State, theirs: State) -> float:
    """The squared distance of all parameters."""
    return sum(moved_square(mine.parameters[name], value) for name, value in theirs.parameters.items())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers in a row, in float64; of complex ones the real parts, then the imaginary ones."""
    return real(tensor.to_dense()).double().flatten()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Itself; of complex numbers the real parts, and the imaginary ones."""
    return torch.view_as_real(tensor.resolve_conj()).movedim(-1, 0) if tensor.is_complex() else tensor


def moved(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The difference, `flat`; zero where both hold the same infinity, as a mask does."""
    difference = flat(after.to_dense() - before.to_dense())
    if math.isfinite(float(difference.sum())):
        return difference
    return difference.masked_fill(flat(after) == flat(before), 0.0)


def _in_chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The numbers of tensors of one shape, in rows that stand for the same places; on a GPU in one row."""
    rows = [real(tensor.to_dense()).reshape(-1) for tensor in tensors]
    size = len(rows[0])
    step = CHUNK if rows[0].device.type == "cpu" else max(1, size)
    for begin in range(0, size, step):
        yield tuple(row[begin : begin + step] for row in rows)


def moved_square(after: torch.Tensor, before: torch.Tensor) -> float:
    """The squared length of their difference."""
    return sum(float(moved(a, b).square().sum()) for a, b in _in_chunks(after, before))


def _square_of(tensor: torch.Tensor) -> float:
    """Its squared length, of what is finite."""
    return sum(float(_finite(flat(row)).square().sum()) for (row,) in _in_chunks(tensor))


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    """Zero in place of what is not finite."""
    return numbers.nan_to_num(0.0, 0.0, 0.0)


def _mean(items: Sequence[Tensors]) -> Tensors:
    return {
        name: torch.stack([item[name] for item in items]).mean(0) if is_measured(tensor) else tensor
        for name, tensor in items[0].items()
        if all(name in item for item in items)
    }


def is_measured(tensor: torch.Tensor) -> bool:
    """Does it hold numbers that rounding changes?"""
    return tensor.is_floating_point() or tensor.is_complex()


def distances(
    outcome: Outcome, reference: Outcome, before: State, decay: dict[str, float], steps: int
) -> dict[Measure, float]:
    """Distances of `outcome` from `reference`, both started from `before`. Zero means the same.

    Over all parameters and for each: `scale` (projection of the displacement on the reference's, minus 1),
    `residual` (what is left, relative to the reference's displacement). In all: `decay` (difference along the
    weights, as a fraction of the weight decay; `shrinking` where the reference has none, as a fraction of the
    displacement), `loss`, `buffers` (their update) and `evaluation` (outputs). `decay` maps a parameter's
    name to learning rate x weight decay.
    """
    found: dict[Measure, float] = {}
    sums = [0.0, 0.0, 0.0]
    along, weights, due = 0.0, 0.0, 0.0
    size = sum(p.numel() for p in before.parameters.values())
    typical = _norm(reference.after.parameters, before.parameters) / math.sqrt(size)
    for name, start in before.parameters.items():
        dot = square = whole = weight = 0.0
        ends = outcome.after.parameters[name], reference.after.parameters[name]
        for *after, begun in _in_chunks(*ends, start):
            mine, theirs, own = moved(after[0], begun), moved(after[1], begun), _finite(flat(begun))
            dot += float(mine @ theirs)
            square += float(theirs @ theirs)
            whole += float(mine @ mine)
            along += float((mine - theirs) @ own)
            weight += float(own @ own)
        sums = [a + b for a, b in zip(sums, (dot, square, whole), strict=True)]
        weights += weight
        due += decay.get(name, 0.0) * weight * steps
        floor = (1e-4 * typical) ** 2 * start.numel()
        scale, residual = scale_and_residual(dot, square + floor, whole, floor)
        found[Measure(Quantity.SCALE, name)], found[Measure(Quantity.RESIDUAL, name)] = scale, residual
    dot, square, whole = sums
    scale, residual = scale_and_residual(dot, square, whole, 0.0)
    found[Measure(Quantity.SCALE)], found[Measure(Quantity.RESIDUAL)] = scale, residual
    along_weights = Quantity.DECAY if due else Quantity.SHRINKING
    found[Measure(along_weights)] = along / (due or math.sqrt(square * weights) or 1.0)
    found |= _gradient_distances(outcome.gradients, reference.gradients)
    pairs = zip(outcome.losses, reference.losses, strict=True)
    found[Measure(Quantity.LOSS)] = largest(abs(a - b) / (abs(b) + 1e-12) for a, b in pairs)
    for name, start in before.buffers.items():
        mine, theirs = outcome.after.buffers[name], reference.after.buffers[name]
        if not is_measured(start):
            found[Measure(Quantity.BUFFER, name)] = float(not same_numbers(mine, theirs))
            continue
        way = float(_finite(moved(theirs, start)).norm()) + _rounding_of(name, before.buffers)
        gap = 0.0 if same_numbers(mine, theirs) else float(moved(mine, theirs).norm())
        found[Measure(Quantity.BUFFER, name)] = gap / (way or 1.0)
    found[Measure(Quantity.EVALUATION)] = output_distance(outcome.outputs, reference.outputs)
    return {measure: value if math.isfinite(value) else math.inf for measure, value in found.items()}


def _rounding_of(name: str, buffers: Tensors) -> float:
    """What a buffer's movement is at least held against.

    A running mean may hardly move: behind a BatchNorm without an activation the mean of a convolution's
    outputs is zero, and what is left of it is rounding of numbers as large as the running variance says.
    """
    variance = buffers.get(name.removesuffix("running_mean") + "running_var")
    if name.endswith("running_mean") and variance is not None:
        return BATCH_SHARE * float(variance.abs().sum().sqrt())
    return 1e-6 * math.sqrt(_square_of(buffers[name]))


def output_distance(mine: torch.Tensor, theirs: torch.Tensor, least: float = 0.0) -> float:
    """The root mean square difference of two sets of outputs, relative to the spread of the second, or to
    `least` where that is larger.
    """
    if mine.shape != theirs.shape:
        return math.inf
    if not theirs.numel():  # of a batch without samples
        return 0.0
    return float(moved(mine, theirs).square().mean().sqrt()) / max(spread_of(theirs), least)


def spread_of(outputs: torch.Tensor) -> float:
    """Their standard deviation, in place of none their mean size; 1 for zeros. Infinities do not count."""
    outputs = outputs[~outputs.isinf()]
    if not outputs.numel():
        return 1.0
    spread = float(outputs.std()) if outputs.numel() > 1 else 0.0
    return spread or float(outputs.abs().mean()) or 1.0


def different_states(mine: State, theirs: State) -> list[str]:
    """The names of parameters and buffers that are not bit-identical."""
    pairs = ((mine.parameters, theirs.parameters), (mine.buffers, theirs.buffers))
    return [name for ours, others in pairs for name in others if not same_numbers(ours[name], others[name])]


def opened_otherwise(mine: State, theirs: State, roundoff: float) -> list[str]:
    """The names of parameters and buffers that differ by more than rounding their numbers to `roundoff`; 0:
    by any bit.
    """

    def rounded(ours: torch.Tensor, other: torch.Tensor) -> bool:
        if not (other.is_floating_point() or other.is_complex()):
            return False
        kind = torch.complex128 if other.is_complex() else torch.float64
        mine, theirs = ours.to_dense().to(kind), other.to_dense().to(kind)
        near = (mine - theirs).abs() <= 2 * roundoff * theirs.abs() + TINY
        return bool((near | (mine == theirs) | ((mine != mine) & (theirs != theirs))).all())

    pairs = ((mine.parameters, theirs.parameters), (mine.buffers, theirs.buffers))
    differ = [(name, ours[name], others[name]) for ours, others in pairs for name in others]
    differ = [found for found in differ if not same_numbers(*found[1:])]
    return [name for name, ours, other in differ if not (roundoff and rounded(ours, other))]


def _gradient_distances(mine: Tensors, theirs: Tensors) -> dict[Measure, float]:
    """`gradient scale` and `gradient residual`, in all and for each parameter; a missing gradient is zero."""
    if not (mine and theirs):
        return {}
    found: dict[Measure, float] = {}
    sums = [0.0, 0.0, 0.0]
    products = {name: _products(mine.get(name), value) for name, value in theirs.items()}
    typical = sum(p[1] for p in products.values()) / max(1, sum(value.numel() for value in theirs.values()))
    for name, (dot, square, whole) in products.items():
        sums = [a + b for a, b in zip(sums, (dot, square, whole), strict=True)]
        floor = 1e-8 * typical * theirs[name].numel()
        scale, residual = scale_and_residual(dot, square + floor, whole, floor)
        found[Measure(Quantity.GRADIENT_SCALE, name)] = scale
        found[Measure(Quantity.GRADIENT_RESIDUAL, name)] = residual
    dot, square, whole = sums
    scale, residual = scale_and_residual(dot, square, whole, 0.0)
    found[Measure(Quantity.GRADIENT_SCALE)], found[Measure(Quantity.GRADIENT_RESIDUAL)] = scale, residual
    return found


def _products(mine: torch.Tensor | None, theirs: torch.Tensor) -> tuple[float, float, float]:
    """Of two gradients, of which the first may lack: their product, the squares of the second and of it."""
    if mine is None:
        return 0.0, sum(float(flat(row).square().sum()) for (row,) in _in_chunks(theirs)), 0.0
    dot = square = whole = 0.0
    for pair in _in_chunks(mine, theirs):
        own, other = (flat(row) for row in pair)
        dot += float(own @ other)
        square += float(other @ other)
        whole += float(own @ own)
    return dot, square, whole


def resolution(
    reference: Outcome, before: State, shadows: Sequence[dict[Measure, float]] = ()
) -> dict[Measure, float]:
    """The smallest `scale` and `residual` worth judging: a unit in the last place of each weight, of fp32 at
    least; and of buffers in 16 bits.

    A layer that moves little beside its size moves in few such units, and a shadow may land on the same ones.
    A layer's residual also has room for a few elements going the other way, as Adam's first steps do where a
    gradient is all rounding: a rare event that few shadows show. Its scale has room for two. A gradient has
    room for a ReLU that flips for one sample: two fifths of one row, which is an output's. A layer that does
    not move has all the room there is, unless it has no gradient at all and moves in no shadow, of which
    `shadows` are the distances: then nothing rounds, and it is not one that steps use at random.
    """
    found = dict[str, float]()
    still = before.parameters.keys() - reference.gradients if reference.gradients else set[str]()
    still -= {measure.layer for run in shadows for measure, apart in run.items() if apart}
    weights = way = 0.0
    for name, start in before.parameters.items():
        unit = max(FP32_UNIT, torch.finfo(start.dtype).eps if is_measured(start) else 0.0)
        size = unit**2 * _square_of(start)
        square = moved_square(reference.after.parameters[name], start)
        found[name] = math.sqrt(size / square) if square else 0.0 if name in still else math.inf
        weights, way = weights + size, way + square
    finest = math.sqrt(weights / way) if way else 0.0
    layers = {Measure(Quantity.SCALE): finest, Measure(Quantity.RESIDUAL): finest}
    for name, tensor in before.parameters.items():
        num = max(1, tensor.numel())
        layers[Measure(Quantity.SCALE, name)] = max(found[name], 0.2 / num)
        layers[Measure(Quantity.RESIDUAL, name)] = max(found[name], 0.2 / math.sqrt(num))
        rows = max(1, len(tensor) if tensor.dim() else 1)
        layers[Measure(Quantity.GRADIENT_SCALE, name)] = 0.02 / rows
        layers[Measure(Quantity.GRADIENT_RESIDUAL, name)] = 0.02 / math.sqrt(rows)
    for name, start in before.buffers.items():
        if is_measured(start) and (unit := torch.finfo(start.dtype).eps) > FP32_UNIT:
            way = math.sqrt(moved_square(reference.after.buffers[name], start)) or 1.0
            layers[Measure(Quantity.BUFFER, name)] = unit * math.sqrt(_square_of(start)) / way
    return layers


def same_streams(mine: Outcome, theirs: Outcome, rearranged: bool) -> bool:
    """Did both draw the same numbers for the same purposes, as far as evaluations of the loss show?"""
    seen = not theirs.drew or not (rearranged or (mine.streams and mine.streams != theirs.streams))
    return seen and torch.equal(mine.random_state, theirs.random_state)


def identical(outcome: Outcome, reference: Outcome) -> list[str]:
    """The names of everything that is not bit-identical."""
    different = ["loss"] if outcome.losses != reference.losses else []
    different += different_states(outcome.after, reference.after)
    if not same_numbers(outcome.outputs, reference.outputs):
        different.append("evaluation")
    return different


def scale_and_residual(dot: float, square: float, whole: float, floor: float) -> tuple[float, float]:
    """Of two vectors by their products: the projection of mine on theirs minus 1, and what is left."""
    if square == 0.0:
        return (0.0, 0.0) if whole == 0.0 else (math.inf, math.inf)
    scale = (dot + floor) / square - 1.0
    rest = whole - 2.0 * (1.0 + scale) * dot + (1.0 + scale) ** 2 * (square - floor)
    return scale, math.sqrt(max(rest, 0.0) / square)  # NaN stays so: it stands first


def largest(values: Iterable[float]) -> float:
    """The largest, and NaN where one is: `max` would pass that over."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _norm(after: Tensors, before: Tensors) -> float:
    return math.sqrt(sum(moved_square(after[name], before[name]) for name in before))
