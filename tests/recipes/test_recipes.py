"""Each recipe trains: its loss falls on a batch, its metric is a number of what does not train."""

import math
import sys

import pytest
import torch

from vivace.errors import InputError
from vivace.job import load
from vivace.pictures import document
from vivace.recipes import RECIPES, classification, detection, segmentation, similarity
from vivace.recipes.sources import wordnet

SMALL = {
    "photographs": "width=8,depth=1",
    "digits": "width=8,depth=1",
    "keras_cnn": "width=4",
    "classification": "width=8",
    "detection": "width=8",
    "segmentation": "width=4,depth=2",
    "brain_tissue": "width=4,depth=2",
    "text_classification": "width=32,depth=1",
    "entities": "width=32",
    "language_model": "width=32,depth=1",
    "similarity": "width=32",
}
OTHERS = {"detection,network=ssdlite": 2}  # and how many samples are enough


@pytest.fixture
def small(shapes, monkeypatch):
    """Few scenes, and a WordNet of the words that people rated."""
    for module in (classification, detection, segmentation):
        monkeypatch.setattr(module, "SCENES", 128)
        monkeypatch.setattr(module, "VALIDATED", 8)
    pairs = wordnet.rated("simlex")
    made = tuple(wordnet.Synset((a, b), f"what is {a} and as {b} as {a}") for a, b, _ in pairs)
    monkeypatch.setattr(wordnet, "synsets", lambda: made)
    monkeypatch.setattr(similarity, "LEAST", 1)
    kept = (similarity.vocabulary, similarity.meanings)
    for one in kept:
        one.cache_clear()
    yield
    for one in kept:
        one.cache_clear()


def test_every_recipe_is_tried_here():
    assert set(SMALL) == set(RECIPES)


@pytest.mark.parametrize("name", [*SMALL, *OTHERS])
def test_a_recipe_trains(name, small):
    torch.manual_seed(0)
    job = load(",".join(filter(None, (name, SMALL.get(name), "epochs=1"))))
    model = job.model()
    batch = next(iter(job.data()))
    if name in OTHERS:
        batch = [part[: OTHERS[name]] for part in batch]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(7):
        loss = job.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < losses[0]
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    with torch.no_grad():
        metric = job.metric(model, [next(iter(job.validation()))])
        shown = document(job.pictures(model, [next(iter(job.validation()))]))
    assert math.isfinite(metric)
    assert any(heading["pictures"] for heading in shown["headings"])
    assert job.metric_name == RECIPES[name.partition(",")[0]].metric
    assert job.optimizer(model).param_groups
    assert job.scheduler is None or job.scheduler(job.optimizer(model))


def test_ssdlite_has_one_size():
    with pytest.raises(InputError, match="width=8,depth=1 are of network=fcos"):
        load("detection,network=ssdlite,width=8")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("segmentation", "torchmetrics"),
        ("brain_tissue", "torchmetrics"),
        ("similarity", "torchmetrics"),
        ("detection", "faster_coco_eval"),
        ("entities", "seqeval"),
    ],
)
def test_what_a_metric_needs_is_asked_for_before_the_training(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"'{module}': pip install 'vivace\[tasks\]'"):
        load(name)


@pytest.mark.parametrize("name", SMALL)
def test_a_network_without_a_size_is_refused(name):
    with pytest.raises(InputError, match=r"width must be .*, not 0"):
        load(f"{name},width=0")
    with pytest.raises(InputError, match=r"depth must be .*, not -1"):
        load(f"{name},depth=-1")


@pytest.mark.parametrize("name", ["detection", "entities", "keras_cnn", "brain_tissue"])
def test_a_network_that_needs_a_level_is_not_built_without(name):
    with pytest.raises(InputError, match=r"depth must be .*1.*, not 0"):
        load(f"{name},depth=0")


def test_what_trains_on_wordnet_is_read_once(small):
    job = load("similarity,width=32")
    assert job.data().dataset is job.data().dataset


@pytest.mark.parametrize("name", SMALL)
def test_losses_are_means_over_the_batch(name, small):
    """Halves of a batch, of which a plan may make steps, weigh the same."""
    torch.manual_seed(0)
    job = load(f"{name},{SMALL[name]}")
    model = job.model().eval()
    batch = next(iter(job.data()))
    half = len(batch[0]) // 2
    with torch.no_grad():
        whole = job.loss(model, batch)
        parts = [job.loss(model, [t[place] for t in batch]) for place in (slice(half), slice(half, None))]
    assert sum(parts).item() / 2 == pytest.approx(whole.item(), rel=1e-4)
