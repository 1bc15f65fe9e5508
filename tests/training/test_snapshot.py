"""What is noted before a step is what is put back, whatever the step moved."""

import random

import pytest
import torch
from torch import nn

import vivace
from vivace.tensors.randomness import FIRST_STEPS
from vivace.training.snapshot import Snapshot


class Counting(nn.Module):
    """Has no buffer before its first call, and counts the calls in one afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x):
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros(()))
        self.calls += 1
        return self.linear(x)


def opened(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return vivace.attach(
        vivace.Plan(), model=model, optimizer=optimizer, loss=lambda m, batch: m(batch).mean()
    )


def test_a_buffer_that_a_step_registers_is_put_back_or_gone():
    model = Counting()
    with opened(model) as session:
        snapshot = Snapshot(session)
        snapshot.take()
        session.step(torch.ones(3, 2))
        assert snapshot.put_back() == ""
        assert not list(model.buffers())
        for calls in (1, 2, 3):
            session.step(torch.ones(3, 2))
            snapshot.take()
            session.step(torch.ones(3, 2))
            assert snapshot.put_back() == ""
            assert float(model.calls) == calls


@pytest.mark.parametrize("early", [True, False])
def test_streams_are_put_back_and_a_first_move_that_was_not_noted_is_told(early):
    with opened(nn.Linear(2, 1)) as session:
        snapshot = Snapshot(session)
        for _ in range(1 if early else FIRST_STEPS + 1):
            snapshot.take()
        if not early:
            snapshot.streams._due = float("inf")
            snapshot.take()
        expected = torch.random.get_rng_state(), random.getstate()
        torch.rand(1)
        assert snapshot.put_back() == ""
        assert torch.equal(torch.random.get_rng_state(), expected[0])
        snapshot.take()
        random.random()
        told = snapshot.put_back()
        assert (told == "") == early
        assert (random.getstate() == expected[1]) == early
