"""Words and their definitions of WordNet 3.0 (Princeton University), and pairs of words judged by people."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from vivace.errors import InputError
from vivace.recipes.sources import given, of_package

FOLDERS = ("/usr/share/wordnet", "~/nltk_data/corpora/wordnet")
PARTS = ("noun", "verb", "adj", "adv")
WORDS = re.compile(r"[a-z]+")
JUDGED = {"simlex999": "simlex999.txt", "wordsim353": "wordsim353.tsv"}


class Entry(NamedTuple):
    """Words of one meaning, each in lower letters, and the words of its definition, without examples."""

    words: tuple[str, ...]
    definition: tuple[str, ...]


def folder() -> Path:
    """Where the database lies. Raises InputError with the install line where it is missing."""
    found = [given("wordnet"), *(Path(path).expanduser() for path in FOLDERS)]
    for path in found:
        if path is not None and (path / "data.noun").is_file():
            return path
    raise InputError(
        "this recipe reads WordNet's database: apt install wordnet-base, or put its data.noun, data.verb, "
        "data.adj and data.adv into the folder wordnet below VIVACE_DATA"
    )


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All meanings that have a word of letters alone and a definition of three words or more."""
    found = []
    for part in PARTS:
        with (folder() / f"data.{part}").open(encoding="utf-8") as file:
            found += [entry(line) for line in file if not line.startswith(" ")]
    return tuple(each for each in found if each.words and len(each.definition) >= 3)


def entry(line: str) -> Entry:
    """A line of the database (wndb(5WN)): the count of words is hexadecimal, each is followed by a number."""
    facts, _, gloss = line.partition("|")
    columns = facts.split()
    words = (columns[4 + 2 * number].partition("(")[0].lower() for number in range(int(columns[3], 16)))
    definition = gloss.partition('"')[0].lower()
    return Entry(tuple(w for w in words if WORDS.fullmatch(w)), tuple(WORDS.findall(definition)))


@functools.cache
def judged(name: str) -> tuple[tuple[str, str, float], ...]:
    """Pairs of words and how similar people find them, from 0 to 10: ``simlex999`` or ``wordsim353``."""
    path = of_package("gensim", f"gensim/test/test_data/{JUDGED[name]}")
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple((a.lower(), b.lower(), float(score)) for a, b, score in (r for r in rows if r[0][:1] != "#"))
