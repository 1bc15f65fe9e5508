"""Bias: does a plan's gradient err to one side, where rounding errs to both?

Single-step gradients at fixed weights over different batches, of reference and plan in pairs. Noise of mean
zero falls with the root of their number, harm does not: so what is left of the mean is held against an
absolute margin, and the standard error says what could have been seen. Where the plan draws random numbers of
its own, the pairs also tell whether its masks are of the right rate (the mean) and as independent as the
reference's (the size).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

import torch

from vivace.tensors.randomness import derive
from vivace.verifying.displacement import Tensors, flat
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.judgement import LAYER_LIMIT, LIMIT, check, root_mean_square

Products = tuple[float, ...]  # <mine, probe>, <theirs, probe>, |mine|², |theirs|²
WHOLE = ""

# Relative: what does not matter, of the whole and of a layer.
MARGINS = {
    Quantity.LOSS_BIAS: 0.005,
    Quantity.GRADIENT_BIAS: 0.005,
    Quantity.GRADIENT_DRIFT: 0.01,
    Quantity.GRADIENT_NOISE: 0.05,
    Quantity.GRADIENT_SIZE: 0.1,
    Quantity.GRADIENT_SPREAD: 0.2,
}
LAYER_MARGINS = {Quantity.GRADIENT_BIAS: 0.01, Quantity.GRADIENT_DRIFT: 0.03, Quantity.GRADIENT_NOISE: 0.1}
# Envelopes. A length over many numbers varies little from one right rounding to another; that of single
# differences least: right plans were seen up to 0.95 for the whole and 1.13 for a layer.
LIMITS = {Quantity.GRADIENT_DRIFT: (LIMIT / 2, LAYER_LIMIT / 2), Quantity.GRADIENT_NOISE: (2.0, 4.0)}
FEWEST = 4  # pairs
SKETCH_WIDTH = 64  # numbers
SMALLEST_LAYER = 1e-8  # of the mean layer's gradient, squared: less is all rounding
SMALLEST_SPREAD = 1e-8  # of the gradient, squared: less is no randomness
# Standard errors: a mean of 32 beyond so many is chance in fewer than one of ten thousand.
CERTAIN = 4.5
CLEAR = 8.0
POWER = 0.84  # standard errors more, to see a bias four times of five


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The loss and the gradients of one step."""

    loss: float
    gradients: Tensors


