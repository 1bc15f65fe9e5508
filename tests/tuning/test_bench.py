"""Trials where the device has no memory for the reference and a candidate at the same time."""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vivace
from vivace.errors import Code, JobError, Refused, Unsteady, VivaceError
from vivace.job import load
from vivace.ledger import Ledger, Ratio, Trial
from vivace.measuring.paired import Comparison, compare_in_turns
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.technique import Numerics
from vivace.techniques.cpu_threads import CpuThreads
from vivace.tuning import bench as bench_module
from vivace.tuning.bench import Bench
from vivace.tuning.tuner import _leave_compiled

STAGE = Path(__file__).parents[1] / "scenes" / "stage.py"


@pytest.fixture
def bench(tmp_path, monkeypatch, hurried):
    monkeypatch.setenv("DEVICE", str(tmp_path / "device"))
    load(f"{STAGE}:large")  # registers the planted techniques here
    ledger = Ledger(tmp_path / "ledger.jsonl")
    machine = vivace.inspect()
    source = Source(f"{STAGE}:large")
    made = Bench(source, machine, ledger, lambda *_: None, allow=Numerics.EXACT, memory=None)
    made.check()
    made.open_reference()
    yield made
    made.close()


def test_they_take_turns_and_the_winner_is_confirmed_in_turns(bench):
    plan = Plan.from_dict({"planted_quick": {}})
    trial = bench.measure(plan, seconds=20, comparing=2)
    assert bench.apart
    assert (trial.status, trial.reason) == ("measured", "")
    assert trial.ratio.low > 1.0  # 40 ms against 10 ms, beside whatever else runs
    confirmed = bench.confirm(plan, seconds=2, round_seconds=2)
    assert confirmed.status == "measured"
    assert confirmed.ratio.low > 1.0


@contextlib.contextmanager
def opened(folder, text):
    """A bench whose reference is open, of a job file."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    source, ledger = Source(f"{folder}/train.py:job"), Ledger(folder / "ledger.jsonl")
    bench = Bench(source, vivace.inspect(), ledger, lambda *_: None, allow=Numerics.ROUNDING, memory=None)
    with contextlib.closing(bench):
        bench.check()
        bench.open_reference()
        yield bench


FAULTING = """
from pathlib import Path
import torch
import vivace


def loss(model, batch):
    if not Path(__file__).with_name("calm").exists():
        torch.ones(12 * 2**20)  # 48 MiB, which glibc takes from the system and gives back
    return model(batch).sum()


job = vivace.Job(
    model=lambda: torch.nn.Linear(4, 1),
    data=lambda: [torch.ones(2, 4)] * 50,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="acts on a CPU")
def test_memory_that_the_reference_takes_anew_only_at_times_counts(tmp_path, hurried):
    """Whether a process gives memory back and takes it anew is luck, which changes as it runs: a reference
    that does not while a plan is tried says nothing against a plan that never does."""
    (tmp_path / "train.py").write_text(FAULTING, encoding="utf-8")
    source, ledger = Source(f"{tmp_path}/train.py:job"), Ledger(tmp_path / "ledger.jsonl")
    bench = Bench(source, vivace.inspect(), ledger, lambda *_: None, allow=Numerics.EXACT, memory=None)
    with contextlib.closing(bench):
        assert bench.check().page_faults > 10
        (tmp_path / "calm").touch()
        bench.open_reference()
        trial = bench.measure(Plan.from_dict({"host_allocator": {}}), seconds=30, comparing=1)
    assert "changed nothing" not in trial.reason
    assert "page faults a step" in bench.evidence[trial.plan_id]["host_allocator"]


AGEING = """
import time
import torch
import vivace


class Ageing(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, numbers):
        self.steps += 1
        time.sleep(3e-4 * float(self.steps))
        return super().forward(numbers)


job = vivace.Job(
    model=Ageing,
    data=lambda: [torch.ones(2, 4)] * 50,
    loss=lambda model, batch: model(batch).sum(),
    optimizer=lambda model: torch.optim.Adam(model.parameters()),
)
"""


def test_the_reference_is_as_little_trained_as_a_candidate(tmp_path, hurried):
    """Where steps become slower as it trains, as with denormal numbers on a processor."""
    with opened(tmp_path, AGEING) as bench:
        bench.reference.block(150)  # 45 ms a step
        trial = bench.measure(Plan(), seconds=20, comparing=1, role="baseline_default", strict=False)
    assert trial.ratio is not None, trial.reason
    assert trial.ratio.estimate < 2.0  # of itself, and not of what it has become


