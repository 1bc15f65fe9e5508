"""What recipes show: the right samples, the right marks."""

import weakref

import numpy
import pytest
import torch

from vivace.pictures import Piece
from vivace.recipes import showing
from vivace.recipes.sources.characters import Vocabulary


class Said(torch.nn.Module):
    """A model that says what it is given."""

    def forward(self, given):
        return given


def test_confusion_surest_and_least_believed():
    logits = torch.tensor([[4.0, 0.0], [1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 0.1]])
    labels = torch.tensor([0, 0, 1, 1, 0])
    found = showing.classified(
        Said(), [(logits[:3], labels[:3]), (logits[3:], labels[3:])], ("a", "b"), lambda title, sample: title
    )
    assert found["Confusion"][0].counts == ((2, 1), (1, 1))
    assert found["Surest, and right"] == ["a, 98 %", "b, 88 %"]
    assert found["Least believed, and wrong"] == ["says a, 95 %; it is b", "says b, 52 %; it is a"]


def test_more_classes_than_fit_have_no_matrix():
    names = tuple(map(str, range(50)))
    found = showing.classified(Said(), [(torch.eye(50), torch.arange(50))], names, lambda title, _: title)
    assert "Confusion" not in found
    assert len(found["Surest, and right"]) == showing.SHOWN


def batches_of(number, alive):
    """A batch for each class, of two samples of it; `alive` gets a weak reference to the memory of each."""
    for label in range(number):
        memory = numpy.zeros((2, number), numpy.float32)
        memory[:, label] = (20 + label) / 4
        alive.append(weakref.ref(memory))
        yield torch.from_numpy(memory), torch.tensor([label, (label + 1) % number])


def test_what_is_shown_keeps_no_batch_of_which_it_is_a_part():
    alive, living = [], []

    def draw(title, sample):
        living.append(sum(memory() is not None for memory in alive))
        return title

    found = showing.classified(Said(), batches_of(20, alive), tuple("abcdefghijklmnopqrst"), draw)
    assert "".join(title[0] for title in found["Surest, and right"]) == "tsrqpo"
    assert len(found["Least believed, and wrong"]) == showing.SHOWN
    assert max(living) <= 1  # the last one is still in the loop
    living.clear()
    samples = (
        showing.Sample(float(label), draw, ("", row))
        for rows, labels in batches_of(20, alive)
        for row, label in zip(rows, labels, strict=True)
    )
    showing.extremes(samples)
    assert max(living) <= 1


@pytest.mark.parametrize("count", [3, 40])
def test_no_sample_is_both_best_and_worst(count):
    samples = [showing.Sample(score % 7 + score / 100, str, (score,)) for score in range(count)]
    best, worst = showing.extremes(samples)
    assert not set(best) & set(worst)
    assert len(best) == min(count, showing.SHOWN)
    assert best[0] == str(max(samples, key=lambda one: one.score).things[0])
    if count > 2 * showing.SHOWN:
        assert worst[0] == "0"


def test_pixels_are_confused_by_class_and_ignored_ones_are_not():
    logits = torch.zeros(1, 2, 40, 50)
    logits[:, 1, :, :25] = 1.0
    true = torch.zeros(1, 40, 50, dtype=torch.int64)
    true[:, :20] = 1
    true[:, :, :5] = 255
    images = torch.rand(1, 3, 40, 50)
    found = showing.segmented(lambda _: logits, [(images, true)], ("no", "yes"))
    assert found["Confusion"][0].counts == ((0, 0), (0, 0))  # in thousands: 500 and 400 each, rounded
    heading = next(name for name in found if name.startswith("Best"))
    (panel,) = found[heading]
    assert panel.packed.array.shape[1] == 3 * 50 + 2
    assert panel.legend == {"yes": tuple(showing.COLOURS[1])}
    plain, said = panel.packed.array[:, :50], panel.packed.array[:, -50:]
    assert (plain[:, 25:] == said[:, 25:]).all()
    assert (plain[:, :25] != said[:, :25]).any()


