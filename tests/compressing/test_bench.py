"""The bench when one of its processes dies, or cannot serve: the next form is measured beside new ones."""

import pytest

from vivace.compressing import bench
from vivace.compressing.result import Tried
from vivace.errors import ChildFailed, Refused, TimedOut, Unsteady
from vivace.ledger import Ratio
from vivace.measuring.paired import Comparison
from vivace.serving.forms import BESIDE, BY_NAME

CANNOT = (("trained_plan", 8), ("eager_fp32", 32))
TIMES = {"p50": 0.1, "p99": 0.2, "samples_per_second": 80.0, "calls": 9}


class Process:
    """Stands for a child process; once dead, it answers nothing."""

    begun: list

    def __init__(self, name, *_, **__):
        self.name, self.alive, self.asked = name, True, []
        self.begun.append(self)

    def ask(self, command, *_, **__):
        if not self.alive:
            raise ChildFailed("the process died")
        self.asked.append(command)
        return TIMES if command == "latencies" else {"threads": 1}

    def close(self):
        self.alive = False


class Served:
    """Stands for a process that serves a form, on samples of one length."""

    a_call = None  # seconds of one, where lengths differ

    def __init__(self, owner, form):
        self.child, self.step_seconds, self.form = Process(form.name), 1.0, form

    def open(self, _, batch, inputs):
        self.calls_a_step = inputs if self.a_call else 1
        self.step_seconds = self.calls_a_step * (self.a_call or 1.0)
        if batch == 64 and self.form.name != "eager_fp32":
            raise TimedOut("no answer to 'warm' within 60 s")
        if (self.form.name, batch) in CANNOT:
            raise Refused(f"a batch of {batch} cannot be made")
        return 0.0

    def block(self, steps):
        return 1.0

    def ask(self, command, **_):
        return self.child.ask(command)

    def close(self):
        self.child.close()


def judged(self, form, *_):
    """An answer that asks both processes."""
    self._reference.ask("block")
    self.judge.ask("change")
    return bench.outcome_of(form, "kept")


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A bench that has begun."""
    Process.begun = []
    monkeypatch.setattr(bench, "Child", Process)
    monkeypatch.setattr(bench, "Server", Served)
    monkeypatch.setattr(bench.Bench, "_judged", judged)
    found = bench.Bench(None, "run", tmp_path, tmp_path, tmp_path / "log", 1)
    found.begin()
    return found


def test_what_has_died_is_begun_again_before_the_next_form(begun):
    form = BY_NAME["eager_bf16"]
    judge, reference = begun.judge, begun._reference
    assert begun.attempt(form, by_size=False).status == "kept"
    assert (begun.judge, begun._reference) == (judge, reference)
    judge.alive = reference.child.alive = False
    assert begun.attempt(form, by_size=False).status == "kept"
    assert begun.judge is not judge
    assert begun.judge.asked == ["record", "change"]
    assert begun._reference is not reference


def test_forms_are_timed_at_a_batch_beside_a_fresh_process_of_the_model_as_it_is(begun, monkeypatch):
    compared = []

    def compare(reference, candidate, **_):
        compared.append((reference, candidate.form.name))
        return Comparison(Ratio(2.0, 1.9, 2.1), ())

    monkeypatch.setattr(bench, "compare", compare)
    rows = begun.beside([*BESIDE, BY_NAME["eager_bf16"]], 8)
    assert [one.name for one in rows] == ["eager_fp32", "compiled_default", "trained_plan", "eager_bf16"]
    assert [one.ratio.estimate if one.ratio else one.reason for one in rows] == [
        1.0, 2.0, "a batch of 8 cannot be made", 2.0
    ]  # fmt: skip
    assert {one.samples_per_second for one in rows} == {80.0, None}
    assert [name for _, name in compared] == ["compiled_default", "eager_bf16"]
    assert len({id(reference) for reference, _ in compared}) == 1
    assert compared[0][0] is not begun._reference
    assert [child.name for child in Process.begun if not child.alive][-1] == "eager_bf16"
    (row,) = begun.beside(BESIDE, 32)
    assert (row.name, row.batch, row.ratio) == ("eager_fp32", 32, None)
    assert row.reason == "a batch of 32 cannot be made"
    begun.deadline = 0.0
    assert [row.reason for row in begun.beside(BESIDE, 64)] == ["", *["not ready within 1 min"] * 2]


@pytest.mark.parametrize(("seconds", "inputs"), [(0.01, 16), (0.024, 16), (0.05, 6), (1.0, 4)])
def test_where_samples_differ_in_length_each_block_is_of_the_same_ones(begun, monkeypatch, seconds, inputs):
    """As many as a block has time for: every form is called with these, the model as it is too."""
    monkeypatch.setattr(Served, "a_call", seconds)
    begun.renew()
    with begun._served(BY_NAME["eager_bf16"]) as server:
        assert server.calls_a_step == begun._reference.calls_a_step == inputs
    assert sum(child.alive for child in Process.begun if child.name == "eager_fp32") == 1


@pytest.mark.parametrize(
    ("look", "lengths"),
    [
        (Ratio(2.0, 1.95, 2.05), [bench.LOOK_SECONDS]),
        (Ratio(1.2, 0.9, 1.4), [bench.LOOK_SECONDS]),  # slower than the best, however wide
        (Ratio(1.5, 1.4, 1.6), [bench.LOOK_SECONDS, bench.TIMED_SECONDS]),
        (None, [bench.LOOK_SECONDS, bench.TIMED_SECONDS]),  # the machine was busy
    ],
)
def test_a_short_look_is_enough_where_it_is_narrow_or_shows_one_slower(begun, monkeypatch, look, lengths):
    asked = []

    def compare(_, __, *, seconds, **___):
        asked.append(seconds)
        if look is None and seconds == bench.LOOK_SECONDS:
            raise Unsteady("others used 60 % of the processor")
        return Comparison(look or Ratio(2.0, 1.9, 2.1), ())

    monkeypatch.setattr(bench, "compare", compare)
    best = Tried("onnx_fp32", "", "onnx", "fp32", "kept", ratio=Ratio(1.5, 1.48, 1.52))
    begun._timed(begun._reference, best, True)
    assert asked == lengths
    begun._timed(begun._reference, None, False)
    assert asked[len(lengths) :] == [bench.TIMED_SECONDS]
