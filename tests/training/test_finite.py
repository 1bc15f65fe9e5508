"""A training that diverges though its loss is bounded: its weights say so."""

import contextlib
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
