"""A plan's session goes on from a checkpoint in a file: what that does not hold is lost, as in a run."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Seam, Stage
from vivace.errors import CheckpointError
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import jobs
from vivace.verifying.resumed import resume
from vivace.verifying.ruler import Ruler

MACHINE = vivace.inspect()


class Unnamed:
    """What a file of numbers, texts and tensors cannot hold, though memory can."""


class Counting:
    """Steps, and what a technique likes to keep beside them."""

    def __init__(self, beside):
        self.steps, self.beside = 0, beside

    def state_dict(self):
        return {"steps": self.steps, "beside": self.beside}

    def load_state_dict(self, state):
        self.steps, self.beside = state["steps"], state["beside"]


def counting(beside):
    """Changes nothing, and keeps how many steps it has seen."""

    def act(build):
        count = Counting(beside)
        build.keep(count)

        def update(following):
            count.steps += 1
            following()

        build.wrap(Seam.UPDATE, update)

    return act


class Drifting(nn.Module):
    """A model that counts its forward passes in a buffer which it does not save, and trains by that."""

    def __init__(self, odd):
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("passes", torch.zeros(()), persistent=False)
        self.odd = odd

    def forward(self, inputs):
        if self.training:
            self.passes += 1.0
        return self.inner(inputs) * (1.0 + 0.1 * self.passes)

    def get_extra_state(self):
        return Unnamed() if self.odd else None

    def set_extra_state(self, state):
        pass


def drifting(odd=False):
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 8, generator=numbers), torch.randint(4, (40,), generator=numbers))
    return dataclasses.replace(
        jobs.mlp(),
        model=lambda: Drifting(odd),
        data=lambda: DataLoader(data, batch_size=16),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    )


def judged(job, plan):
    ruler = Ruler(job, MACHINE.to_dict())
    ruler.prepare(20.0)
    return ruler.judge(plan)


@pytest.mark.parametrize(("beside", "kept"), [(torch.ones(2), True), (Unnamed(), False)])
def test_what_a_technique_keeps_must_fit_into_a_checkpoint(beside, kept, planted):
    verdict = judged(jobs.mlp(), planted(counting(beside), Stage.OPTIMIZER))
    assert verdict["kept"] is kept, verdict["reason"]
    assert ("it cannot be resumed: " in verdict["reason"]) is not kept


@pytest.mark.parametrize("odd", [False, True])
def test_what_the_job_itself_does_not_save_is_no_fault_of_a_plan(odd):
    verdict = judged(drifting(odd), {"fused_optimizer": {}})
    assert verdict["kept"], verdict["reason"]


def test_a_resumed_session_holds_what_the_file_does():
    with start(drifting(), Plan(), MACHINE) as session, start(drifting(), Plan(), MACHINE) as plain:
        (batch,) = [next(iter(drifting().data()))]
        session.step(batch)
        weight, passes = session.build.model.inner.weight, session.build.model.passes
        alone = resume(session, lambda: start(drifting(), Plan(), MACHINE))
        assert torch.equal(alone.build.model.inner.weight, weight)
        assert float(alone.build.model.passes) == 0.0
        lent = resume(session, lambda: start(drifting(), Plan(), MACHINE), plain)
        assert float(lent.build.model.passes) == float(passes) == 1.0
        momenta = [state["exp_avg"] for one in (session, lent) for state in one.optimizer.state.values()]
        assert torch.equal(momenta[0], momenta[len(momenta) // 2])


def test_what_cannot_be_stored_by_the_job_alone_is_said():
    with start(drifting(odd=True), Plan(), MACHINE) as session, pytest.raises(CheckpointError):
        resume(session, lambda: start(drifting(), Plan(), MACHINE))
