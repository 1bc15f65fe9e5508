"""The last part of an image transform, which keeps a picture's size: it can run on the device instead.

torchvision's transforms of both generations are known: what turns a picture into a tensor of bytes, and what
makes scaled and normalised floats of these. Imports torch.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from vivace.errors import Refused
from vivace.job import Batch
from vivace.technique import Build, Seam
from vivace.tensors.loaders import data_loader, same_settings, settings_of, small_batch, with_other
from vivace.tensors.trees import map_tensors, tensors

if TYPE_CHECKING:
    from PIL.Image import Image

SCALING = ("Normalize", "ToDtype", "ConvertImageDtype")
TO_BYTES = ("ToImage", "PILToTensor")
FLIPS = {"RandomHorizontalFlip": -1, "RandomVerticalFlip": -2}
RANDOM = (
    *FLIPS,
    "ColorJitter",
    "GaussianBlur",
    "RandomAdjustSharpness",
    "RandomAutocontrast",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomInvert",
    "RandomPosterize",
    "RandomSolarize",
)
_CHANGED = (
    "your loop changes the batch between session.batches and session.step, where it is of bytes: do that in "
    "the dataset or in the loss"
)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dataset that gives bytes, and what makes of a batch's bytes the numbers that it gave before."""

    dataset: Any
    finish: Callable[[torch.Tensor], torch.Tensor]
    moved: tuple[str, ...]


def cut(dataset: Any, augment: bool = False) -> Cut:
    """Split the transform of a dataset, however it is wrapped, before its scaling. Raises Refused by name.

    With `augment`, random steps that keep a picture's size go to the later part, too.
    """
    inner = getattr(dataset, "dataset", None)
    if inner is not None and not _transforms(dataset):
        found = cut(inner, augment)
        return dataclasses.replace(found, dataset=_with(dataset, dataset=found.dataset))
    head, tail = list(_transforms(dataset)), list[Any]()
    kind = type(dataset).__name__
    if hasattr(dataset, "set_epoch"):
        raise Refused(f"your {kind} is told the epoch by set_epoch, which a copy of it would not hear")
    if not head:
        raise Refused(f"your {kind} has no torchvision Compose as its transform")
    while head and _is(head[-1], "ToTensor", *SCALING, *TO_BYTES, *(RANDOM if augment else ())):
        tail.insert(0, head.pop())
    names = [type(step).__name__ for step in tail]
    scaled = [name for name in names if name in ("ToTensor", "ToDtype", "ConvertImageDtype")]
    if not scaled:
        last = type(head[-1]).__name__
        raise Refused(f"the transform of your {kind} does not end with scaling bytes to floats: {last} comes")
    if augment and not set(names) & set(RANDOM):
        raise Refused(f"your {kind} does nothing random at its end that a device could do")
    into_bytes = [step for step in tail if _is(step, *TO_BYTES)]
    head += [_to_bytes] if "ToTensor" in names else into_bytes
    transform = _compose(dataset.transform)(head)
    changed = {"transform": transform}
    if getattr(dataset, "transforms", None) is not None:  # torchvision keeps the pair a second time
        changed["transforms"] = type(dataset.transforms)(transform, dataset.target_transform)
    later = [step for step in tail if step not in into_bytes]
    moved = tuple(type(step).__name__ for step in later)
    return Cut(_with(dataset, **changed), _Finish(later), moved)


class _Finish:
    """Augmenting, scaling and normalising of a whole batch, on the device where it lies."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self.steps = steps

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            name = type(step).__name__
            if (wanted := _divides(step, pixels)) is not None:
                # Of a number a GPU would take the reciprocal, which rounds otherwise than dividing.
                floats = pixels.to(wanted)
                pixels = floats.div_(torch.tensor(255.0, dtype=floats.dtype, device=floats.device))
            elif name in FLIPS:
                chosen = (torch.rand(len(pixels)) < step.p).to(pixels.device, non_blocking=True)
                each = chosen.view(-1, *(1,) * (pixels.dim() - 1))  # a film is turned as a whole
                pixels = torch.where(each, pixels.flip(FLIPS[name]), pixels)
            elif name in RANDOM:  # each picture by itself: on a batch all would get the same
                pixels = torch.stack([step(picture) for picture in pixels])
            else:
                pixels = torch.as_tensor(step(pixels))
        return pixels


@dataclasses.dataclass(frozen=True)
class _Sending:
    """A loader over a dataset of bytes, and what makes the numbers of before of the tensors in `places`.

    `settings` are those of the dataset of which the bytes' one is a copy.
    """

    loader: DataLoader[Any]
    places: frozenset[int]
    cut: Cut
    settings: list[tuple[str, Any]]

    def is_like(self, own: DataLoader[Any]) -> bool:
        """Would the person's own loader still read the same? Workers that stay never hear of a change."""
        return own.persistent_workers or same_settings(settings_of(own.dataset), self.settings)

    def finished(self, batch: Batch, device: torch.device, note: Callable[[int], None]) -> Any:
        """A batch whose bytes have become floats on the device; `note` is told how many bytes."""
        return _finished(batch, lambda number: self.cut if number in self.places else None, device, note)