@dataclasses.dataclass(frozen=True)
class Pair:
    """What two steps on one batch have in common: `products` by parameter, and of the whole under WHOLE;
    `sketches` of the differences likewise; `spreads`: the squared distance of each from the same step under
    other random numbers.
    """

    losses: tuple[float, float]
    products: dict[str, Products]
    spreads: tuple[float, float] = (0.0, 0.0)
    sketches: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over pairs, with its standard error."""

    value: float
    error: float

    @property
    def certain(self) -> float:
        """What of it is certainly no chance; signed. All of what is not finite."""
        if not math.isfinite(self.value):
            return math.inf
        if not math.isfinite(self.error):
            return 0.0
        return math.copysign(max(0.0, abs(self.value) - CERTAIN * self.error), self.value)


def pair_of(mine: Gradient, theirs: Gradient, others: tuple[Gradient, Gradient] | None = None) -> Pair:
    """The products of two steps' gradients; one that is missing is zero.

    `others`, where random numbers differ: both again, under still other numbers. The difference is then
    projected on the reference's other gradient, for the projection of a noisy gradient on itself holds its
    noise; and the distance from the other one is the spread of each.
    """
    again, probe = others or (mine, theirs)
    products: dict[str, Products] = {}
    sketches: dict[str, torch.Tensor] = {}
    spreads = [0.0, 0.0]
    known = [step.gradients for step in (mine, theirs, again, probe)]
    for name in dict.fromkeys(name for gradients in known for name in gradients):
        like = next(gradients[name] for gradients in known if name in gradients)
        own, reference, own_again, on = (
            flat(gradients[name] if name in gradients else torch.zeros_like(like)) for gradients in known
        )
        pairs = (own, on), (reference, on), (own, own), (reference, reference)
        products[name] = tuple(float(a @ b) for a, b in pairs)
        sketches[name] = sketch(own - reference, name)
        for side, apart in enumerate((own - own_again, reference - on) if others else ()):
            spreads[side] += float(apart @ apart)
    whole = tuple(sum(values) for values in zip(*products.values(), strict=True)) or (0.0,) * 4
    sketches[WHOLE] = sum(sketches.values(), torch.zeros(SKETCH_WIDTH, dtype=torch.float64))
    return Pair((mine.loss, theirs.loss), products | {WHOLE: whole}, (spreads[0], spreads[1]), sketches)


def sketch(vector: torch.Tensor, name: str) -> torch.Tensor:
    """A vector's products with SKETCH_WIDTH random ones, the same for each `name`: (SKETCH_WIDTH,), float64.

    Each number of the vector goes with a random sign into one of them, so that the sum of their squares is
    the vector's length squared, within a fifth and without bias. (Charikar, Chen and Farach-Colton 2002.)
    """
    numbers = torch.Generator(vector.device).manual_seed(derive("sketch", name))
    signs = torch.randint(2, vector.shape, generator=numbers, device=vector.device, dtype=torch.int8)
    signed = vector * (2 * signs - 1)
    padded = torch.nn.functional.pad(signed, (0, -len(signed) % SKETCH_WIDTH))
    return padded.view(-1, SKETCH_WIDTH).sum(0).cpu()


def pairs_of(
    mine: Callable[[int], Gradient],
    theirs: Callable[[int], Gradient],
    others: Callable[[int], tuple[Gradient, Gradient]] | None,
    count: int,
) -> list[Pair]:
    """So many pairs, but for steps that made no update (a loss scale that has to fall) and those of which the
    reference's own are not finite; the functions take the pair's number. For `others` see `pair_of`.
    """
    pairs = []
    for number in range(count):
        one = mine(number)
        further = others(number) if one.gradients and others is not None else None
        if not one.gradients or (further is not None and not further[0].gradients):
            continue
        pair = pair_of(one, theirs(number), further)
        _, along_probe, _, square = pair.products[WHOLE]
        if all(map(math.isfinite, (pair.losses[1], along_probe, square))):
            pairs.append(pair)
    return pairs


def estimates(pairs: Sequence[Pair]) -> dict[Measure, Estimate]:
    """By quantity: `loss bias`, `gradient bias`, `gradient drift` and, where random numbers are the same,
    `gradient noise` in all and of each parameter, and as logarithms of ratios `gradient size` and, where
    random numbers differ, `gradient spread` over them.

    A bias is the projection of the mean difference on the reference's gradients, as a share of these. The
    drift is the length of the mean difference, whatever its direction, in units of the typical length of a
    gradient; the noise is the typical length of a difference.
    """
    if len(pairs) < FEWEST:
        return {}
    losses = [(a * math.copysign(1.0, b), abs(b)) for a, b in (p.losses for p in pairs)]
    found = {Measure(Quantity.LOSS_BIAS): _ratio(losses)}
    for name in pairs[0].products:
        known = [p.products[name] for p in pairs if name in p.products]
        parts = [k[:2] for k in known]
        if len(known) == len(pairs) and _is_clear([part[1] for part in parts]) and _size_of(pairs, name):
            found[Measure(Quantity.GRADIENT_BIAS, name)] = _ratio(parts)
    found |= _lengths(pairs)
    squares = [pair.products[WHOLE][2:] for pair in pairs]
    found[Measure(Quantity.GRADIENT_SIZE)] = _logarithm(_ratio(squares))
    if sum(pair.spreads[1] for pair in pairs) > SMALLEST_SPREAD * sum(square for _, square in squares):
        found[Measure(Quantity.GRADIENT_SPREAD)] = _logarithm(_ratio([pair.spreads for pair in pairs]))
    return found


def _lengths(pairs: Sequence[Pair]) -> dict[Measure, Estimate]:
    """How long the mean difference is, and the differences typically are, beside a typical gradient.

    Of the whole and of each parameter whose gradient is more than rounding beside the others'. Where random
    numbers differ, these make the differences, and only their mean says something.
    """
    found = {}
    own_masks = any(sum(pair.spreads) for pair in pairs)
    for name in pairs[0].products:
        if all(name in pair.sketches for pair in pairs) and (size := _size_of(pairs, name)):
            length = _length_of_mean(torch.stack([pair.sketches[name] for pair in pairs]))
            unit = math.sqrt(size)
            found[Measure(Quantity.GRADIENT_DRIFT, name)] = Estimate(length.value / unit, length.error / unit)
            if not own_masks:
                found[Measure(Quantity.GRADIENT_NOISE, name)] = _noise([p.products[name] for p in pairs])
    return found


def _size_of(pairs: Sequence[Pair], name: str) -> float:
    """The typical square of a parameter's gradient; 0 where that is rounding alone, such as of a bias in
    front of a BatchNorm, which takes every constant out again.
    """
    size = mean(pair.products[name][3] for pair in pairs)
    mean_layer = mean(pair.products[WHOLE][3] for pair in pairs) / max(1, len(pairs[0].products) - 1)
    return size if size > SMALLEST_LAYER * mean_layer else 0.0


def _noise(products: Sequence[Products]) -> Estimate:
    """The typical length of a difference, in units of that of a gradient."""
    share = _ratio([(own + other - 2.0 * along, other) for along, _, own, other in products])
    length = math.sqrt(max(1.0 + share.value, 0.0))  # not finite stays so: it stands first
    return Estimate(length, share.error / length / 2 if length else 0.0)


def _length_of_mean(vectors: torch.Tensor) -> Estimate:
    """The length of the mean that these vectors, (number, width), are drawn around, by the jackknife.

    The products of different vectors have its square as their mean, however noisy each vector is.
    """
    count = len(vectors)
    gram = vectors @ vectors.T
    gram.fill_diagonal_(0.0)
    whole = float(gram.sum())
    square = whole / (count * (count - 1))
    without = (whole - 2.0 * gram.sum(0)) / ((count - 1) * (count - 2))
    error = math.sqrt((count - 1) * float(without.var(correction=0)))
    if square <= 0.0:
        return Estimate(0.0, math.sqrt(error))
    length = math.sqrt(square)
    return Estimate(length, error / length / 2)


def spread_of(shadows: Sequence[Sequence[Pair]]) -> dict[Measure, float]:
    """By quantity, what right rounding brings: the root mean square of the shadows' estimates; NaN where one
    of them is not finite.

    A shadow rounds alike in all its pairs, as a plan rounds the same weights alike.
    """
    found = [estimates(pairs) for pairs in shadows]
    names = dict.fromkeys(name for each in found for name in each)
    spread = {n: root_mean_square([each[n].value for each in found if n in each]) for n in names}
    return {name: value if math.isfinite(value) else math.nan for name, value in spread.items()}


def checks_of(
    found: dict[Measure, Estimate], shadows: dict[Measure, float], position: int, when: str = ""
) -> list[dict[str, Any]]:
    """The figures: what is certain of each bias, against its margin or what right rounding brings.

    `shadows` holds that by quantity. `seen_from` is the smallest bias of the whole that is seen four times of
    five.
    """
    checks = []
    for measure, estimate in found.items():
        layer = bool(measure.layer)
        limit = LIMITS.get(measure.quantity, (LIMIT, LAYER_LIMIT))[layer]
        margin = (LAYER_MARGINS if layer else MARGINS)[measure.quantity]
        envelope = shadows.get(measure, 0.0)
        figure = check(measure, position, estimate.certain, envelope, 0.0, floor=margin / limit, limit=limit)
        figure["name"] += when
        seen = max(margin, limit * envelope) + (CERTAIN + POWER) * estimate.error
        checks.append(figure if layer else figure | {"seen_from": seen})
    return checks


def _logarithm(of_squares: Estimate) -> Estimate:
    """Of a ratio of lengths, from that of their squares less 1."""
    ratio = max(1.0 + of_squares.value, 1e-12)
    return Estimate(math.log(ratio) / 2, of_squares.error / ratio / 2 if ratio > 1e-12 else 0.0)


def _is_clear(values: Sequence[float]) -> bool:
    """Is their sum far from zero, so that it can be divided by?"""
    return mean(values) > CLEAR * stdev(values) / math.sqrt(len(values))


def _ratio(parts: Sequence[tuple[float, ...]]) -> Estimate:
    """The sum of the first parts over that of the second, minus 1, by the method of residuals."""
    below = sum(part[1] for part in parts)
    if not below:
        return Estimate(0.0, 0.0)
    value = sum(part[0] for part in parts) / below - 1.0
    rest = sum((part[0] - (1.0 + value) * part[1]) ** 2 for part in parts)
    count = len(parts)
    return Estimate(value, math.sqrt(rest * count / (count - 1)) / abs(below))
