"""WordNet's synsets with their glosses (Fellbaum, 1998), as Debian packs them, and how alike people find two
words: SimLex-999 (Hill et al., 2015, arXiv:1408.3456) and WordSim-353 (Finkelstein et al., 2002), which
gensim ships.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from vivace.errors import InputError
from vivace.recipes.sources import given, of_package

INSTALLED = Path("/usr/share/wordnet")
PARTS = ("noun", "verb", "adj", "adv")
INSTALL = "apt install wordnet-base"
MARKER = re.compile(r"\([a-z]+\)$")  # of where an adjective stands: "galore(ip)"
EXAMPLE = re.compile(r';\s*"')  # with which a gloss's examples begin
RATINGS = {"simlex": "simlex999.txt", "wordsim": "wordsim353.tsv"}


class Synset(NamedTuple):
    """Words of one meaning, and what it is."""

    words: tuple[str, ...]
    gloss: str


class Rated(NamedTuple):
    """Two words, and how alike people find them, from 0 to 10."""

    first: str
    second: str
    rating: float


@functools.cache
def synsets() -> tuple[Synset, ...]:
    """All that have a gloss, in WordNet's order.

    Raises InputError with the install line where WordNet is neither installed nor below VIVACE_DATA.
    """
    found: list[Synset] = []
    for part in PARTS:
        path = given(f"wordnet/data.{part}") or INSTALLED / f"data.{part}"
        if not path.is_file():
            raise InputError(f"this recipe reads WordNet's 'data.{part}': {INSTALL}")
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [synset for line in lines if (synset := read(line)) is not None]
    return tuple(found)


def read(line: str) -> Synset | None:
    """The synset of a line of WordNet's data files (wndb(5)): its words in small letters, its gloss without
    the examples. None for a line of the licence, which begins with a blank, and where no gloss is left.
    """
    facts, _, text = line.partition(" | ")
    gloss = EXAMPLE.split(text.strip())[0].strip().lower()
    if line.startswith(" ") or not gloss or gloss.startswith('"'):
        return None
    fields = facts.split(" ")
    number = int(fields[3], 16)
    words = (MARKER.sub("", word).replace("_", " ").lower() for word in fields[4 : 4 + 2 * number : 2])
    return Synset(tuple(dict.fromkeys(words)), gloss)


@functools.cache
def rated(name: str) -> tuple[Rated, ...]:
    """The pairs of ``simlex`` or ``wordsim``, in small letters."""
    path = of_package("gensim", f"gensim/test/test_data/{RATINGS[name]}")
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = (row for row in rows if not row[0].startswith("#") and len(row) == len(Rated._fields))
    return tuple(Rated(first.lower(), second.lower(), float(rating)) for first, second, rating in pairs)
