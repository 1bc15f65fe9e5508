"""Scenes: boxes and masks are those of the pixels that were pasted, and no picture is on two sides."""

import itertools
import random

import pytest
import torch
from PIL import Image

from vivace.errors import InputError
from vivace.recipes.sources import cutouts, scenes


def test_boxes_and_masks_are_those_of_the_pasted_pixels(shapes):
    background = (torch.tensor([10, 20, 30]) / 255 - scenes.MEAN) / scenes.SPREAD
    for seed in range(8):
        found = scenes.scene("training", 64, random.Random(seed), number=1)
        label = int(found.labels[0])
        inside = found.mask == label + 1
        assert set(found.mask.unique().tolist()) == {0, label + 1}
        rows, columns = torch.nonzero(inside, as_tuple=True)
        box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert found.boxes[0].tolist() == [float(side) for side in box]
        changed = (found.image - background[:, None, None]).abs().amax(0) > 1e-3
        assert not (inside & ~changed).any()
        assert (changed & ~inside).sum() < 0.2 * inside.sum()  # the half transparent rim


def test_what_is_hidden_by_more_than_half_has_no_box(shapes):
    counts = []
    for seed in range(20):
        found = scenes.scene("training", 48, random.Random(seed), number=4, shares=(0.9, 1.0))
        shown = found.mask.unique()[1:].tolist()
        named = found.labels[found.labels >= 0]
        assert {int(label) + 1 for label in named} <= set(shown)
        counts.append(len(named))
    assert min(counts) < 4


def test_training_scenes_change_and_held_out_ones_do_not(shapes):
    splits = ("training", "validation")
    training, held_out = (scenes.Scenes(split, 4, 32, lambda scene: scene.image) for split in splits)
    assert not torch.equal(training[0], training[0])
    assert torch.equal(held_out[1], held_out[1])
    assert not torch.equal(held_out[0], held_out[1])


def test_pictures_that_look_the_same_are_on_one_side(shapes):
    first = shapes[cutouts.NAMES[0]]
    first.append(first[3].copy())
    split = {name: {id(p) for p in cutouts.pictures(name)[0]} for name in cutouts.SPLITS}
    assert not any(a & b for a, b in itertools.combinations(split.values(), 2))
    assert set.union(*split.values()) == {id(picture) for picture in first}
    assert any({id(first[3]), id(first[-1])} <= side for side in split.values())


def test_a_picture_between_two_joins_them():
    grey = [Image.new("RGBA", (16, 16), (tone, tone, tone, 255)) for tone in (100, 200, 108, 104)]
    assert cutouts.families(grey[:3]) == [[0], [1], [2]]
    assert cutouts.families(grey) == [[0, 3, 2], [1]]


def test_no_photograph_is_in_two_splits():
    names = [name for split in cutouts.PHOTOGRAPHS.values() for name in split]
    assert len(names) == len(set(names))
    assert len(cutouts.photographs("validation")) == len(cutouts.PHOTOGRAPHS["validation"])


def test_the_font_has_pictures_of_every_class():
    try:
        found = cutouts.every()
    except InputError as error:
        pytest.skip(str(error))
    assert {name: len(pictures) >= 25 for name, pictures in found.items()} == dict.fromkeys(
        cutouts.NAMES, True
    )
    assert all(max(picture.size) == cutouts.SIDE for pictures in found.values() for picture in pictures)
