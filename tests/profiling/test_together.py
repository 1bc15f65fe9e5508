"""What several ranks bring: the law's arithmetic, its answer, and a launch that measures it."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest

import vivace
from vivace.errors import InputError
from vivace.plan import Plan
from vivace.profiling.answering import answer
from vivace.profiling.law import Law, link_of
from vivace.profiling.page import render

SCENE = Path(__file__).parent / "scenes" / "linked_hosts.py"
LAW = Law(
    ranks=2,
    samples=64,
    compute={1: 0.100, 2: 0.052, 4: 0.028, 8: 0.016},
    stepping=0.054,
    looping=0.055,
    reading=0.001,
    waited=0.001,
    num_bytes=10_000_000,
    messages=2,
    latency=1e-3,
    rate=2e9,
)


def test_the_ring_takes_its_hops_and_its_bytes():
    assert LAW.exchange(1) == 0.0
    assert LAW.exchange(2) == pytest.approx(2 * 2 * 1e-3 + 1.0 * 10e6 / 2e9)
    assert LAW.exchange(8) == pytest.approx(14 * 2 * 1e-3 + 1.75 * 10e6 / 2e9)


def test_a_link_gives_back_the_exchange_it_was_made_of():
    small, whole = 2 * 7 * 1e-4, 3 * 2 * 7 * 1e-4 + 2 * 7 / 8 * 5e6 / 1e9
    assert link_of(8, small, whole, 3, 5_000_000) == (pytest.approx(1e-4), pytest.approx(1e9))


def test_what_is_hidden_shrinks_with_the_backward_pass():
    """9 ms of exchange cost 2 ms here: 7 ms are hidden, and half the compute hides half of that."""
    assert LAW.exposed == pytest.approx(0.002)
    assert LAW.exposed_on(2) == pytest.approx(0.002)
    assert LAW.exposed_on(4) == pytest.approx(LAW.exchange(4) - 0.007 * 28 / 52)
    assert LAW.exposed_on(1) == 0.0
    slow = dataclasses.replace(LAW, stepping=0.052 + 2 * LAW.exchange(2))
    assert slow.exposed_on(8) == pytest.approx(2 * LAW.exchange(8))


def test_a_loader_without_workers_is_waited_for_and_one_with_workers_where_it_is_slower():
    assert LAW.waiting_on(1, 0.1) == pytest.approx(0.002)
    beside = dataclasses.replace(LAW, reading=0.06, waited=0.005)
    assert beside.waiting_on(1, 0.1) == pytest.approx(0.02)
    assert beside.waiting_on(8, 0.02) == 0.0


def test_what_ran_is_told_as_it_ran_and_other_numbers_by_the_law():
    rows = {row["ranks"]: row for row in LAW.expected()}
    assert list(rows) == [1, 2, 4, 8]
    assert [row["measured"] for row in rows.values()] == [False, True, False, False]
    assert rows[2]["step_seconds"] == pytest.approx(0.055)
    assert rows[1]["speedup"] == 1.0
    assert rows[2]["speedup"] == pytest.approx(0.102 / 0.055)
    assert rows[4]["step_seconds"] == pytest.approx(0.028 + LAW.exposed_on(4) + 0.0005)
    for row in rows.values():
        assert sum(row["seconds"].values()) == pytest.approx(row["step_seconds"])
        assert row["samples_per_second"] == pytest.approx(64 / row["step_seconds"])
    assert LAW.predicted == pytest.approx(0.055)


def test_a_loop_that_is_faster_than_the_steps_alone_is_divided_as_they_were():
    """Both vary on a slow link: the exchange of one, taken from the other, left less than no compute."""
    slow = dataclasses.replace(LAW, stepping=0.5, looping=0.4)
    row = slow.on(2)
    assert row["step_seconds"] == pytest.approx(0.4)
    assert row["seconds"]["communication"] == pytest.approx(0.399 * 448 / 500)
    assert row["seconds"]["compute"] == pytest.approx(0.399 * 52 / 500)


@pytest.fixture
def document():
    rows = LAW.expected()
    return {
        "target": "job.py:job",
        "ranks": 2,
        "law": LAW.to_dict(),
        "expected": rows,
        "shares": {phase: spent / 0.055 for phase, spent in rows[1]["seconds"].items()},
        "step_seconds": rows[1]["step_seconds"],
        "samples_per_second": rows[1]["samples_per_second"],
        "plan_path": "p.toml",
        "page_path": "x/profile.html",
    }


def test_an_earlier_profile_that_names_no_plan_has_no_next_command(document):
    del document["plan_path"]
    assert answer(document).next == ()


def test_the_answer_says_what_ran_first_and_arithmetic_as_such(document):
    found = answer(document)
    assert (
        found.title == "1.85\N{MULTIPLICATION SIGN} as fast on 2 ranks as on one, with the same batch of 64"
    )
    assert [name for name, _ in found.parts] == ["4 ranks", "8 ranks"]
    assert all(text.endswith("by arithmetic") for _, text in found.parts)
    assert found.next == ("torchrun --nproc-per-node 2 -m vivace verify job.py:job --plan p.toml",)
    assert answer(document | {"target": "job"}).next == ("vivace.verify(job, 'p.toml')",)
    document["law"]["predicted"] = 0.08
    assert any("The law says 45" in note for note in answer(document).notes)


def test_the_page_holds_each_number_of_ranks(document):
    text = render(document)
    assert text.count("exchange by arithmetic") == 2
    assert "measured whole" in text
    assert "1.85\N{MULTIPLICATION SIGN}" in text


def test_a_command_is_profiled_before_torchrun(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="vivace profile -- torchrun"):
        vivace.profile(command=[sys.executable, "train.py"], out=tmp_path / "out")


BRIEFLY = """
from vivace.profiling.ranks_drive import Together

