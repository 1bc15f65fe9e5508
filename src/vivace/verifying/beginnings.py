"""Do two jobs begin alike? Initial weights and buffers, as equal bits or as draws from one distribution."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from vivace.job import Job
from vivace.session.opening import call, models_of, seed_everything
from vivace.tensors.modules import named_buffers, named_parameters
from vivace.tensors.trees import Digest, digest
from vivace.verifying.displacement import flat, is_measured, real
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.judgement import figure_of

SEEDS = 8  # builds of the model, where one is not enough
MOST_ELEMENTS = 4096  # of each tensor that are looked at, of one build
MOST_ROWS = 2**17
SHORTEST_ROW = 8  # numbers
# Two-sample Kolmogorov-Smirnov, in units of sqrt(2 / n): larger by chance once in a million pairs.
LIMIT = 2.7
# Standard errors between two sizes: by chance more once in 10,000 pairs where builds differ as wholes (by
# Student's t with 14 degrees of freedom).
MOST_ERRORS = 5.5
ROUNDING = 1e-5  # relative


class Drawn(NamedTuple):
    """Of one tensor under several seeds: some of its `numbers`, each build's after the other's; a number for
    each of its `rows` in each build, (builds, rows), by which equal rows are known; and `like`: the tensor in
    front of it that begins with the same numbers in every build, empty where none does.
    """

    numbers: torch.Tensor
    rows: torch.Tensor
    like: str


Draws = dict[str, Drawn]


class Fault(NamedTuple):
    """What begins otherwise, plainly; `layer` is the parameter or buffer."""

    text: str
    layer: str


def draw(job: Job) -> Draws:
    """What every parameter and buffer of the model is as built under several seeds."""
    numbers: dict[str, list[torch.Tensor]] = {}
    rows: dict[str, list[torch.Tensor]] = {}
    like: dict[str, set[str]] = {}
    for seed in range(SEEDS):
        seed_everything(seed)
        models, seen = models_of(job, call(job, "model")), dict[Digest, str]()
        for name, tensor in [*named_parameters(models), *named_buffers(models)]:
            values = flat(tensor.detach())
            numbers.setdefault(name, []).append(values[:: 1 + len(values) // MOST_ELEMENTS].cpu())
            rows.setdefault(name, []).append(_rows(tensor.detach()).cpu())
            first = name if _is_constant(values) else seen.setdefault(digest(tensor), name)
            like.setdefault(name, set()).add("" if first == name else first)
    return {
        name: Drawn(torch.cat(p), torch.stack(rows[name]), _only(like[name])) for name, p in numbers.items()
    }


def build_again(job: Job) -> dict[str, Digest]:
    """Digests of what begins under another seed than the comparison's: equal ones may be equal by one seed's
    chance, such as where the model sets that very seed.
    """
    seed_everything(SEEDS)
    models = models_of(job, call(job, "model"))
    return {name: digest(t.detach()) for name, t in [*named_parameters(models), *named_buffers(models)]}


def _only(names: set[str]) -> str:
    return names.pop() if len(names) == 1 else ""


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A number for each row of a matrix or larger, which only rows of equal numbers have in common; none of
    rows so short that chance makes them equal.
    """
    if tensor.dim() < 2 or not is_measured(tensor) or tensor[:1].numel() < SHORTEST_ROW:
        return torch.zeros(0, dtype=torch.float64)
    matrix = real(tensor[:MOST_ROWS]).double().flatten(1)
    weights = torch.linspace(1.0, 2.0, matrix.shape[1], dtype=torch.float64, device=matrix.device)
    return (matrix * weights).sum(1)


def _is_constant(numbers: torch.Tensor) -> bool:
    return not len(numbers) or bool((numbers == numbers[0]).all())


def first_fault(mine: Draws, theirs: Draws, whose: str) -> Fault | None:
    """What of two draws differs however numbers are distributed: tensors or rows of one that begin alike,
    and rows that are set where others are drawn.
    """
    for name, other in theirs.items():
        own, not_so = mine[name], f"and in {whose} not"
        if own.like and not other.like:
            return Fault(f"{name} begins with the very numbers of {own.like}, {not_so}", name)
        if other.like and not own.like:
            return Fault(f"{name} does not begin with the numbers of {other.like}, as in {whose}", name)
        drawn = [_varies(each.numbers.view(SEEDS, -1)) for each in (own, other)]
        if drawn[0] != drawn[1]:
            how = "other numbers under each seed" if drawn[0] else "the same numbers under every seed"
            return Fault(f"{name} begins with {how}, {not_so}", name)
        if not (_varies(own.rows) and _varies(other.rows)):
            continue
        ours, reference = ((rows == rows[0]).all(0) for rows in (own.rows, other.rows))
        if not torch.equal(ours, reference):
            row = int((ours != reference).nonzero()[0])
            how = "set" if ours[row] else "drawn at random"
            return Fault(f"row {row} of {name} begins {how}, {not_so}", name)
        if not torch.allclose(own.rows[0, ours], other.rows[0, ours], rtol=ROUNDING, equal_nan=True):
            return Fault(f"a row of {name} that begins set begins otherwise in {whose}", name)
        if _has_copies(own.rows[:, ~ours]) and not _has_copies(other.rows[:, ~ours]):
            return Fault(f"rows of {name} begin with the very same numbers, {not_so}", name)
    return None


def _varies(rows: torch.Tensor) -> bool:
    """Are they other ones under another seed?"""
    return bool((rows != rows[0]).any())


def _has_copies(rows: torch.Tensor) -> bool:
    """Are there equal rows in every build?"""
    return all(len(build.unique()) < len(build) for build in rows)


def checks_of(mine: Draws, theirs: Draws) -> list[dict[str, Any]]:
    """A figure for each tensor: the largest distance of the two distributions; their sizes, of which it shows
    little, count as well.
    """
    both = ((name, mine[name].numbers, drawn.numbers) for name, drawn in theirs.items())
    return [_check(name, ours, values) for name, ours, values in both if values.numel()]


def _check(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any]:
    constant = _is_constant(theirs)
    if torch.allclose(mine, theirs, rtol=ROUNDING, atol=0.0, equal_nan=True):
        distance = 0.0  # computed, not drawn
    else:
        distance = 1.0 if constant else _distance(mine, theirs)
    envelope = 1e-6 if constant else math.sqrt(2.0 / len(theirs))
    if distance and not constant:
        distance = max(distance, envelope * LIMIT * _errors(mine, theirs) / MOST_ERRORS)
    score, measure = distance / envelope, Measure(Quantity.INITIAL, name)
    return figure_of(measure, None, distance, envelope, score, LIMIT) | {"step": 0}


def _errors(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """By how many standard errors the logarithms of their root mean squares differ, or 0."""
    means, variances = [], []
    for numbers in (mine, theirs):
        squares = numbers.double().view(SEEDS, -1).square()
        sizes = squares.mean(1).log() / 2
        of_numbers = squares.var() / squares.mean().square() / (4 * squares.numel())
        means.append(sizes.mean())
        variances.append(torch.maximum(sizes.var() / SEEDS, of_numbers))
    errors = (means[0] - means[1]).abs() / (variances[0] + variances[1]).sqrt()
    return float(errors) if errors.isfinite() else 0.0


def _distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of the two empirical distribution functions."""
    points = torch.cat([mine, theirs]).sort().values
    below = [torch.searchsorted(v.sort().values, points, right=True) / len(v) for v in (mine, theirs)]
    return float((below[0] - below[1]).abs().max())
