"""What the search decides, on a bench whose answers are known and whose time is counted, not waited for."""

import types

import pytest

from vivace.ledger import Code, Outcome, Profile, Ratio, Trial
from vivace.plan import Plan
from vivace.technique import Numerics
from vivace.technique.registry import find
from vivace.tuning import search as searching
from vivace.tuning.ending import ending
from vivace.tuning.objective import Length
from vivace.tuning.search import Candidate, Search, seconds_left

NAMES = ("channels_last", "bf16_autocast", "fused_optimizer")
CHANNELS, BF16, FUSED = (Plan([find(name)()]) for name in NAMES)
PROFILE = Profile("cpu", 0.01, {"forward": 1.0}, {}, 1, 0.0, 1, 1)
STEADY = Ratio(1.0, 0.98, 1.02)


class Bench:
    """Measures by looking up; each trial takes ten seconds of a clock of its own."""

    base, memory, allow = Plan(), None, Numerics.ROUNDING
    observed = {"peak_bytes": 1}  # noqa: RUF012

    def __init__(self, answers):
        self.answers, self.trials, self.known, self.now = answers, [], {}, 0.0
        self.reference = types.SimpleNamespace(step_seconds=0.01)

    def fits(self, peak_bytes):
        return True

    def refuse(self, plan, reason, code, predicted):
        self._record(plan, status="refused", reason=reason, code=code)

    def measure(self, plan, **how):
        self.now += 10.0
        answer = self.answers(plan, self.now)
        if isinstance(answer, Code):
            return self._record(plan, status="failed", reason="because", code=answer, foreign_share=0.71)
        if isinstance(answer, str):
            return self._record(plan, status="refused", reason="however worded", technique=answer)
        ratio, warmup = answer if isinstance(answer, tuple) else (answer, 0.1)
        pairs = ((0.01, 0.01 / ratio.estimate),)
        measured = {"ratio": ratio, "pairs": pairs, "peak_bytes": 1, "warmup_seconds": warmup}
        return self._record(plan, status="measured", **measured)

    def _record(self, plan, **fields):
        self.trials.append(Trial(plan.to_dict(), plan.id, "m", "j", **fields))
        return self.trials[-1]


@pytest.fixture
def searched(monkeypatch):
    """Search among three techniques for some seconds; the bench and the search afterwards."""

    def run(answers, *, seconds=120.0, reserve=54.0, steps=None, names=NAMES):
        bench = Bench(answers)
        monkeypatch.setattr(searching, "time", types.SimpleNamespace(monotonic=lambda: bench.now))
        search = Search(bench, PROFILE, None, end=seconds, reserve=reserve, steps=steps)
        search._candidates = lambda: [Candidate(find(name)(), (1.0, 1.5)) for name in names]
        search.run()
        return bench, search

    return run


def test_what_refuses_in_company_is_left_out_whatever_its_reason_says(searched):
    bench, _ = searched(lambda plan, now: "bf16_autocast" if "bf16_autocast" in plan.names else STEADY)
    assert [trial.techniques.keys() for trial in bench.trials[:2]] == [
        {"channels_last", "bf16_autocast", "fused_optimizer"},
        {"channels_last", "fused_optimizer"},
    ]


def told(bench):
    return ending(bench.trials, 120.0)


def test_where_all_is_unsteady_the_reserve_is_spent_and_nothing_is_decided(searched):
    bench, search = searched(lambda plan, now: Code.UNSTEADY)
    assert search.ranking() == []
    assert 120 - 54 / 3 <= bench.now < 120
    assert not [trial for trial in bench.trials if trial.code == Code.NOT_TRIED]
    outcome, reason = told(bench)
    assert outcome == Outcome.COULD_NOT_MEASURE
    assert "too unsteady for 4 trials (other processes used up to 71 % of the processor)" in reason


def test_what_was_unsteady_is_timed_again_and_may_win(searched):
    steady = Ratio(1.4, 1.35, 1.45)
    _, search = searched(lambda plan, now: steady if plan == BF16 and now > 60 else Code.UNSTEADY)
    assert search.ranking() == [BF16]


