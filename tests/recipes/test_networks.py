"""The parts of recipes' networks that compute something of their own."""

import itertools
import math

import pytest
import torch

from vivace.recipes import entities, language_model, similarity
from vivace.recipes.networks import detector
from vivace.recipes.networks.chain import Chain
from vivace.recipes.networks.schedules import warm_cosine
from vivace.recipes.networks.segmenting import IGNORED, loss, mean_iou
from vivace.recipes.networks.transformer import Transformer


@pytest.fixture
def chain():
    torch.manual_seed(0)
    found = Chain(3)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    return found.requires_grad_(False)


def scored(chain, scores, tags):
    """The score of one sequence, written out."""
    total = chain.first[tags[0]] + chain.last[tags[-1]] + sum(s[t] for s, t in zip(scores, tags, strict=True))
    return float(total + sum(chain.steps[a, b] for a, b in itertools.pairwise(tags)))


@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_chain_sums_and_searches_all_sequences(chain, length):
    scores = torch.randn(2, 4, 3)
    there = torch.arange(4) < torch.tensor([[4], [length]])
    short = scores[1, :length]
    every = {tags: scored(chain, short, tags) for tags in itertools.product(range(3), repeat=length)}
    total = torch.tensor(list(every.values())).logsumexp(0)
    tags = next(iter(every))
    row = torch.zeros(2, 4, dtype=torch.int64)
    row[1, :length] = torch.tensor(tags)
    assert chain.surprise(scores, row, there)[1].item() == pytest.approx(float(total) - every[tags], abs=1e-4)
    best = chain.best(scores, there)
    assert tuple(best[1, :length].tolist()) == max(every, key=every.get)


def test_padding_changes_no_hidden_state():
    torch.manual_seed(0)
    network = Transformer(20, 8, 32, 2, causal=False).eval()
    tokens = torch.tensor([[3, 4, 5, 0, 0]])
    alone = network(tokens[:, :3])
    assert torch.allclose(network(tokens)[:, :3], alone, atol=1e-5)


def test_a_causal_network_sees_no_later_token():
    torch.manual_seed(0)
    network = Transformer(20, 8, 32, 2, causal=True).eval()
    tokens = torch.tensor([[3, 4, 5, 6], [3, 4, 9, 9]])
    first, second = network(tokens)
    assert torch.allclose(first[:2], second[:2], atol=1e-6)
    assert not torch.allclose(first[2:], second[2:], atol=1e-3)


def test_the_schedule_warms_up_and_ends_near_zero():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warm_cosine(100)(optimizer)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) == pytest.approx(10, abs=1)
    assert rates[-1] == pytest.approx(0.01, abs=0.01)


class Told(torch.nn.Module):
    """A detector that knows the truth."""

    def __init__(self, boxes, labels):
        super().__init__()
        self.boxes, self.labels = boxes, labels

    def forward(self, images):
        logits = torch.full((*self.boxes.shape[:2], 2), -9.0)
        logits.scatter_(2, self.labels.clamp(min=0).unsqueeze(2), 9.0)
        logits[self.labels < 0] = -9.0
        return logits, self.boxes


BOXES = torch.tensor([[[4.0, 4.0, 28.0, 30.0], [30.0, 8.0, 60.0, 44.0]], [[8.0, 8.0, 40.0, 40.0], [0.0] * 4]])
LABELS = torch.tensor([[0, 1], [1, -1]])


def test_true_boxes_score_one_and_moved_ones_less():
    images = torch.zeros(2, 3, 64, 64)
    score = detector.mean_average_precision
    assert score(Told(BOXES, LABELS), [(images, BOXES, LABELS)]) == pytest.approx(1.0)
    assert score(Told(BOXES + 6, LABELS), [(images, BOXES, LABELS)]) < 0.5


def test_a_box_that_is_half_right_scores_at_the_thresholds_below():
    truth = torch.tensor([[[0.0, 0.0, 50.0, 50.0]]])
    told = torch.tensor([[[0.0, 0.0, 50.0, 36.0]]])  # 0.72 in common: right at 0.5, 0.55 to 0.7, of ten
    label = torch.tensor([[1]])
    batch = (torch.zeros(1, 3, 64, 64), truth, label)
    assert detector.mean_average_precision(Told(told, label), [batch]) == pytest.approx(0.5)
    assert detector.mean_average_precision(Told(told, label * 0), [batch]) == 0.0
    assert detector.mean_average_precision(Told(told, label * 0 - 1), [batch]) == 0.0


def test_places_at_a_boxs_middle_answer_for_it_the_smallest_of_several():
    here = detector.places(torch.zeros(1, 1, 8, 8))
    inner = torch.tensor([[[0.0, 0.0, 64.0, 64.0], [24.0, 24.0, 40.0, 40.0]]])
    which, answers = detector.answering(here, inner, torch.tensor([[0, 1]]))
    assert set(which[answers].tolist()) == {1}
    assert (here[answers[0]] - 32).abs().max() <= detector.STRIDE
    _, none = detector.answering(here, inner, torch.tensor([[-1, -1]]))
    assert not none.any()


