"""Pictures of what recipes' models make of the validation data: confusion, the best samples and the worst."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from vivace import words
from vivace.pictures import MOST_CLASSES, Box, Counts, Image, Picture, Piece, Text
from vivace.recipes.networks.segmenting import confusion

SHOWN = 6  # samples of a kind
Shown = dict[str, list[Picture]]
COLOURS = numpy.array(  # of classes; the first is the background's, which is not drawn
    [(0, 0, 0), (255, 196, 0), (0, 158, 115), (213, 94, 0), (0, 114, 178), (204, 121, 167), (86, 180, 233)]
)
TINT = 0.6  # of a class' colour on its pixels
LIKELY = 0.5  # from which chance a box is shown


class Sample(NamedTuple):
    """How well a sample was done, and what draws it from which things."""

    score: float
    draw: Callable[..., Picture]
    things: tuple[Any, ...]

    def alone(self) -> Sample:
        """The same with tensors of its own: one that is part of a batch keeps the whole batch."""
        own = (one.clone() if isinstance(one, torch.Tensor) else one for one in self.things)
        return Sample(self.score, self.draw, tuple(own))


def extremes(samples: Iterable[Sample], number: int = SHOWN) -> tuple[list[Picture], list[Picture]]:
    """The best and the worst samples, drawn; none is both."""
    best: list[Sample] = []
    worst: list[Sample] = []
    for sample in samples:
        if len(best) == number and worst[-1].score <= sample.score <= best[-1].score:
            continue
        kept = sample.alone()
        best = sorted([*best, kept], key=lambda one: -one.score)[:number]
        worst = sorted([*worst, kept], key=lambda one: one.score)[:number]
    others = [one for one in worst if not any(one is other for other in best)]
    return [one.draw(*one.things) for one in best], [one.draw(*one.things) for one in others]


def pixels(image: torch.Tensor) -> numpy.ndarray:
    """(channels, height, width) as (height, width, channels), from black at its least to white."""
    image = image.detach().float().cpu()
    low, high = image.min(), image.max()
    scaled: numpy.ndarray = ((image - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).numpy()
    return scaled


def as_image(title: str, sample: torch.Tensor) -> Picture:
    """A sample that is an image."""
    return Image(title, pixels(sample))


def classified(
    model: nn.Module,
    batches: Iterable[Any],
    names: Sequence[str],
    draw: Callable[[str, torch.Tensor], Picture] = as_image,
) -> Shown:
    """The confusion matrix, the surest right sample of each class, and the samples whose class it believed
    in least; `draw` makes a picture of a title and a sample.
    """
    counts = torch.zeros(len(names), len(names), dtype=torch.int64)
    best: dict[int, Sample] = {}  # of the classes that have the surest, the surest first
    worst: list[Sample] = []
    for inputs, labels in batches:
        chances = model(inputs).detach().float().softmax(1).cpu()
        for sample, label, row in zip(inputs, labels.tolist(), chances, strict=True):
            said = int(row.argmax())
            counts[label, said] += 1
            told = f"{names[said]}, {words.percent(float(row[said]))}"
            told = told if said == label else f"says {told}; it is {names[label]}"
            one = Sample(float(row[label]), draw, (told, sample))
            if said == label and (label not in best or one.score > best[label].score):
                best[label] = one.alone()
                best = dict(sorted(best.items(), key=lambda each: -each[1].score)[:SHOWN])
            elif said != label and (len(worst) < SHOWN or one.score < worst[-1].score):
                worst = sorted([*worst, one.alone()], key=lambda each: each.score)[:SHOWN]
    found: Shown = {}
    if len(names) <= MOST_CLASSES:
        title = "Rows: what it is. Columns: what the model says"
        found["Confusion"] = [Counts(title, names, counts.tolist())]
    found["Surest, and right"] = [one.draw(*one.things) for one in best.values()]
    found["Least believed, and wrong"] = [one.draw(*one.things) for one in worst]
    return found


def segmented(model: nn.Module, batches: Iterable[Any], names: Sequence[str]) -> Shown:
    """The confusion of pixels, and images beside their true classes and the model's."""
    counts = torch.zeros(len(names), len(names), dtype=torch.int64)

    def samples() -> Iterable[Sample]:
        for images, classes in batches:
            guesses = model(images).detach().argmax(1).cpu()
            for image, true, guess in zip(images, classes.cpu(), guesses, strict=True):
                here = confusion(true, guess, len(names))
                counts.add_(here)
                shares = here.diag() / (here.sum(0) + here.sum(1) - here.diag())
                score = float(shares.nanmean().nan_to_num())
                yield Sample(score, panels, (f"mean IoU {score:.2f}", image, true, guess, names))

    best, worst = extremes(samples())
    found: Shown = {}
    if len(names) <= MOST_CLASSES:
        thousands = (counts / 1e3).round().long().tolist()
        title = "Thousands of pixels. Rows: what it is. Columns: what the model says"
        found["Confusion"] = [Counts(title, names, thousands)]
    of = "the image, what is true, what the model says"
    return {**found, f"Best: {of}": best, f"Worst: {of}": worst}