measure = Together.measure
Together.measure = lambda self, plan, strict, seconds: measure(self, plan, strict, 2.0)
"""


def perceptron(width, outputs, samples, batch_size):
    """A job's file, with which each part is timed for 2 s, and not for 16."""
    return f"""{BRIEFLY}
import torch, vivace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
samples = TensorDataset(torch.randn({samples}, 32), torch.arange({samples}) % 4)
job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(32, {width}), nn.ReLU(), nn.Linear({width}, {outputs})),
    data=lambda: DataLoader(samples, batch_size={batch_size}),
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


JOB = perceptron(256, 4, 256, 12)


@pytest.fixture
def launched(forked_torchrun):
    """``(options...) -> (document, what was told)`` of a profile of job.py on two ranks."""

    def launch(*more):
        code, output, errors = forked_torchrun(["profile", "job.py:job", *more, "--json"])
        assert code == 0, errors
        (document,) = [json.loads(line) for line in output.splitlines()]
        return document, errors

    return launch


@pytest.mark.slow
def test_a_launch_measures_the_law_and_speaks_once(launched, tmp_path):
    (tmp_path / "job.py").write_text(JOB.replace("256, 32", "252, 32").replace("arange(256)", "arange(252)"))
    document, told = launched()
    assert [row["ranks"] for row in document["expected"]] == [1, 2, 4]  # 12 cannot be shared by 8
    law = document["law"]
    assert law["num_bytes"] == 4 * (32 * 256 + 256 + 256 * 4 + 4)
    assert law["compute"]["1"] > 0
    assert law["rate"] > 1e6
    assert sum(document["shares"].values()) == pytest.approx(1.0)
    assert document["expected"][1]["step_seconds"] == pytest.approx(document["step_seconds"])
    assert (tmp_path / "runs" / "profile" / "profile.html").is_file()
    assert told.count("as fast on 2 ranks") == 1
    assert Plan.load(tmp_path / document["plan_path"]).names == ("ddp",)


BLOCKS = f"""{BRIEFLY}
import torch, vivace

torch.set_num_threads(1)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = torch.nn.Linear(32, 16), torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

job = vivace.Job(
    model=Net,
    data=lambda: torch.utils.data.DataLoader(torch.randn(96, 32), batch_size=12),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


@pytest.mark.slow
def test_of_divided_weights_each_block_is_gathered_twice_and_scattered_once(launched, tmp_path):
    (tmp_path / "job.py").write_text(BLOCKS)
    (tmp_path / "fsdp.toml").write_text("format = 1\n[techniques.fsdp]\n")
    document, told = launched("--plan", "fsdp.toml")
    first, block = 4 * (32 * 16 + 16), 4 * (2 * 16 * 24 + 24 + 16)
    assert document["law"]["num_bytes"] == first + 1.5 * 3 * block
    assert document["law"]["messages"] == 3 * 3 + 3
    assert document["plan"] == {"fsdp": {}}
    assert document["law"]["stepping"] > document["law"]["compute"]["2"]
    assert "2 ranks" in told


LINKED = perceptron(2000, 32, 64, 16)


@pytest.fixture(scope="module")
def linked(start_scene, tmp_path_factory):
    """``(megabits a second, milliseconds) -> document`` of a profile on two hosts with such a link."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("no unshare or no ip here")
    folder = tmp_path_factory.mktemp("linked")
    (folder / "job.py").write_text(LINKED)

    def profile(mbit, milliseconds):
        out = folder / f"{mbit}_{milliseconds}"
        words = ["profile", "job.py:job", "--out", f"profile_{out.name}", "--json"]
        scene = {"mbit": mbit, "milliseconds": milliseconds, "out": str(out), "words": words}
        hosts = start_scene(SCENE, SCENE=scene)
        hosts.join(280)
        if hosts.exitcode == 77:
            pytest.skip("no network namespaces and TUN devices here")
        told = Path(f"{out}.0").read_text()
        assert hosts.exitcode == 0, told
        return next(json.loads(line) for line in told.splitlines() if line.startswith("{"))

    return profile


@pytest.mark.slow
def test_the_rate_of_a_limited_link_is_measured_and_what_it_costs_foretold(linked):
    slow, fast = linked(20, 0), linked(60, 0)  # of which a busy processor reaches less
    rates = [document["law"]["rate"] * 8 / 1e6 for document in (slow, fast)]
    assert 10 < rates[0] < 30
    assert 1.15 * rates[0] < rates[1] < 120
    for row, other in zip(slow["expected"][1:], fast["expected"][1:], strict=True):
        assert row["seconds"]["communication"] > 0.5 * row["step_seconds"]
        assert row["speedup"] < other["speedup"] < 1.0
        assert min(row["seconds"].values()) >= 0
    assert [row["ranks"] for row in slow["expected"]] == [1, 2, 4, 8]
    assert slow["shares"]["communication"] > 0.5
    assert any("No number of ranks makes this batch faster" in note for note in answer(slow).notes)


@pytest.mark.slow
def test_the_delay_of_a_link_is_that_of_a_hop(linked):
    law = linked(200, 20)["law"]
    assert 0.02 < law["latency"] < 0.06  # a busy processor adds to it
    assert law["exposed"] > 2 * law["messages"] * 0.02
