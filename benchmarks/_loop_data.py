"""Data in the places and formats where public example loops look for it, from what every machine has.

Digits of scikit-learn in MNIST's files, Python's own sources as a text. What lies there already stays.
"""

from __future__ import annotations

import collections
import pickle
import re
import struct
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy

NUM_DIGITS = {"train": 60_000, "t10k": 10_000}
NUM_WORDS, VOCABULARY = {"train": 400_000, "valid": 30_000, "test": 20_000}, 5000
NUM_CHARACTERS = 1_000_000


def digits(folder: Path) -> None:
    """MNIST's four files in ``../data/MNIST/raw``: 8x8 digits, three times as large, on 28x28 pixels."""
    from sklearn.datasets import load_digits

    place = folder.parent / "data" / "MNIST" / "raw"
    if place.is_dir():
        return
    place.mkdir(parents=True)
    known, random = load_digits(), numpy.random.default_rng(0)
    for name, count in NUM_DIGITS.items():
        chosen = random.integers(0, len(known.images), count)
        images = numpy.zeros((count, 28, 28), numpy.uint8)
        images[:, 2:26, 2:26] = (known.images[chosen] * 15).astype(numpy.uint8).repeat(3, 1).repeat(3, 2)
        head = struct.pack(">IIII", 2051, count, 28, 28)
        (place / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = struct.pack(">II", 2049, count) + known.target[chosen].astype(numpy.uint8).tobytes()
        (place / f"{name}-labels-idx1-ubyte").write_bytes(labels)


def words(folder: Path) -> None:
    """``data/wikitext-2`` with lines of twenty words, the rare ones replaced by ``<unk>``."""
    place = folder / "data" / "wikitext-2"
    if (place / "train.txt").is_file():
        return
    place.mkdir(parents=True, exist_ok=True)
    found = re.findall(r"[A-Za-z]+", _text())
    common = {word for word, _ in collections.Counter(found).most_common(VOCABULARY)}
    kept = iter([word if word in common else "<unk>" for word in found])
    for name, count in NUM_WORDS.items():
        part = [word for _, word in zip(range(count), kept, strict=False)]
        lines = [" ".join(part[begin : begin + 20]) + "\n" for begin in range(0, len(part), 20)]
        (place / f"{name}.txt").write_text("".join(lines))


def characters(folder: Path) -> None:
    """``data/shakespeare_char`` with one 16-bit number a character, and the alphabet."""
    place = folder / "data" / "shakespeare_char"
    if (place / "train.bin").is_file():
        return
    place.mkdir(parents=True, exist_ok=True)
    text = _text().encode("ascii", "ignore").decode()[:NUM_CHARACTERS]
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    encoded = numpy.array([numbers[character] for character in text], numpy.uint16)
    cut = len(text) * 9 // 10
    encoded[:cut].tofile(place / "train.bin")
    encoded[cut:].tofile(place / "val.bin")
    about = {"vocab_size": len(alphabet), "stoi": numbers, "itos": dict(enumerate(alphabet))}
    (place / "meta.pkl").write_bytes(pickle.dumps(about))


def _text() -> str:
    """The sources of Python's standard library, file after file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


KINDS: dict[str, Callable[[Path], None]] = {"digits": digits, "words": words, "characters": characters}