def panels(
    title: str, image: torch.Tensor, true: torch.Tensor, guess: torch.Tensor, names: Sequence[str]
) -> Picture:
    """An image beside itself under the true classes' colours and under the model's; which colour is which."""
    plain = numpy.repeat(pixels(image), 3, 2) if image.shape[0] == 1 else pixels(image)
    parts, colours = [plain], _colours(len(names))
    for classes in (true.numpy(), guess.numpy()):
        named = numpy.where((classes > 0) & (classes < len(names)), classes, 0)  # others do not count
        tint = TINT * (named > 0)[:, :, None]
        parts.append(plain * (1 - tint) + colours[named] / 255 * tint)
    there = numpy.union1d(true.numpy(), guess.numpy())
    there = there[(there > 0) & (there < len(names))]
    legend = {names[place]: colours[place].tolist() for place in there}
    gap = numpy.ones((plain.shape[0], max(1, plain.shape[1] // 32), 3))
    whole = numpy.concatenate([parts[0], gap, parts[1], gap, parts[2]], axis=1)
    return Image(title, whole, legend=legend)


def _colours(number: int) -> NDArray[Any]:
    """A colour of its own for each of so many classes; where they are many, hues in turns light and dark."""
    if number <= len(COLOURS):
        return COLOURS
    hues = [colorsys.hsv_to_rgb(n / number, 0.9, 0.6 if n % 2 else 1.0) for n in range(number)]
    return (255 * numpy.array(hues)).round().astype(int)


class Found(NamedTuple):
    """Boxes (number, 4), their chances and classes, of one image."""

    boxes: torch.Tensor
    scores: torch.Tensor
    labels: torch.Tensor


def detected(
    batches: Iterable[Any],
    found_in: Callable[[torch.Tensor], list[dict[str, torch.Tensor]]],
    names: Sequence[str],
) -> Shown:
    """Images with the boxes that are true, dashed, and those that the model finds, right or wrong."""

    def samples() -> Iterable[Sample]:
        for images, targets, labels in batches:
            for image, boxes, classes, told in zip(images, targets, labels, found_in(images), strict=True):
                there, likely = classes >= 0, told["scores"] > LIKELY
                true = Found(boxes[there].cpu(), torch.ones(int(there.sum())), classes[there].cpu())
                guess = Found(*(told[key][likely].detach().cpu() for key in ("boxes", "scores", "labels")))
                right, met = matched(true, guess)
                boxed = len(right) + len(met)
                f1 = 2 * sum(right) / boxed if boxed else 1.0  # nothing is there, and nothing was found
                # Of images that are equally well done, that with more boxes.
                yield Sample(f1 * (1 + 0.01 * len(met)), outlined, (image, true, guess, right, met, names))

    best, worst = extremes(samples())
    return {"Best: true boxes are dashed": best, "Worst: true boxes are dashed": worst}


def matched(true: Found, guess: Found) -> tuple[list[bool], list[bool]]:
    """Which of the model's boxes are right (on a true box of their class by half and more, the likeliest
    first), and which true ones were found.
    """
    met = [False] * len(true.boxes)
    right = []
    for box, label in zip(guess.boxes.tolist(), guess.labels.tolist(), strict=True):
        places = [
            place
            for place, (other, name) in enumerate(zip(true.boxes.tolist(), true.labels.tolist(), strict=True))
            if not met[place] and name == label and overlap(box, other) >= 0.5
        ]
        right.append(bool(places))
        if places:
            met[places[0]] = True
    return right, met


def overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes."""
    sides = (min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1]))
    shared = max(0.0, sides[0]) * max(0.0, sides[1])
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return shared / (areas - shared) if shared else 0.0


def outlined(
    image: torch.Tensor, true: Found, guess: Found, right: list[bool], met: list[bool], names: Sequence[str]
) -> Picture:
    """An image and its boxes: a true one is named where it was not found."""
    found = []
    for box, label, was_met in zip(true.boxes.tolist(), true.labels.tolist(), met, strict=True):
        found.append(box_of(box, "" if was_met else names[label]))
    for box, label, good in zip(guess.boxes.tolist(), guess.labels.tolist(), right, strict=True):
        found.append(box_of(box, names[label], good))
    title = f"{sum(met)} of {len(met)} found, {len(right) - sum(right)} wrong"
    return Image(title, pixels(image), found)


def box_of(sides: Sequence[float], label: str, correct: bool | None = None) -> Box:
    """A box of its sides as x1, y1, x2, y2."""
    left, top, right, bottom = sides
    return Box(left, top, right, bottom, label, correct)


def spans(tags: Sequence[str]) -> dict[tuple[int, int], str]:
    """Whole entities of IOB tags: their kinds by first place and end."""
    found: dict[tuple[int, int], str] = {}
    begin = 0
    for place, tag in enumerate([*tags, "O"]):
        inside = place > begin and tags[begin] != "O" and tag == f"I-{tags[begin][2:]}"
        if inside:
            continue
        if place > begin and tags[begin].startswith("B-"):
            found[(begin, place)] = tags[begin][2:]
        begin = place
    return found


def mistakes(true: Sequence[str], guess: Sequence[str]) -> int:
    """Entities that were missed, and those found that are none."""
    return len(spans(true).items() ^ spans(guess).items())


def tagged(units: Sequence[str], true: Sequence[str], guess: Sequence[str], joint: str) -> Picture:
    """A sentence with the entities that the model finds, and those it misses."""
    is_there, said = spans(true), spans(guess)
    marks: list[tuple[int, int, Piece]] = []
    for (begin, end), kind in said.items():
        right = is_there.get((begin, end)) == kind
        others = [
            f"{other} {joint.join(units[a:b])}"
            for (a, b), other in is_there.items()
            if not right and a < end and b > begin
        ]
        label = f"{kind}; it is {', '.join(others)}" if others else kind
        marks.append((begin, end, Piece(joint.join(units[begin:end]), label, right)))
    missed = [
        (begin, end, Piece(joint.join(units[begin:end]), f"{kind} missed"))
        for (begin, end), kind in is_there.items()
        if not any(a < end and b > begin for a, b in said)
    ]
    pieces: list[Piece | str] = []
    at = 0
    for begin, end, piece in sorted([*marks, *missed], key=lambda mark: mark[:2]):
        pieces += [joint.join(units[at:begin]), piece]
        at = end
    pieces.append(joint.join(units[at:]))
    right_ones = sum(piece.correct is True for _, _, piece in marks)
    return Text(f"{right_ones} of {len(is_there)} found, {len(marks) - right_ones} wrong", pieces)


def likely(model: nn.Module, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The surprise of each next token in bits: (batch, length)."""
    logits = model(tokens).detach().float()
    nats = functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    return nats.view_as(following).cpu() / float(numpy.log(2))


def continued(model: nn.Module, tokens: torch.Tensor, number: int, temperature: float) -> torch.Tensor:
    """`number` further tokens of each row, drawn as likely as the model holds them, which sees as many at
    once as a row has: (rows, number).
    """
    length, found = tokens.shape[1], tokens
    for _ in range(number):
        chances = (model(found[:, -length:])[:, -1].float() / temperature).softmax(-1)
        found = torch.cat([found, torch.multinomial(chances, 1)], dim=1)
    return found[:, length:]
