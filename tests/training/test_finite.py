"""A training that diverges though its loss is bounded: its weights say so."""

import contextlib
import itertools
import re

import pytest
import torch

from vivace.errors import Diverged
from vivace.training.training import train


def bounded(model, batch):
    return 1 - torch.softmax(model(batch[0]), 1).gather(1, batch[1][:, None]).mean()


@pytest.fixture(params=["as they are", "zeros"])
def of(request, tiny):
    """``(learning rate) -> Job``, whose weights begin as they do, or all with zeros."""

    def model():
        found = tiny.build_model()
        for weight in found.parameters() if request.param == "zeros" else ():
            torch.nn.init.zeros_(weight)
        return found

    def made(rate):
        adam = lambda model: torch.optim.Adam(model.parameters(), lr=rate)  # noqa: E731
        return tiny.make(loss=bounded, model=model, epochs=20, scheduler=None, optimizer=adam)

    return made


def told(job, out):
    """The notices of a run that it diverges."""
    events = []
    with contextlib.suppress(Diverged):
        train(job, out=out, on_event=events.append)
    return [text for event in events if "it diverges" in (text := event.payload.get("text", ""))]


@pytest.mark.fault(27)
def test_weights_that_explode_behind_a_bounded_loss_are_told_and_stopped(tmp_path, of):
    assert not told(of(0.01), tmp_path / "well")
    assert not told(of(0.1), tmp_path / "fast")
    (notice,) = told(of(3.0), tmp_path / "badly")
    assert 2 <= int(re.search(r"at step (\d+) the weights .* no lower: it diverges", notice)[1]) <= 20
    with pytest.raises(Diverged, match=r"the weights have grown \S+ times .* at step (\d|1\d|20) "):
        train(of(1e4), out=tmp_path / "lost")


MASK = torch.full((2, 2), -torch.inf).triu(1)  # as attention takes it


class Masked(torch.nn.Module):
    """A model that holds a mask, frozen or as a buffer, and whose last layer gives NaN where it is to."""

    def __init__(self, inner, frozen=False, root=False):
        super().__init__()
        self.inner, self.root = inner, root
        if frozen:
            self.mask = torch.nn.Parameter(MASK.clone(), requires_grad=False)
        else:
            self.register_buffer("mask", MASK.clone())
        self.head = Root() if root else torch.nn.Identity()

    def forward(self, inputs):
        return self.head(self.inner(inputs))


class Root(torch.nn.Module):
    def forward(self, inputs):
        return (inputs - 1e3).sqrt()


def test_a_frozen_mask_of_minus_infinity_is_no_divergence(tmp_path, tiny):
    run = train(tiny.make(model=lambda: Masked(tiny.build_model(), frozen=True)), out=tmp_path / "run")
    assert run.steps == 15
    assert (tmp_path / "run" / "checkpoints" / "step_15").is_dir()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_mask_is_not_where_numbers_are_lost(tmp_path, tiny, frozen):
    job = tiny.make(model=lambda: Masked(tiny.build_model(), frozen, root=True))
    with pytest.raises(Diverged, match=r"leave the module 'head' \(Root\)"):
        train(job, out=tmp_path / "run")


def test_sparse_gradients_are_looked_at_as_others_are(tmp_path, tiny):
    """Of what ended in NaN once, every number is looked at: of an embedding's few rows too."""

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(3, 3, sparse=True)

        def forward(self, inputs):
            return self.words(inputs[:, 0].long() % 3)

    def loss(model, batch):
        return tiny.loss(model, batch) * (float("nan") if next(calls) == 4 else 1.0)

    calls = itertools.count()
    descent = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    run = train(tiny.make(model=Words, loss=loss, optimizer=descent), out=tmp_path / "run")
    assert run.steps == 15
    assert "back to the beginning" in run.notices[0]
