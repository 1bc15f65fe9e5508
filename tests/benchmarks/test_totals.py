"""Whole trainings both ways: every row is run once, in turn, and the figures are those of the rows."""

import itertools
import json
from types import SimpleNamespace

import pytest
import totals

SPEEDUP = {"estimate": 2.0, "low": 1.9, "high": 2.1}


class Person:
    """Takes 100 s without a plan and 60 s with it, of which 10 s are no steps."""

    def __init__(self, plan, fails_at=None):
        self.plan, self.fails_at, self.commands = plan, fails_at, []

    def __call__(self, arguments, cache):
        if len(self.commands) == self.fails_at:
            raise KeyboardInterrupt
        self.commands.append((arguments, cache.name))
        document = {"plan": self.plan, "speedup": SPEEDUP, "steps": 90}
        if arguments[0] == "tune":
            folder = next(b for a, b in itertools.pairwise(arguments) if a == "--out")
            path = totals.Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            totals.Plan.from_dict(self.plan).save(path / "plan.toml")
            document["training_seconds"] = {"reference": 98.0, "plan": 57.0}
        seconds = 60.0 if "--plan" in arguments else 100.0
        return {"seconds": seconds, "foreign_share": 0.01, "document": document}

    @property
    def ways(self):
        return ["plan" if "--plan" in command else command[0] for command, _ in self.commands]


def test_ways_alternate_and_the_cold_run_has_a_cache_of_its_own(tmp_path):
    person = Person({"compile": {}})
    bench = totals.Bench(tmp_path, "2m", person)
    bench.measure("gpt", 3)
    assert person.ways == ["tune", "plan", "train", "train", "plan", "plan", "train", "plan"]
    caches = [cache for _, cache in person.commands]
    assert caches == ["compiled"] * 7 + ["nothing-compiled"]


def test_figures_are_those_of_the_rows(tmp_path):
    bench = totals.Bench(tmp_path, "2m", Person({"channels_last": {}}))
    bench.measure("gpt", 3)
    found = totals.summary(bench.of("gpt"))
    assert found["totals"] == {"strict": [100.0] * 3, "plan": [60.0] * 3, "cold": []}
    assert found["saved_seconds"] == 40.0
    assert found["error"] == pytest.approx(57 / 60 - 1)
    assert found["reference_error"] == pytest.approx(-0.02)
    assert found["ratio"]["estimate"] == pytest.approx(100 / 60)
    assert totals.told(found) == (
        "100.0 s (predicted 98.0 s, -2.0%) -> 60.0 s; predicted 57.0 s, -5.0%; channels_last"
    )


def test_a_job_without_a_plan_is_trained_one_way(tmp_path):
    person = Person({})
    bench = totals.Bench(tmp_path, "2m", person)
    bench.measure("gpt", 3)
    assert person.ways == ["tune", "train"]
    assert totals.told(totals.summary(bench.of("gpt"))) == "100.0 s (predicted 98.0 s, -2.0%); no plan"


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        totals.Bench(tmp_path, "2m", Person({"channels_last": {}}, fails_at=4)).measure("gpt", 3)
    again = Person({"channels_last": {}})
    bench = totals.Bench(tmp_path, "2m", again)
    bench.measure("gpt", 3)
    assert again.ways == ["plan", "plan", "train"]
    assert len(bench.rows()) == 7


@pytest.mark.parametrize(
    ("shares", "kept"),
    [([0.2, 0.03], 0.03), ([0.2, 0.3, 0.1], 0.1), ([0.06, 0.3, 0.1], 0.06), ([0.05], 0.05)],
)
def test_a_row_that_others_disturbed_is_run_again_at_most_twice(tmp_path, shares, kept):
    person, shares_left = Person({}), [0.01, *shares]

    def start(arguments, cache):
        out = totals.Path(arguments[-1])
        assert not out.exists()  # what a row wrote that is run again
        row = person(arguments, cache)
        out.mkdir(parents=True, exist_ok=True)
        return row | {"foreign_share": shares_left.pop(0)}

    bench = totals.Bench(tmp_path, "2m", start)
    bench.measure("gpt", 3)
    assert person.ways == ["tune"] + ["train"] * len(shares)
    assert [row["foreign_share"] for row in bench.rows()] == [0.01, kept]
    assert len(bench.ledger.read("disturbed")) == len(shares) - 1


def test_a_search_that_is_run_again_is_kept_with_the_plan_that_it_left(tmp_path):
    shares_left, plans_left = [0.2, 0.3, *[0.01] * 9], [{"channels_last": {}}, {"fused_optimizer": {}}]

    def start(arguments, cache):
        if arguments[0] == "tune":
            person.plan = plans_left.pop(0) if plans_left else {"host_allocator": {}}
        return person(arguments, cache) | {"foreign_share": shares_left.pop(0)}

    person = Person({})
    bench = totals.Bench(tmp_path, "2m", start)
    bench.measure("gpt", 3)
    assert totals.summary(bench.of("gpt"))["plan"] == {"host_allocator": {}}
    (path,) = tmp_path.glob("gpt/tune-*/plan.toml")
    assert totals.Plan.load(path).to_dict() == {"host_allocator": {}}


@pytest.mark.parametrize(
    ("command", "code", "document", "said"),
    [
        ("train", 1, {"steps": 40, "missing_steps": 3}, "3 steps are missing"),
        ("train", 143, {"steps": 40}, "3 steps are missing"),
        ("tune", 1, {"error": {"message": "the promise is broken"}}, "the promise is broken"),
        ("tune", 130, {}, "3 steps are missing"),
    ],
)
def test_a_command_that_came_to_no_end_is_no_row(command, code, document, said, tmp_path, monkeypatch):
    done = SimpleNamespace(returncode=code, stdout=json.dumps(document), stderr="3 steps are missing")
    monkeypatch.setattr(totals.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit, match=f"{command} gpt ended with {code}: {said}"):
        totals.run([command, "gpt"], tmp_path)
    done.returncode, done.stdout = int(command == "tune"), json.dumps({"plan": {}})
    assert totals.run([command, "gpt"], tmp_path)["document"] == {"plan": {}}


def test_what_is_known_is_kept_after_each_row(tmp_path):
    kept = []

    def keep(bench):
        kept.append(totals.summary(bench.of("gpt"))["totals"])

    totals.Bench(tmp_path, "2m", Person({"channels_last": {}}), keep=keep).measure("gpt", 1)
    assert kept == [
        {"strict": [], "plan": [], "cold": []},
        {"strict": [], "plan": [60.0], "cold": []},
        {"strict": [100.0], "plan": [60.0], "cold": []},
    ]


def test_rows_of_another_length_are_other_rows(tmp_path):
    totals.Bench(tmp_path, "2m", Person({"channels_last": {}})).measure("gpt", 3)
    longer = Person({"channels_last": {}})
    bench = totals.Bench(tmp_path, "2m", longer, times=5)
    bench.measure("gpt", 3)
    assert len(longer.commands) == len(bench.of("gpt")) == 7
    assert totals.summary(bench.of("gpt"))["epochs"] == 5
    assert {command[1].partition(",")[2] for command, _ in longer.commands} == {"name=gpt,epochs=5"}
