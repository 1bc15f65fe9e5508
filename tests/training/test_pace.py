"""Stragglers, named with the part of a step in which they are slow, and a run that becomes slower."""

import itertools

import pytest
import torch

from vivace.tensors import denormals
from vivace.training.pace import Own, Pace
from vivace.training.training import train

TIMES = "\N{MULTIPLICATION SIGN}"


def test_the_slow_rank_and_its_part_are_named_once():
    pace = Pace()
    rows = [[0.1, 0.2], [1.9, 0.2], [0.1, 0.2]]
    assert pace.add(rows, 20, 2.5) == ""
    assert pace.add(rows, 20, 2.5) == (
        f"rank 1 is 7.00{TIMES} slower than the others, by its data: they wait "
        "for it 90.0 ms of a step's 125 ms"
    )
    assert pace.add(rows, 40, 5.0) == ""
    other = [[0.1, 0.2], [0.1, 0.2], [0.1, 4.2]]
    text = f"rank 2 is 14.3{TIMES} slower than the others, by its forward pass"
    assert pace.add(other, 40, 5.0).startswith(text)


def test_equal_ranks_and_small_differences_are_no_news():
    pace = Pace()
    assert pace.add([[1.0, 2.0], [1.1, 2.2]], 40, 6.0) == ""
    assert pace.add([[0.01, 0.02], [0.1, 0.02]], 40, 6.0) == ""  # twice as slow, in 2 % of a step


def test_own_seconds_are_those_of_data_and_forward_passes():
    own = Own()
    own.fetches()
    own.fetched()
    assert own.in_forward(lambda batch: batch + 1, 2) == 3
    data, forward = own.take()
    assert data > 0
    assert forward > 0
    assert own.take() == (0.0, 0.0)


@pytest.mark.parametrize("scale", [1.0, 1e-39])
def test_where_steps_have_become_slower_a_backward_pass_is_looked_at(
    tiny, tmp_path, monkeypatch, digest, scale
):
    def counting():
        model = tiny.build_model()
        model.register_buffer("steps", torch.zeros(()))
        return model

    def scaled(model, batch):
        model.steps += 1
        return (scale if model.steps > 3 else 1.0) * tiny.loss(model, batch)

    job = tiny.make(model=counting, loss=scaled)
    alone = train(job, out=tmp_path / "alone")
    note, doubled = denormals.SlowNumbers.note, (2.0**n for n in itertools.count())
    monkeypatch.setattr(denormals.SlowNumbers, "note", lambda self, _: note(self, next(doubled)))
    monkeypatch.setattr(denormals, "LOOKS", 1)
    monkeypatch.setattr(denormals, "times_slower", lambda: 1e9)
    seen = train(job, out=tmp_path / "seen")
    assert alone.notices == ()
    assert ["times as long as in the beginning" in notice for notice in seen.notices] == [True] * (scale < 1)
    assert digest(tmp_path / "alone" / "model.pt") == digest(tmp_path / "seen" / "model.pt")
