"""Pictures on the page: what they say is text, wherever it comes from, and the pixels are those given."""

import html.parser
import io
import json

import numpy
import PIL.Image
import pytest

import vivace
from vivace.pictures import PICTURES, Box, Counts, Image, Piece, Text, document
from vivace.reporting import pictures

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\x00\u202egpj.exe'


class Tags(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def drawn(*found):
    return "".join(str(markup) for _, markup in pictures.drawn({"a": found}))


def test_hostile_names_are_text_everywhere(train_folder):
    found = {
        HOSTILE: [
            Counts(HOSTILE, [HOSTILE, "b"], [[1, 0], [0, 1]]),
            Image(HOSTILE, numpy.zeros((4, 4)), [Box(0, 0, 3, 3, HOSTILE, True)]),
            Text(HOSTILE, [HOSTILE, Piece(HOSTILE, HOSTILE, False)]),
        ]
    }
    (train_folder / PICTURES).write_text(json.dumps(document(found)))
    page = vivace.report(train_folder).read_text(encoding="utf-8")
    tags = Tags(page)
    assert {tag for tag, _ in tags.found}.isdisjoint({"script", "img", "link", "iframe", "object"})
    assert not [key for _, attributes in tags.found for key in attributes if key.startswith("on")]
    addresses = [attributes["href"] for _, attributes in tags.found if "href" in attributes]
    assert [address[:22] for address in addresses] == ["data:image/png;base64,"]
    assert tags.text.count("<script>alert(1)</script>") >= 7
    assert not {"\x1b", "\x00", "\u202e"} & set(page)
    assert "\N{SYMBOL FOR ESCAPE}[2J\N{SYMBOL FOR NULL}" in tags.text


def test_a_picture_of_another_origin_is_no_markup(train_folder):
    """A crafted file cannot bring an address, only pixels."""
    crafted = {
        "kind": "image",
        "title": "a",
        "png": "x",
        "href": "https://a.b/c",
        "shape": [1, 1],
        "boxes": [],
    }
    (train_folder / PICTURES).write_text(json.dumps({"headings": [{"heading": "h", "pictures": [crafted]}]}))
    assert "a.b/c" not in vivace.report(train_folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ["{torn", "[]", '"text"', ""])
def test_a_torn_file_draws_nothing(content, train_folder):
    (train_folder / PICTURES).write_text(content)
    assert "Predictions" not in vivace.report(train_folder).read_text(encoding="utf-8")


def test_the_pixels_are_those_given():
    pixels = numpy.random.default_rng(0).integers(0, 256, (5, 7, 3), numpy.uint8)
    read = PIL.Image.open(io.BytesIO(pictures.png(Image("a", pixels))))
    read.load()
    assert read.mode == "RGB"
    assert numpy.array_equal(numpy.asarray(read), pixels)


def test_a_matrix_shows_counts_and_the_share_that_is_right():
    tags = Tags(drawn(Counts("all", ["cat", "dog"], [[1200, 400], [0, 0]])))
    assert "1,200" in tags.text
    assert "75 %" in tags.text
    shares = [a["style"] for tag, a in tags.found if tag == "td" and "style" in a]
    assert shares == ["--share:75%", "--share:25%", "--share:0%", "--share:0%"]
    assert [a["scope"] for tag, a in tags.found if tag == "th"] == ["col", "col", "row", "row"]


def test_boxes_and_their_labels_stay_inside():
    boxes = [
        Box(-50, -50, 500, 500, "large", False),
        Box(90, 95, 99, 99, "corner"),
        Box(1, 1, 5, 5, "", True),
    ]
    tags = Tags(drawn(Image("a", numpy.zeros((100, 100)), boxes)))
    shapes = [attributes for tag, attributes in tags.found if tag == "rect"]
    assert [shape["class"] for shape in shapes] == ["wrong", "true", "right"]
    for shape in shapes:
        x, y, width, height = (float(shape[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= 100
        assert 0 <= y <= y + height <= 100
    labels = [attributes for tag, attributes in tags.found if tag == "text"]
    assert [label["text-anchor"] for label in labels] == ["start", "end"]
    assert all(0 < float(label["y"]) < 100 for label in labels)


def test_a_legend_says_which_colour_is_which():
    tags = Tags(drawn(Image("masks", numpy.zeros((4, 4)), legend={"cat": (255, 196, 0), "dog": (0, 1, 2)})))
    assert [a["style"] for tag, a in tags.found if tag == "i"] == [
        "background: rgb(255, 196, 0)",
        "background: rgb(0, 1, 2)",
    ]
    assert tags.text.index("masks") < tags.text.index("cat") < tags.text.index("dog")


def test_marks_say_whether_they_are_right():
    tags = Tags(
        drawn(Text("", ["a ", Piece("b", "PER", True), Piece("c", "LOC", False), Piece("d", "missed")]))
    )
    assert [a["class"] for tag, a in tags.found if tag == "mark"] == ["right", "wrong", "true"]
    assert "figcaption" not in [tag for tag, _ in tags.found]


def test_letters_that_steer_are_seen():
    assert pictures.visible("a\tb\n\x07\x7f\u202e\ud800\u3000") == "a\tb\n␇␡\ufffd\ufffd\u3000"