def test_each_class_has_a_colour_of_its_own_and_what_does_not_count_has_none():
    names = tuple(map(str, range(21)))
    true = torch.full((4, 21), 255)
    true[0] = torch.arange(21)
    panel = showing.panels("", torch.full((3, 4, 21), 0.5), true, torch.zeros_like(true), names)
    plain, told = panel.packed.array[:, :21], panel.packed.array[:, 22:43]
    assert (told[1:] == plain[1:]).all()
    assert len({tuple(pixel) for pixel in told[0].tolist()}) == 21
    assert len(set(panel.legend.values())) == len(panel.legend) == 20


def found(boxes, labels):
    return showing.Found(torch.tensor(boxes), torch.ones(len(labels)), torch.tensor(labels))


def test_a_true_box_is_met_once():
    true = found([[0.0, 0, 10, 10], [20.0, 20, 30, 30]], [1, 2])
    guess = found([[0.0, 0, 10, 9], [1.0, 0, 10, 10], [20.0, 20, 30, 30]], [1, 1, 0])
    right, met = showing.matched(true, guess)
    assert right == [True, False, False]  # met already; of another class
    assert met == [True, False]
    image = showing.outlined(torch.rand(3, 40, 40), true, guess, right, met, ("a", "b", "c"))
    assert image.title == "1 of 2 found, 2 wrong"
    assert [(box.label, box.correct) for box in image.boxes] == [
        ("", None),
        ("c", None),
        ("b", True),
        ("b", False),
        ("a", False),
    ]


def test_an_image_without_boxes_in_which_nothing_is_found_is_not_among_the_worst():
    nothing, box = (torch.zeros(0, 4), torch.zeros(0)), (torch.tensor([[0.0, 0, 10, 10]]), torch.ones(1))
    true = [nothing, *[box] * (2 * showing.SHOWN)]

    def found_in(images):
        there = [box if place > showing.SHOWN else nothing for place in range(len(images))]
        return [{"boxes": b, "scores": torch.ones(len(b)), "labels": k.long()} for b, k in there]

    images = torch.rand(len(true), 3, 40, 40)
    batch = (images, [boxes for boxes, _ in true], [kinds.long() for _, kinds in true])
    _, worst = showing.detected([batch], found_in, ("a", "b")).values()
    assert [picture.title for picture in worst] == ["0 of 1 found, 0 wrong"] * showing.SHOWN


def test_overlap_is_intersection_over_union():
    assert showing.overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert showing.overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-PER I-PER O", {(1, 3): "PER"}),
        ("B-PER B-PER I-LOC", {(0, 1): "PER", (1, 2): "PER"}),  # what begins with I is no entity
        ("B-LOC", {(0, 1): "LOC"}),
        ("O O", {}),
        ("B-ORG I-ORG B-ORG I-ORG", {(0, 2): "ORG", (2, 4): "ORG"}),
    ],
)
def test_spans_of_tags(tags, expected):
    assert showing.spans(tags.split()) == expected


def test_entities_are_right_wrong_or_missed():
    true = ["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "O", "B-ORG"]
    said = ["B-PER", "I-PER", "O", "B-LOC", "O", "O", "O"]
    assert showing.mistakes(true, said) == 3  # one wrong, two missed
    text = showing.tagged("abcdefg", true, said, "")
    assert text.title == "1 of 3 found, 1 wrong"
    assert [piece for piece in text.pieces if piece.text] == [
        Piece("ab", "PER", True),
        Piece("c"),
        Piece("d", "LOC; it is LOC de", False),
        Piece("ef"),
        Piece("g", "ORG missed"),
    ]


def test_a_text_goes_on_after_what_was_given():
    def after(tokens):
        return torch.nn.functional.one_hot((tokens + 1) % 10, 10) * 100.0

    further = showing.continued(after, torch.tensor([[1, 2, 3], [7, 8, 9]]), 4, 1.0)
    assert further.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_surprise_is_told_in_bits():
    logits = torch.zeros(1, 3, 256)
    bits = showing.likely(lambda _: logits, torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3).long())
    assert bits.tolist() == [[pytest.approx(8.0)] * 3]


def test_numbers_become_letters_again():
    known = Vocabulary(["aab", "bcc"])
    assert "".join(known.decode(known.encode("abcz"))) == "abc□"
    assert known.decode(torch.tensor([2, 0, 0])) == ["a"]