def test_a_detector_learns_one_scene():
    torch.manual_seed(0)
    network = detector.Detector(2, 8, 1)
    batch = (torch.randn(2, 3, 64, 64), BOXES, LABELS)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    losses = []
    for _ in range(40):
        loss = detector.loss(network, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_loss_of_an_image_without_boxes_is_finite_and_of_classes_alone():
    torch.manual_seed(0)
    network = detector.Detector(2, 8, 1)
    loss = detector.loss(network, (torch.randn(1, 3, 64, 64), torch.zeros(1, 2, 4), torch.full((1, 2), -1)))
    loss.backward()
    assert loss.isfinite()
    assert float(network.sides[-1].weight.grad.abs().max()) == 0.0


def test_intersection_over_union_leaves_out_what_is_ignored():
    truth = torch.tensor([[[0, 0, 1, 1], [0, 1, 1, IGNORED]]])
    guess = truth.clone()
    guess[0, 1, 3] = 0
    assert mean_iou(lambda _: one_hot(guess), [(None, truth)]) == pytest.approx(1.0)
    guess[0, 0, 0] = 1
    assert mean_iou(lambda _: one_hot(guess), [(None, truth)]) == pytest.approx((2 / 3 + 4 / 5) / 2)
    halves = [(place, truth[..., place]) for place in (slice(0, 1), slice(1, 4))]
    pieces = mean_iou(lambda place: one_hot(guess)[..., place], halves)
    assert pieces == pytest.approx((2 / 3 + 4 / 5) / 2)  # over all images together
    three = mean_iou(lambda _: torch.nn.functional.pad(one_hot(guess), [0] * 5 + [1]), [(None, truth)])
    assert three == pytest.approx((2 / 3 + 4 / 5) / 2)  # a class that is nowhere does not count


def test_a_batch_of_masks_in_two_parts_has_the_loss_of_the_whole():
    torch.manual_seed(0)
    logits, truth = torch.randn(4, 3, 10, 10), torch.randint(3, (4, 10, 10))
    plain = torch.nn.functional.cross_entropy(logits, truth)
    assert float(loss(lambda place: logits[place], (slice(0, 4), truth))) == pytest.approx(float(plain))
    truth.flatten(1)[:2, :5] = IGNORED  # 5 % and 50 %
    truth.flatten(1)[2:, :50] = IGNORED
    whole, first, second = (
        float(loss(lambda place: logits[place], (part, truth[part])))
        for part in (slice(0, 4), slice(0, 2), slice(2, 4))
    )
    assert whole == pytest.approx((first + second) / 2)
    truth[:] = IGNORED
    assert float(loss(lambda place: logits[place], (slice(0, 4), truth))) == 0.0


def test_bits_are_those_of_every_byte_whatever_the_batches():
    tokens = torch.arange(24).view(3, 8)
    logits = torch.zeros(3, 8, 256)
    logits[0, :, 1] = math.log(255)  # byte 1 by half
    following = torch.ones_like(tokens)
    whole = language_model.bits_per_byte(lambda rows: logits[rows[:, 0] // 8], [(tokens, following)])
    assert whole == pytest.approx(-(8 * 1 + 16 * 8) / 24)
    cut = [(tokens[:2], following[:2]), (tokens[2:], following[2:])]
    assert language_model.bits_per_byte(lambda rows: logits[rows[:, 0] // 8], cut) == pytest.approx(whole)


def test_equal_values_share_their_rank():
    assert similarity.ranks(torch.tensor([4.0, 1.0, 2.0, 2.0])).tolist() == pytest.approx([1, 0, 0.5, 0.5])


def test_likeness_is_compared_by_rank(monkeypatch):
    monkeypatch.setattr(similarity, "cosines", lambda _model, first, _second: first)
    batches = [
        (torch.tensor(said), None, torch.tensor(meant))
        for said, meant in (([1.0, 8.0], [1, 2]), ([9.0], [3]))
    ]
    assert similarity.spearman(None, batches) == pytest.approx(1.0, rel=1e-5)
    against = [(torch.tensor([5.0, 1.0, 3.0]), None, torch.tensor([1, 2, 3]))]
    assert similarity.spearman(None, against) == pytest.approx(-0.5, rel=1e-5)
    assert similarity.spearman(None, [(torch.ones(3), None, torch.tensor([1, 2, 3]))]) == 0.0


def test_entities_count_whole_and_once(monkeypatch):
    tags = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    monkeypatch.setattr(entities, "names", lambda _: tags)
    truth = torch.tensor([[1, 2, 0, 3], [1, 1, 0, 0]])
    guess = torch.tensor([[1, 2, 0, 1], [1, 2, 4, 3]])  # one right; a wrong kind; two as one; none; padding
    tokens = torch.tensor([[5, 5, 5, 5], [5, 5, 5, 0]])
    score = entities.Score("peoples_daily")
    assert score(lambda _: guess, [(tokens, truth)]) == pytest.approx(2 * 1 / (4 + 3))
    assert score(lambda _: truth, [(tokens, truth)]) == 1.0
    assert score(lambda _: truth * 0, [(tokens, truth * 0)]) == 0.0


def one_hot(classes):
    return torch.nn.functional.one_hot(classes.clamp(max=1), 2).permute(0, 3, 1, 2).float()
