"""The parts of recipes' networks that compute something of their own."""

import itertools

import pytest
import torch

from vivace.recipes.networks import detector
from vivace.recipes.networks.chain import Chain
from vivace.recipes.networks.schedules import warm_cosine
from vivace.recipes.networks.segmenting import IGNORED, mean_iou
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


def one_hot(classes):
    return torch.nn.functional.one_hot(classes.clamp(max=1), 2).permute(0, 3, 1, 2).float()
