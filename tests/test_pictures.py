"""Pictures survive being written and read, refuse what cannot be drawn, and read nothing that is damaged."""

import base64
import json
import zlib

import numpy
import pytest

from vivace.errors import JobError
from vivace.pictures import (
    MOST_BOXES,
    MOST_CLASSES,
    MOST_LETTERS,
    MOST_PICTURES,
    MOST_PIXELS,
    Box,
    Counts,
    Image,
    Piece,
    Text,
    document,
    read,
)


def written(found):
    return read(json.loads(json.dumps(document(found))))


def test_every_kind_comes_back_as_it_was():
    pixels = numpy.arange(24, dtype=numpy.uint8).reshape(2, 4, 3)
    found = {
        "Confusion": [Counts("all", ["a", "b"], [[3, 1], [0, 2]])],
        "Best": [
            Image("one", pixels, [Box(0, 1, 2.5, 2, "cat", True), Box(1, 1, 2, 2)], {"cat": (255, 196, 0)})
        ],
        "Text": [Text("said", ["before ", Piece("Ann", "PER", False), Piece("given", "given")])],
        "Nothing": [],
    }
    back = written(found)
    assert list(back) == ["Confusion", "Best", "Text"]  # a heading without pictures is none
    assert back["Confusion"] == found["Confusion"]
    assert back["Text"] == found["Text"]
    (image,) = back["Best"]
    assert numpy.array_equal(image.packed.array, pixels)
    assert image.boxes == found["Best"][0].boxes
    assert image.legend == {"cat": (255, 196, 0)}


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (numpy.array([[0.0, 0.5], [1.0, 7.0]]), [[0, 128], [255, 255]]),
        (numpy.array([[0, 128], [255, 999]]), [[0, 128], [255, 255]]),
        (numpy.array([[float("nan"), 1.0]]), [[0, 255]]),
        (numpy.array([[-float("inf"), float("inf")]]), [[0, 255]]),
        (numpy.array([[True, False]]), [[255, 0]]),
        (numpy.array([[-1, 127]], numpy.int8), [[0, 127]]),
        (numpy.full((1, 2, 4), 9, numpy.uint8), [[9, 9]]),
        (numpy.full((1, 2, 1), 1.0, numpy.float32), [[255, 255]]),
    ],
)
def test_pixels_of_any_kind_become_eight_bits_of_three_colours(pixels, expected):
    found = Image("a picture", pixels).packed.array
    assert found.dtype == numpy.uint8
    assert found.shape == (*numpy.shape(expected), 3)
    assert found[:, :, 0].tolist() == found[:, :, 2].tolist() == expected


def test_a_large_image_shrinks_and_its_boxes_with_it():
    large = Image("large", numpy.zeros((2 * MOST_PIXELS, 10)), [Box(2, 4, 6, 8)] * (MOST_BOXES + 5))
    ((small,),) = written({"a": [large]}).values()
    assert small.packed.array.shape[:2] == (MOST_PIXELS, 5)
    assert small.boxes == (Box(1, 2, 3, 4),) * MOST_BOXES


def test_a_long_text_is_cut_and_its_marks_stay():
    text = Text("long", ["a" * (MOST_LETTERS - 2), Piece("bcdef", "five", True), "g"])
    assert [piece.text for piece in text.pieces] == ["a" * (MOST_LETTERS - 2), "bc…"]
    assert text.pieces[1].label == "five"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Image("odd", numpy.zeros((3, 8, 8))), r"the channels last; those of 'odd' .* \(3, 8, 8\)"),
        (lambda: Image("none", numpy.zeros((0, 4))), "of the shape"),
        (lambda: Counts("odd", ["a"], [[1, 2]]), r"'odd' has rows of \[2\]"),
        (lambda: Counts("odd", ["a"], [[-1]]), "1 numbers from 0 on"),
        (lambda: Counts("odd", ["a"], [[0.5]]), "rows of whole numbers; those of 'odd' are not"),
        (lambda: Counts("many", "x" * 41, [[0] * 41] * 41), f"at most {MOST_CLASSES} names"),
        (
            lambda: Image("odd", numpy.zeros((1, 1)), legend={"a": (0, 0, 256)}),
            "three whole numbers from 0 to 255",
        ),
        (
            lambda: Image("odd", numpy.zeros((1, 1)), legend={"a": (0.5, 0, 1)}),
            "three whole numbers from 0 to 255",
        ),
        (lambda: document([Text("a", ["b"])]), "returned a list; it must return a dictionary of headings"),
        (lambda: document({"a": Text("a", ["b"])}), "under 'a' are a Text; they must be a list"),
        (lambda: document({"a": ["<svg>"]}), "under 'a' hold a str: neither Counts, Image nor Text"),
        (lambda: document({"a": [Text("a", ["b"])] * 61}), f"are 61; a page shows {MOST_PICTURES} at most"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(make, said):
    with pytest.raises(JobError, match=said):
        make()


def damaged(**changes):
    good = document({"a": [Image("a", numpy.zeros((2, 2))), Text("b", ["c"])]})
    good["headings"][0]["pictures"][0] |= changes
    return good


@pytest.mark.parametrize(
    "changes",
    [
        {"pixels": "no base64"},
        {"pixels": base64.b64encode(b"not packed").decode()},
        {"pixels": base64.b64encode(zlib.compress(b"short")).decode()},
        {"shape": [2]},
        {"shape": [10**9, 10**9]},
        {"shape": [-1, 2]},
        {"shape": [float("inf"), 2]},
        {"boxes": [{"left": 10**400, "top": 0, "right": 1, "bottom": 1}]},
        {"kind": "script"},
        {"title": None, "kind": None},
        {"boxes": [{"left": "x"}]},
        {"legend": {"a": ["red;", 0, 0]}},
        {"legend": ["a"]},
    ],
)
def test_a_damaged_picture_is_left_out_and_the_others_stay(changes):
    found = read(json.loads(json.dumps(damaged(**changes))))
    assert [one.title for one in found["a"]] == ["b"]


@pytest.mark.parametrize(
    "found", [{}, {"headings": 3}, {"headings": [None, {"heading": "a"}, {"pictures": 1}]}]
)
def test_other_documents_hold_no_pictures(found):
    assert read(found) == {}


def test_what_unpacks_to_more_than_its_shape_is_not_unpacked():
    bomb = base64.b64encode(zlib.compress(bytes(10**7))).decode()
    (image, _) = read(damaged(pixels=bomb))["a"]
    assert image.packed.array.shape == (2, 2, 3)


def test_places_that_are_no_numbers_draw_no_box():
    assert (
        read(damaged(boxes=[{"left": float("nan"), "top": 0, "right": 1, "bottom": 1, "label": ""}]))["a"][
            0
        ].boxes
        == ()
    )


def test_counts_may_be_an_array():
    assert Counts("fine", ["a"], numpy.array([[2]])).counts == ((2,),)


def test_a_box_without_a_place_is_left_out_of_the_document():
    """JSON has no word for it, and no reader draws it."""
    boxes = [Box(float("nan"), 0, 1, 1), Box(0, 0, 1, float("inf")), Box(0, 0, 1, 1)]
    found = document({"a": [Image("a", numpy.zeros((2, 2)), boxes)]})
    assert len(found["headings"][0]["pictures"][0]["boxes"]) == 1
    assert json.dumps(found, allow_nan=False)
