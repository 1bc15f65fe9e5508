"""Over random module trees: recomputed gradients are bit-equal, and what is chosen for a budget fits it."""

import copy
import re

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import vivace
from vivace.errors import AnswerIsNo
from vivace.mechanisms.blocks import find_blocks
from vivace.memory import costs
from vivace.memory.choosing import choose
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Numerics
from vivace.tuning.budget import parse_memory

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, SAMPLES = 8, 512
SMALLEST = re.compile(r"the smallest measured is ([\d.]+ \w+)")
SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck))


class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return x + self.inner(x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu_(self.inner(x))


def leaf(kind):
    return {
        "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
        "wide": lambda: [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)],
        "norm": lambda: [nn.BatchNorm1d(WIDTH)],
        "layer norm": lambda: [nn.LayerNorm(WIDTH)],
        "relu": lambda: [nn.ReLU(inplace=False)],
        "in place": lambda: [InPlace()],
        "dropout": lambda: [nn.Dropout(0.4)],
    }[kind]()


leaves = st.sampled_from(("linear", "wide", "norm", "layer norm", "relu", "in place", "dropout"))
blocks = st.lists(leaves, min_size=1, max_size=3)


@st.composite
def trees(draw):
    """A model of residual blocks, some of them alike, some in stages, between an input and a head."""
    kinds = draw(st.lists(blocks, min_size=1, max_size=2))
    stages = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, max_size=4))
        stages.append([kinds[number] for number in chosen])

    def build():
        torch.manual_seed(0)
        parts = [
            nn.Sequential(*(Residual(*(m for k in kind for m in leaf(k))) for kind in stage))
            for stage in stages
        ]
        return nn.Sequential(nn.Linear(3, WIDTH), *parts, nn.Linear(WIDTH, 4))

    return build


BATCH = (torch.linspace(-2, 2, 3 * SAMPLES).view(SAMPLES, 3), torch.arange(SAMPLES) % 4)


def job(build):
    return vivace.Job(
        model=build,
        data=lambda: [BATCH] * 2,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )


def trained(build, plan):
    with start(job(build), Plan.from_dict(plan), vivace.inspect()) as session:
        losses = [session.step(BATCH) for _ in range(2)]
    return {**copy.deepcopy(session.model.state_dict()), "losses": torch.stack(losses)}


@given(trees(), st.data())
@settings(SLOW, max_examples=40)
def test_no_bit_differs_whatever_is_recomputed(build, data):
    names = [block.name for block in find_blocks([build()])]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    cheap = data.draw(st.lists(st.sampled_from(chosen), unique=True))
    seen = trained(build, {"checkpoint": {"blocks": chosen, "cheap": cheap}})
    wanted = trained(build, {})
    assert [name for name in wanted if not torch.equal(seen[name], wanted[name])] == []


@given(trees(), st.floats(0.05, 1.1))
@settings(SLOW, max_examples=8)
def test_what_is_chosen_fits_and_what_cannot_fit_is_refused_with_the_smallest(build, share):
    quick = pytest.MonkeyPatch()
    quick.setattr(costs, "MOST", costs.FEWEST)
    machine = vivace.inspect()
    with start(job(build), Plan(), machine) as session:
        whole = observe(session, [BATCH] * 2).peak_bytes
    budget = int(share * whole)
    assume(find_blocks([build()]))
    try:
        found = choose(job(build), machine, budget, Numerics.EXACT)
    except AnswerIsNo as no:
        smallest = parse_memory(SMALLEST.search(str(no))[1].replace(" ", ""))
        assert budget < 1.006 * smallest  # which is rounded to three digits
        assert smallest <= 1.006 * whole
        return
    finally:
        quick.undo()
    assert found.peak_bytes <= budget
    with start(job(build), found.plan, machine) as session:
        assert observe(session, [BATCH] * 2).peak_bytes <= budget
