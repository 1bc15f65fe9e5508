"""Demand: what one step of a model asks of a card, and the shipped table of counted models (`models.csv`).

The counts come from `vivace.work.count` on fake tensors; here they are only read. Imports no torch.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vivace.errors import InputError
from vivace.operators import KINDS, KINDS_OF_CLASS

MODELS_FILE = Path(__file__).resolve().parent / "models.csv"
COLUMNS = ("model", "parameters", "tensors", "saved_bytes", "bins")


@dataclasses.dataclass(frozen=True)
class Bin:
    """Kernels of one kind and similar shape: their number, operations and bytes per sample, constant bytes.

    Bytes are those of fp32 tensors; a narrower precision moves fewer.
    """

    kind: str
    count: int
    flops: float
    bytes: float
    constant_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Demand:
    """One training step, forward and backward, without the optimizer's update.

    Args:
        bins: its kernels.
        num_parameters: weights that train.
        num_tensors: parameter tensors; each costs the optimizer some launches.
        saved_bytes: what the backward pass keeps per sample, in fp32.
        num_left: of those weights, how many a step leaves alone: rows without a gradient in a sparse one.
    """

    bins: tuple[Bin, ...]
    num_parameters: int
    num_tensors: int
    saved_bytes: float
    num_left: int = 0

    @property
    def num_updated(self) -> int:
        """Weights that a step updates."""
        return self.num_parameters - self.num_left

    @property
    def flops(self) -> float:
        """Operations of a step per sample, over all kinds of kernels."""
        return sum(b.flops for b in self.bins)

    @property
    def bytes(self) -> float:
        """Bytes per sample in fp32, one kernel an operator."""
        return sum(b.bytes for b in self.bins)

    @property
    def count(self) -> int:
        """Kernels of one step, of all kinds."""
        return sum(b.count for b in self.bins)

    @property
    def convolutional(self) -> bool:
        """Do convolutions do most of the operations?"""
        kinds = ("conv", "pointwise", "grouped", "irregular", "depthwise")
        return sum(b.flops for b in self.bins if b.kind in kinds) > self.flops / 2

    @property
    def attends_in_operators(self) -> bool:
        """Is there attention, of batched products with a softmax of their own, and none in one kernel?"""
        of_loss = 2  # forward and backward
        found = self.count_of("batched") > 0 and self.count_of("softmax") > of_loss
        return found and not self.count_of("attention")

    def count_of(self, kind: str) -> int:
        """Kernels of one step that are of this kind, such as ``conv``."""
        return sum(b.count for b in self.bins if b.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Demand:
        """Rebuild a Demand from `to_dict`'s document; raises InputError where it is none."""
        try:
            bins = tuple(Bin(**entry) for entry in document["bins"])
            unknown = {b.kind for b in bins} - set(KINDS)
            if unknown:
                raise InputError(f"the work holds kernels of an unknown kind {min(unknown)!r}")
            number, tensors = document["num_parameters"], document["num_tensors"]
            return cls(bins, number, tensors, document["saved_bytes"], document.get("num_left", 0))
        except (KeyError, TypeError) as error:
            raise InputError(f"the work cannot be read: {error!r} is missing or of a wrong kind") from None

    @classmethod
    def from_operators(cls, work: Mapping[str, Any], item_bytes: int) -> Demand:
        """From a profile's totals by operator class, counted at its own batch size and in numbers of
        `item_bytes` bytes."""
        batch = max(work["batch_size"], 1)
        wider = 4 / item_bytes  # the bytes of a Bin are those of fp32
        bins = tuple(
            Bin(
                KINDS_OF_CLASS.get(name, ("other",))[0],
                max(int(totals["count"]), 1),
                totals["flops"] / batch,
                wider * totals["bytes"] / batch,
            )
            for name, totals in work["operators"].items()
        )
        parameters = int(work["num_parameters"])
        saved = wider * (work.get("activation_bytes") or 0.0) / batch
        return cls(bins, parameters, int(work.get("num_tensors") or 0), saved)


def load_models(path: Path = MODELS_FILE) -> dict[str, Demand]:
    """The counted models by key, such as ``timm:resnet50@224``; several keys may share one Demand."""
    return dict(_shipped()) if path == MODELS_FILE else _models(path)


@functools.cache
def _shipped() -> Mapping[str, Demand]:
    return _models(MODELS_FILE)


def _models(path: Path) -> dict[str, Demand]:
    models: dict[str, Demand] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            if row["bins"].startswith("="):
                models[row["model"]] = models[row["bins"][1:]]
            else:
                models[row["model"]] = Demand(
                    tuple(_bin(text) for text in row["bins"].split(" ")),
                    int(row["parameters"]),
                    int(row["tensors"]),
                    float(row["saved_bytes"] or 0),
                )
    return models


def save_models(models: Mapping[str, Demand], path: Path = MODELS_FILE, head: Iterable[str] = ()) -> None:
    """Write the table; models that are equal to three digits are written once."""
    written: dict[str, str] = {}
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}\n" for line in head)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, model in sorted(models.items()):
            text = " ".join(_text(b) for b in model.bins)
            first = written.setdefault(text, name)
            if first == name:
                writer.writerow(
                    [name, model.num_parameters, model.num_tensors, _short(model.saved_bytes), text]
                )
            else:
                writer.writerow([name, "", "", "", f"={first}"])


def _bin(text: str) -> Bin:
    letter, count, *values = text.split(":")
    flops, moved, constant = (float(value or 0) for value in values)
    return Bin(KINDS[ord(letter) - ord("a")], int(count), flops, moved, constant)


def _text(b: Bin) -> str:
    values = ":".join(_short(value) for value in (b.flops, b.bytes, b.constant_bytes))
    return f"{chr(ord('a') + KINDS.index(b.kind))}:{b.count}:{values}"


def _short(value: float) -> str:
    """Three significant digits, as few characters as they need: ``123e4``."""
    if value < 1:
        return ""
    digits, _, exponent = f"{value:.2e}".partition("e")
    whole = digits.replace(".", "").rstrip("0")
    power = int(exponent) - len(whole) + 1
    return f"{whole}e{power}" if power > 2 else f"{int(float(f'{value:.3g}'))}"