def _finished(
    batch: Batch, cut_of: Callable[[int], Cut | None], device: torch.device, note: Callable[[int], None]
) -> Any:
    """A batch of which the bytes in those tensors that have a cut, by their number, have become floats."""
    numbers = itertools.count()

    def finish(tensor: torch.Tensor) -> torch.Tensor:
        own = cut_of(next(numbers))
        if own is None or tensor.dtype != torch.uint8:
            return tensor
        note(tensor.numel())
        return own.finish(tensor.to(device))

    return map_tensors(batch, finish)


def sending(build: Build, loader: Iterable[Batch], augment: bool) -> _Sending:
    """The loader with its pictures as bytes. Raises Refused where that cannot be, or gives other numbers.

    Two samples are read both ways: without `augment` they must be equal bit for bit.
    """
    own = data_loader(loader, "an iterable dataset cannot be looked at twice")
    settings = settings_of(own.dataset)
    found = cut(own.dataset, augment)
    other = with_other(own, dataset=found.dataset)
    wanted, sent = list(tensors(small_batch(own))), list(tensors(small_batch(other)))
    build.require(len(wanted) == len(sent), "its batches come out with other tensors")
    pairs = list(zip(wanted, sent, strict=True))
    places = frozenset(n for n, (a, b) in enumerate(pairs) if a.dtype != b.dtype)
    done = [(a, _there(b, found, build.device) if n in places else b) for n, (a, b) in enumerate(pairs)]
    alike = places and all(_alike(a, b, bits=not augment) for a, b in done)
    build.require(alike, "its batches come out with other numbers")
    return _Sending(other, places, found, settings)


class Sender:
    """What two techniques do to a build: rebuild loaders over datasets of bytes, finish batches once placed.

    Args:
        build: gets the notes ``moved`` and ``bytes``, under the technique's `name`.
        augment: see `cut`; of the training data alone. Those for the metric stay bit for bit as they are.
    """

    def __init__(self, build: Build, name: str, augment: bool) -> None:
        self.build, self.name, self.augment = build, name, augment
        self.rebuilt: weakref.WeakKeyDictionary[Any, _Sending] = weakref.WeakKeyDictionary()
        self.sending: _Sending | None = None
        self.underway: dict[int, tuple[weakref.ref[torch.Tensor], Cut]] = {}  # by the identity of a tensor
        self.waiting = False  # were bytes handed out, and none placed since?
        self.beside: list[weakref.ref[torch.Tensor]] = []  # what came with these, such as labels
        self.lost = False  # came floats in their stead, with the same labels?
        self.doubtful = False  # came floats with others, of another source or of samples that were mixed?
        build.wrap(Seam.BATCHES, self.batches)
        build.wrap(Seam.PLACE, self.place)
        build.wrap(Seam.STEP, self.step)
        build.wrap(Seam.VALIDATION, self.validation)
        build.on_close(self._let_go)

    def batches(self, following: Callable[[Any], Iterable[Any]], loader: Iterable[Batch]) -> Iterable[Any]:
        """The seam `batches`. Raises Refused where the loader's pictures cannot be sent as bytes."""
        own = data_loader(loader, "an iterable dataset cannot be looked at twice")
        found = self.rebuilt.get(own)
        if found is None or not found.is_like(own):
            found = self.rebuilt[own] = sending(self.build, own, self.augment)
            noted = self.build.notes.setdefault(self.name, {"bytes": 0})
            noted["moved"] = list(found.cut.moved)
        return self._sent(following, found)

    def _sent(self, following: Callable[[Any], Iterable[Any]], found: _Sending) -> Iterator[Any]:
        """Batches, with what finishes them at hand: several loaders may be read in turn, or together."""
        try:
            for batch in following(found.loader):
                self.sending, self.waiting, self.doubtful, self.beside = found, True, False, []
                self.underway = {key: own for key, own in self.underway.items() if own[0]() is not None}
                for number, tensor in enumerate(tensors(batch)):
                    if number in found.places:
                        self.underway[id(tensor)] = weakref.ref(tensor), found.cut
                    else:
                        self.beside.append(weakref.ref(tensor))
                yield batch
                if self.waiting and self.doubtful:  # the bytes themselves never came
                    raise Refused(_CHANGED).by(self.name)
        finally:
            self.waiting = False

    def place(self, following: Callable[[Any], Any], batch: Batch) -> Any:
        """The seam `place`. A batch that did not come through the session stays as it is; a part of one that
        did is taken for the latest one.
        """
        given = list(tensors(batch))
        cuts = {number: cut for number, tensor in enumerate(given) if (cut := self._cut_of(tensor))}
        own = [one for n, one in enumerate(given) if self.sending is not None and n in self.sending.places]
        self.waiting = self.waiting and not cuts and all(one.dtype != torch.uint8 for one in own)
        floats = any(one.is_floating_point() for one in own)
        same = any(known() is one for known in self.beside for one in given)
        self.lost = self.waiting and floats and same
        self.doubtful = self.waiting and not self.lost and (floats or self.doubtful)
        placed, device = following(batch), self.build.device
        if cuts:
            return _finished(placed, cuts.get, device, self._note)
        return placed if self.sending is None else self.sending.finished(placed, device, self._note)

    def step(self, following: Callable[[Any], Any], batch: object) -> Any:
        """The seam `step`. Raises Refused where it would train on what a loop has made of the bytes."""
        self.build.require(not self.lost, _CHANGED)
        return following(batch)

    def _cut_of(self, tensor: torch.Tensor) -> Cut | None:
        known, cut = self.underway.get(id(tensor), (None, None))
        return cut if known is not None and known() is tensor else None

    def validation(self, following: Callable[[Any], Iterable[Any]], loader: Iterable[Batch]) -> Iterable[Any]:
        """The seam `validation`: what is done to bytes is done on the device. Raises Refused as `batches`."""
        found = sending(self.build, loader, augment=False)

        def finished() -> Iterator[Any]:
            for batch in following(found.loader):
                yield found.finished(batch, self.build.device, lambda _: None)

        return finished()

    def _let_go(self) -> None:
        """The last references: persistent workers end with their loader."""
        self.rebuilt.clear()
        self.underway.clear()
        self.sending = None

    def _note(self, num_bytes: int) -> None:
        self.build.notes[self.name]["bytes"] += num_bytes