def test_a_wide_interval_above_one_is_a_gain(searched):
    bench, search = searched(lambda plan, now: Ratio(2.1, 1.4, 3.24) if plan == BF16 else STEADY)
    assert search.ranking() == [BF16]
    assert bench.now < 120 - 54 + 10  # the reserve is kept for it


def test_an_absurd_estimate_stands_behind_a_known_one(searched):
    both = Plan([*BF16.techniques, *FUSED.techniques])
    answers = {BF16.id: Ratio(20.4, 1.1, 340.0), both.id: Ratio(1.5, 1.45, 1.55)}
    _, search = searched(lambda plan, now: answers.get(plan.id, STEADY))
    assert search.ranking() == [both, BF16]


def test_measured_and_nothing_helps(searched):
    bench, search = searched(lambda plan, now: STEADY, seconds=600.0)
    assert search.ranking() == []
    outcome, reason = told(bench)
    assert outcome == Outcome.NOTHING_HELPS
    assert reason == "4 trials measured, and none was faster beyond noise"
    assert not [trial for trial in bench.trials if trial.code == Code.NOT_TRIED]


def test_some_measured_and_some_not_is_said(searched):
    bench, _ = searched(lambda plan, now: Code.UNSTEADY if plan == BF16 else STEADY, seconds=600.0)
    outcome, reason = told(bench)
    assert outcome == Outcome.NOTHING_HELPS
    assert reason.startswith(
        "3 trials measured, and none was faster beyond noise; the machine was too unsteady"
    )


def test_without_time_nothing_is_tried(searched):
    bench, _ = searched(lambda plan, now: STEADY, seconds=10.0)
    assert bench.now == 0.0
    outcome, reason = told(bench)
    assert outcome == Outcome.NOTHING_TRIED
    assert "2 min ended before the first technique was timed" in reason
    assert {name for trial in bench.trials for name in trial.techniques} == set(NAMES)


def test_what_cannot_act_is_an_answer():
    ruled_out = Trial({"tf32": {}}, "a", "m", "j", "refused", "on cuda", code=Code.RULED_OUT)
    assert ending([ruled_out], 120.0) == (Outcome.NOTHING_HELPS, "No technique can act on this job")


@pytest.mark.parametrize(
    ("steps", "first"), [(330, "fused_optimizer"), (100_000, "compile"), (None, "compile"), (5, None)]
)
def test_the_plan_is_the_one_with_which_the_training_ends_first(searched, steps, first):
    names = ("compile", "fused_optimizer")
    answers = {
        "fused_optimizer": (Ratio(1.26, 1.2, 1.3), 1.03),
        "+".join(names): (Ratio(1.42, 1.36, 1.49), 20.0),
    }
    _, search = searched(
        lambda plan, now: answers.get("+".join(plan.names), (Ratio(1.0, 0.9, 1.1), 0.1)),
        names=names,
        seconds=600.0,
        steps=steps,
    )
    ranking = search.ranking()
    assert (ranking[0].names[0] if ranking else None) == first
    assert search.fastest().names == names
    search.warm[search.fastest().id] = 0.5  # what `train` will meet, all being compiled
    assert search.ranking()[0].names == names


def test_from_when_on_the_longer_warm_up_pays():
    length = Length(330, 0.010)
    later, sooner = (Ratio(2.0, 1.9, 2.1), 21.0), (Ratio(1.25, 1.2, 1.3), 0.2)
    steps = length.wins_from(later, sooner)
    assert steps == pytest.approx(20 / 0.003, rel=1e-3)
    assert length.wins_from(sooner, later) is None
    for count, wins in ((steps - 5, False), (steps + 5, True)):
        longer = Length(count, 0.010)
        assert (longer.seconds(*later) < longer.seconds(*sooner)) is wins
    assert length.pays(*sooner)
    assert not length.pays(*later)
    assert Length(None, 0.010).pays(*later)


def test_the_reserve_is_for_what_was_found():
    assert seconds_left(50.0, 54.0, found=True) < 0 < seconds_left(50.0, 54.0, found=False)
    assert seconds_left(10.0, 54.0, found=False) < 0