GROWING = """
import time
import torch
import vivace


def loss(model, batch):
    time.sleep(3e-4 * float(batch.max()))
    return model(batch).sum()


job = vivace.Job(
    model=lambda: torch.nn.Linear(4, 1),
    data=lambda: [torch.full((2, 4), float(number)) for number in range(400)],
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9),
)
"""


def test_the_reference_reads_the_same_batches_as_a_candidate(tmp_path, hurried):
    """Data in an order of their own, such as by length, take longer the further on they are."""
    with opened(tmp_path, GROWING) as bench:
        bench.reference.block(150)  # 45 ms a step
        trial = bench.measure(Plan(), seconds=20, comparing=1, role="baseline_default", strict=False)
    assert trial.ratio is not None, trial.reason
    assert trial.ratio.estimate < 2.0  # of itself, and not of later batches


UNEVEN = """
import time
import torch
import vivace


def loss(model, batch):
    time.sleep(1e-4 * len(batch))
    return model(batch).sum()


job = vivace.Job(
    model=lambda: torch.nn.Linear(4, 1),
    data=lambda: [torch.ones(400, 4), torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4)],
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9),
)
"""


def test_a_steps_seconds_are_of_batches_as_they_come_and_not_of_the_first_one(tmp_path, hurried):
    """Of batches that differ in size the first one says little: here it is four times the mean."""
    with opened(tmp_path, UNEVEN) as bench:
        trial = bench.measure(Plan(), seconds=20, comparing=1, role="baseline_default", strict=False)
        size = bench.reference.samples_a_step
    assert size == pytest.approx(103, rel=0.3)
    assert trial.ratio is not None, trial.reason
    (_, own), told = trial.pairs[0], trial.samples_per_second
    assert own * told == pytest.approx(size, rel=0.9)  # and not 400