def _divides(step: object, pixels: torch.Tensor) -> torch.dtype | None:
    """The floats into which a step turns bytes by dividing; None of any other step.

    The later generation of torchvision multiplies by the reciprocal, on every device.
    """
    if _is(step, "ToTensor"):
        return torch.get_default_dtype()
    first = getattr(sys.modules.get("torchvision.transforms"), "ConvertImageDtype", None)
    wanted = getattr(step, "dtype", None)
    divides = type(step) is first and pixels.dtype == torch.uint8
    return wanted if divides and isinstance(wanted, torch.dtype) and wanted.is_floating_point else None


def _there(pixels: torch.Tensor, found: Cut, device: torch.device) -> torch.Tensor:
    """As it is done later: a GPU may round otherwise."""
    return found.finish(pixels.to(device, copy=True)).cpu()


def _alike(wanted: torch.Tensor, found: torch.Tensor, bits: bool) -> bool:
    same = wanted.dtype == found.dtype and wanted.shape == found.shape
    return same and (not bits or (wanted.stride() == found.stride() and torch.equal(wanted, found)))


def _to_bytes(picture: Image) -> torch.Tensor:
    """What torchvision's ToTensor makes, before it divides by 255."""
    from torchvision.transforms import functional

    pixels = functional.pil_to_tensor(picture)
    if pixels.dtype != torch.uint8 or picture.mode == "1":
        raise Refused(f"a picture of mode {picture.mode} does not consist of bytes")
    found: torch.Tensor = pixels.contiguous()
    return found


def _transforms(dataset: object) -> Sequence[Any]:
    """The steps of a dataset's Compose; empty where there is none."""
    transform: Any = getattr(dataset, "transform", None)
    if _is(transform, "ToTensor"):
        return (transform,)
    return tuple(transform.transforms) if _is(transform, "Compose") else ()


def _compose(transform: object) -> Any:
    """What puts steps together as the dataset does it."""
    from torchvision.transforms import Compose

    return type(transform) if _is(transform, "Compose") else Compose


def _is(thing: object, *names: str) -> bool:
    """Is it exactly one of torchvision's transforms of these names? Neither a subclass nor a person's own."""
    modules = ("torchvision.transforms", "torchvision.transforms.v2")
    loaded = [sys.modules[module] for module in modules if module in sys.modules]
    return any(type(thing) is getattr(module, name, None) for module in loaded for name in names)


def _with(thing: object, **changed: object) -> Any:
    other = copy.copy(thing)
    for name, value in changed.items():
        setattr(other, name, value)
    return other
