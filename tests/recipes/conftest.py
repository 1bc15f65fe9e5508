"""Data of one's own in the recipes' formats."""

import functools
import inspect
import random

import pytest
from PIL import Image

from vivace import recipes
from vivace.recipes.sources import cutouts, debian, folders, snownlp, standard_library, wordnet

CACHED = (cutouts, debian, folders, snownlp, standard_library, wordnet)


def forget():
    """What recipes keep of data read before."""
    modules = [*CACHED, *(__import__(f"vivace.recipes.{name}", fromlist=["job"]) for name in recipes.RECIPES)]
    for module in modules:
        for _, thing in inspect.getmembers(
            module, lambda each: isinstance(each, functools._lru_cache_wrapper)
        ):
            thing.cache_clear()


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder that VIVACE_DATA names; nothing that was read before or is read now is kept."""
    forget()
    monkeypatch.setenv("VIVACE_DATA", str(tmp_path))
    yield tmp_path
    forget()


@pytest.fixture
def shapes(monkeypatch):
    """Twelve coloured rectangles of each class instead of the font's pictures, and plain photographs."""
    draw, found = random.Random(0), {}
    for name in cutouts.NAMES:
        found[name] = []
        for size in range(12):
            picture = Image.new("RGBA", (40 + 2 * size, 44))
            for left, top in ((0, 0), (20, 0), (0, 22), (20, 22)):  # four quarters, each of its own colour
                colour = tuple(draw.randrange(100, 256) for _ in range(3))
                picture.paste((*colour, 255), (left, top, left + 20 + 2 * size, top + 22))
            found[name].append(picture)
    monkeypatch.setattr(cutouts, "every", lambda: found)
    monkeypatch.setattr(cutouts, "photographs", lambda split: (Image.new("RGB", (120, 90), (10, 20, 30)),))
    cutouts.pictures.cache_clear()
    yield found
    cutouts.pictures.cache_clear()