TWO_THREADS = """
import torch
import vivace

torch.set_num_threads(2)
job = vivace.Job(
    model=lambda: torch.nn.Linear(4, 1),
    data=lambda: [torch.ones(2, 4)] * 9,
    loss=lambda model, batch: model(batch).sum(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


@pytest.mark.parametrize("crowd", [True, False])
def test_beside_others_plans_are_timed_on_one_thread_and_that_is_said(tmp_path, monkeypatch, hurried, crowd):
    monkeypatch.setattr("vivace.training.crew.crowded", lambda: crowd)
    (tmp_path / "two.py").write_text(TWO_THREADS, encoding="utf-8")
    source, ledger, told = Source(f"{tmp_path}/two.py:job"), Ledger(tmp_path / "ledger.jsonl"), []
    machine = dataclasses.replace(vivace.inspect(), num_cores=2)
    bench = Bench(
        source, machine, ledger, lambda *event: told.append(event), allow=Numerics.ROUNDING, memory=None
    )
    with contextlib.closing(bench):
        profile = bench.check()
        bench.open_reference()
        bench.reference.block(1)
        opened = bench._open(Plan())
        with contextlib.closing(opened):
            opened.block(1)
    said = [fields["text"] for kind, fields in told if kind == "notice"]
    assert [text for text in said if "on one thread" in text] == said[:crowd]
    assert (bench.reference.clocks.alone, opened.clocks.alone) == (crowd, crowd)
    settings = [technique.num_threads for technique in CpuThreads.candidates(profile, machine)]
    assert settings == ([] if crowd else [1])


def test_a_refusal_names_its_technique_only_among_others():
    refused = Refused("the model has no 2-D convolution").by("channels_last")
    crossed = VivaceError.from_dict(refused.to_dict())
    for plan, reason in (
        ({"channels_last": {}}, "the model has no 2-D convolution"),
        ({"channels_last": {}, "compile": {}}, "channels_last: the model has no 2-D convolution"),
    ):
        found = bench_module._without_ratio(Plan.from_dict(plan), crossed)
        assert (found["technique"], found["reason"]) == ("channels_last", reason)


class Steady:
    """A contestant whose blocks all take the same time; it notes when it is open."""

    step_seconds = 1.0

    def __init__(self, seconds, noted):
        self.seconds, self.noted = seconds, noted
        noted.append(f"opened {seconds}")

    def block(self, steps):
        return self.seconds

    def close(self):
        self.noted.append(f"closed {self.seconds}")


def test_a_drift_between_the_turns_is_in_the_interval():
    noted = []
    turns = [lambda s=s: Steady(s, noted) for s in (1.0, 0.5, 1.2)]
    ratio = compare_in_turns(turns, seconds=0.0).ratio
    assert (ratio.low, ratio.high) == pytest.approx((2.0, 2.4))
    assert ratio.low < ratio.estimate < ratio.high
    assert noted == [f"{what} {seconds}" for seconds in (1.0, 0.5, 1.2) for what in ("opened", "closed")]


def test_turns_between_which_the_machine_changed_say_nothing():
    turns = [lambda s=s: Steady(s, []) for s in (0.5, 1.0, 2.0)]
    with pytest.raises(Unsteady, match=r"ratio 0\.50 to 2\.00 between"):
        compare_in_turns(turns, seconds=0.0)


class Crowded:
    """A contestant that runs out of memory beside another one."""

    joules_per_sample = None
    child = SimpleNamespace(alive=True)

    def __init__(self):
        self.full = 0

    def close(self):
        pass


@pytest.mark.parametrize("memory", [None, 1])
def test_where_one_takes_the_memory_of_the_other_they_take_turns(tmp_path, monkeypatch, memory):
    """Unless the plan has a memory budget, and the device has room for that twice."""
    timed = []

    def compare(reference, candidate, **_):
        timed.append("beside")
        candidate.full += 1
        return Comparison(Ratio(0.5, 0.5, 0.5), ((1.0, 2.0),))

    def in_turns(openings, **_):
        timed.append("in turns")
        for opening in openings:
            opening()
        return Comparison(Ratio(2.0, 2.0, 2.0), ((2.0, 1.0),))

    for name, value in (("_lone", Crowded), ("_resident", Crowded), ("_open", Crowded)):
        monkeypatch.setattr(Bench, name, lambda *_, value=value, **__: value())
    monkeypatch.setattr(bench_module, "compare", compare)
    monkeypatch.setattr(bench_module, "compare_in_turns", in_turns)
    source, ledger = Source(f"{STAGE}:large"), Ledger(tmp_path / "ledger.jsonl")
    made = Bench(source, vivace.inspect(), ledger, lambda *_: None, allow=Numerics.EXACT, memory=memory)
    with contextlib.closing(made):
        found = made._compared(Crowded, seconds=1.0)[1].ratio.estimate
    assert (timed, found) == ((["beside"], 0.5) if memory else (["beside", "in turns"], 2.0))
    assert made.apart == (not memory)


def test_a_verdict_of_another_version_does_not_stop_a_search(tmp_path):
    source, ledger = Source(f"{STAGE}:large"), Ledger(tmp_path / "ledger.jsonl")
    ledger.append("verdict", {"judgement": "of another version"})
    made = Bench(source, vivace.inspect(), ledger, lambda *_: None, allow=Numerics.EXACT, memory=None)
    made.facts = {"signature": "job"}
    with contextlib.closing(made):
        made.recall()
    assert made.known == {}


def test_data_that_fail_in_a_trial_end_that_and_not_the_search(tmp_path, monkeypatch):
    """In a candidate's process, or in the reference's, which is then opened anew."""
    parked = []

    def compare(*_, **__):
        raise JobError("sample 159 cannot be read")

    for name in ("_lone", "_resident", "_open"):
        monkeypatch.setattr(Bench, name, lambda *_, **__: Crowded())
    monkeypatch.setattr(Bench, "_admit", lambda *_: {})
    monkeypatch.setattr(Bench, "park", lambda self: parked.append(True))
    monkeypatch.setattr(bench_module, "compare", compare)
    source, ledger = Source(f"{STAGE}:large"), Ledger(tmp_path / "ledger.jsonl")
    made = Bench(source, vivace.inspect(), ledger, lambda *_: None, allow=Numerics.EXACT, memory=None)
    made.facts = {"signature": "job"}
    with contextlib.closing(made):
        trial = made.measure(Plan(), seconds=1.0, comparing=1.0)
    assert (trial.status, trial.reason) == ("failed", "sample 159 cannot be read")
    assert parked


def test_what_the_winner_compiled_is_found_by_train(tmp_path, monkeypatch):
    own, usual = tmp_path / "own", tmp_path / "usual"
    (own / "fxgraph").mkdir(parents=True)
    (own / "fxgraph" / "kernel").write_text("compiled")
    usual.mkdir()
    (usual / "other").write_text("stays")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(usual))
    _leave_compiled(own)
    assert (usual / "fxgraph" / "kernel").read_text() == "compiled"
    assert (usual / "other").read_text() == "stays"


def test_pytorchs_defaults_are_no_plan_to_begin_with(tmp_path):
    """They are the empty plan, timed without strict fp32: as a plan it cannot be faster than itself."""
    plans = {"baseline_default": Plan(), "candidate": Plan.from_dict({"host_allocator": {}})}
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for role, plan in plans.items():
        timed = {"ratio": Ratio(1.3, 1.2, 1.4), "pairs": ((1.3, 1.0),) * 4, "role": role}
        ledger.append("trial", Trial(plan.to_dict(), plan.id, "here", "job", "measured", **timed).to_dict())
    machine, facts = SimpleNamespace(fingerprint="here"), {"signature": "job"}
    bench = SimpleNamespace(ledger=ledger, needed=Plan(), machine=machine, facts=facts, known={})
    Bench.recall(bench)
    assert list(bench.known) == [plans["candidate"].id]


@pytest.mark.parametrize(
    ("code", "known"),
    [("unsteady", "measured"), ("not_tried", "measured"), ("ruled_out", "measured"), ("", "failed")],
)
def test_what_says_nothing_of_a_plan_does_not_hide_that_it_was_faster(tmp_path, code, known):
    """As a confirmation on a machine that is too unsteady: the next search begins with the plan."""
    plan, ledger = Plan.from_dict({"host_allocator": {}}), Ledger(tmp_path / "ledger.jsonl")
    timed = {"ratio": Ratio(1.3, 1.2, 1.4), "pairs": ((1.3, 1.0),) * 4}
    later = {"reason": "why", "code": code, "role": "confirmation"}
    for status, fields in (("measured", timed), ("failed", later)):
        ledger.append("trial", Trial(plan.to_dict(), plan.id, "here", "job", status, **fields).to_dict())
    machine, facts = SimpleNamespace(fingerprint="here"), {"signature": "job"}
    bench = SimpleNamespace(ledger=ledger, needed=Plan(), machine=machine, facts=facts, known={})
    Bench.recall(bench)
    assert bench.known[plan.id].status == known


@pytest.mark.parametrize(
    ("ratios", "wanted"),
    [
        ([1.3, 1.01, 0.99, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2], 6),  # its interval holds 1: twice as many
        ([1.3, 1.2, 1.25, 1.2], 3),  # above 1
        ([0.8, 1.1, 0.9, 1.2], 3),  # not faster on the whole
        ([1.01, 1.0, 1.01, 1.2], 3),  # known well, and next to nothing
        ([None, 1.2, 1.25, 1.2], 2),  # None: too unsteady
        ([1.2, None, None, 1.2], 1),
        ([None, None, None, 1.2, None, 1.25, 1.2], 2),
        ([None] * 7, 0),
    ],
)
def test_a_confirmation_that_says_neither_yes_nor_no_goes_on_once(tmp_path, monkeypatch, ratios, wanted):
    """The first answer is given after three pairs of processes."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    made = Bench(
        Source(f"{STAGE}:large"), vivace.inspect(), ledger, lambda *_: None, allow=Numerics.EXACT, memory=None
    )
    made.facts = {"signature": "", "batch_size": 1}
    monkeypatch.setattr(bench_module, "MOST_ROUNDS", 3)
    coming = iter(ratios)

    def once(plan, earlier, *, seconds):
        ratio = next(coming)
        if ratio is None:
            raise Unsteady("the machine was too unsteady to conclude", foreign_share=0.6)
        comparison = Comparison(Ratio(ratio, ratio, ratio), ((ratio, 1.0),) * 6)
        found = {"status": "measured", "ratio": bench_module.across([*earlier, comparison])}
        return comparison, {**found, "pairs": comparison.pairs, "rounds": len(earlier) + 1}

    monkeypatch.setattr(made, "_confirm_once", once)
    with contextlib.closing(made):
        trial = made.confirm(Plan.from_dict({"channels_last": {}}), seconds=1e9, round_seconds=4)
    if wanted:
        assert (trial.status, trial.rounds) == ("measured", wanted)
    else:
        assert (trial.status, trial.code, trial.foreign_share) == ("failed", Code.UNSTEADY, 0.6)
