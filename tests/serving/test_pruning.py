"""A narrower model of a run: which layers lose channels, and that it is the same one in every process."""

import dataclasses

import pytest
import torch

from vivace.errors import JobError, Refused
from vivace.job import load
from vivace.serving import pruning
from vivace.serving.pruning import pruned
from vivace.serving.quantizing import quantization_aware


def test_half_of_the_channels_go_and_the_outputs_keep_their_shapes(trained):
    reference, run = trained("wide")
    narrow = pruned(reference, run=run, keep=0.7)
    model = narrow.model()
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (model.first.out_channels, model.norm.num_features, model.second.out_channels) == (64, 64, 64)
    assert (model.label.out_features, model.size.out_features) == (3, 2)
    found = model(torch.zeros(5, 1, 6, 6))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"label": (5, 3), "size": (5, 2)}


def test_what_is_left_are_the_runs_own_weights_each_time(trained):
    reference, run = trained("wide")
    one, other = (pruned(reference, run=run, keep=0.7).model().state_dict() for _ in range(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    whole = torch.load(run / "model.pt", weights_only=True)["norm.weight"]
    assert set(one["norm.weight"].tolist()) <= set(whole.tolist())


def test_what_the_jobs_model_keeps_frozen_stays_so(trained):
    reference, run = trained("wide")
    whole = load(reference)

    def frozen():
        model = whole.model()
        model.first.requires_grad_(False)
        return model

    job = dataclasses.replace(whole, model=frozen)
    for narrow in (pruned(job, run=run, keep=0.7), quantization_aware(job, run=run)):
        still = {name for name, tensor in narrow.model().named_parameters() if not tensor.requires_grad}
        assert still == {"first.weight", "first.bias"}


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(36, 96), torch.nn.Linear(96, 96)
        self.third, self.last = torch.nn.Linear(96, 96), torch.nn.Linear(96, 3)
        self.third.weight = self.second.weight

    def forward(self, images):
        return self.last(torch.relu(self.third(torch.relu(self.second(self.first(images.flatten(1)))))))


def test_weights_that_are_tied_are_not_parted(trained, monkeypatch):
    reference, run = trained("job")
    monkeypatch.setattr(pruning, "load_trained", lambda job, run: (Tied().eval(), None))
    with pytest.raises(Refused, match=r"'second.weight' and 'third.weight' are one tensor"):
        pruned(reference, run=run, keep=0.5).model()


def test_a_model_without_channels_to_spare_is_refused(trained):
    reference, run = trained("job")
    with pytest.raises(Refused, match="no layer has 32 channels to spare"):
        pruned(reference, run=run, keep=0.5).model()
    with pytest.raises(JobError, match="share between 0 and 1"):
        pruned(reference, run=run, keep=1.5)
