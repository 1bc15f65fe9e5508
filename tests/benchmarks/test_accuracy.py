"""`scripts/bench accuracy`: what rows say together, going on where it was stopped, and the pages from it."""

import json
import time
from types import SimpleNamespace

import _accuracy_child
import _cases
import _evidence
import _record
import _tasks
import accuracy
import pytest

from vivace import Plan
from vivace.recipes import RECIPES

SEEDS = 4
SEARCH = {
    "plan": {"bf16_autocast": {}},
    "tune_seconds": 90.0,
    "trials": [
        {"techniques": {"bf16_autocast": {}}, "status": "measured", "reason": "", "ratio": {"high": 2.0}},
        {
            "techniques": {"compile": {}},
            "status": "measured",
            "reason": "",
            "ratio": {"estimate": 0.7, "high": 0.8},
        },
        {"techniques": {"ddp": {}}, "status": "refused", "reason": "one device is here", "ratio": None},
    ],
}


def row(way, seed, seconds, metric):
    curve = [[seconds / 2, metric - 0.1], [seconds, metric]]
    return {
        "way": way,
        "seed": seed,
        "seconds": seconds,
        "metric": metric,
        "curve": curve,
        "peak_bytes": 2**30,
        "joules": None,
    }


def rows(shift=0.0, plan_seconds=50.0):
    found = []
    for seed in range(SEEDS):
        noise = 0.001 * (seed - 1.5)
        found.append(row("strict", seed, 100.0 + seed, 0.9 + noise))
        found.append(row("defaults", seed, 101.0 - seed, 0.9 - noise))
        found.append(row("plan", seed, plan_seconds + seed, 0.9 + shift - noise))
    return found


def test_equal_and_faster():
    found = accuracy.summary(rows(), 0.01)
    assert found["equal"]
    assert found["speed"]["strict"]["low"] > 1.8
    assert found["ways"]["plan"]["seconds_to_target"] == pytest.approx(51.5)
    assert found["ways"]["strict"]["metric"]["estimate"] == pytest.approx(0.9)
    assert found["seeds"] == SEEDS
    assert found["to_target"]["low"] > 1.8
    low, high = (found["ways"]["strict"]["metric"][side] for side in ("low", "high"))
    assert 0.9 - 0.004 < low < 0.9 < high < 0.9 + 0.004


def test_a_seed_that_was_not_trained_every_way_does_not_count():
    further = row("strict", SEEDS, 100.0, 0.1)  # a longer run was stopped behind it
    assert accuracy.summary([*rows(), further], 0.01) == accuracy.summary(rows(), 0.01)


def test_worse_by_more_than_the_margin_is_not_equal_and_never_reaches_the_metric():
    found = accuracy.summary(rows(shift=-0.05), 0.01)
    assert not found["equal"]
    assert found["ways"]["plan"]["seconds_to_target"] is None
    assert found["difference"]["high"] < -0.03
    assert found["to_target"] is None


def test_times_to_the_metric_are_compared_only_where_all_trainings_reached_it():
    found = rows()
    next(row for row in found if (row["way"], row["seed"]) == ("plan", 0))["curve"] = [[50.0, 0.5]]
    assert accuracy.summary(found, 0.01)["to_target"] is None  # three of four pairs are a choice


def test_a_search_that_could_not_measure_takes_its_time_too(monkeypatch):
    told = dict.fromkeys(("plan", "speedup", "outcome", "promise", "reason", "break_even_steps"))
    results = [
        SimpleNamespace(
            seconds=seconds,
            interrupted=False,
            outcome=SimpleNamespace(answered=answered),
            to_dict=lambda: told | {"trials": []},
        )
        for seconds, answered in ((120.0, False), (100.0, True))
    ]
    monkeypatch.setattr(accuracy.vivace, "tune", lambda *_, **__: results.pop(0))
    assert accuracy.searched("digits", "fast")["tune_seconds"] == 220.0


def test_a_training_that_came_to_no_end_is_none(monkeypatch):
    run = SimpleNamespace(exit_code=1)
    monkeypatch.setattr(_accuracy_child.vivace, "train", lambda *_, **__: run)
    with pytest.raises(SystemExit, match="came to no end: exit code 1"):
        _accuracy_child.with_vivace(None, None, 0, print)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The benchmark in an empty folder, with trainings that take no time; the names of those that ran."""
    done = []

    def trained(name, way, seed, plan, epochs):
        assert Plan.load(plan).to_dict() == SEARCH["plan"]
        if len(done) == 5 and "stopped" not in done:
            done.append("stopped")
            raise KeyboardInterrupt
        done.append((way, seed))
        return row(way, seed, 50.0 if way == "plan" else 100.0 + seed, 0.9 + 0.001 * seed)

    monkeypatch.setattr(_record, "RECORDS", tmp_path)
    monkeypatch.setattr(accuracy, "trained", trained)
    monkeypatch.setattr(accuracy, "searched", lambda name, budget: json.loads(json.dumps(SEARCH)))
    return done


def test_a_run_that_was_stopped_goes_on_where_it_was(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", "3"])
    with pytest.raises(KeyboardInterrupt):
        accuracy.main()
    (path,) = tmp_path.glob("accuracy/*/*.json")
    assert len(json.loads(path.read_text())["recipes"]["digits"]["rows"]) == 5
    assert accuracy.main() == 0
    ran = [each for each in bench if each != "stopped"]
    assert sorted(ran) == sorted((way, seed) for way in accuracy.WAYS for seed in range(3))
    assert [way for way, _ in ran[:3]] != [way for way, _ in ran[3:6]]  # another order each seed
    assert "digits: 101 s -> 50 s" in capsys.readouterr().out
    kept = json.loads(path.read_text())["recipes"]["digits"]
    assert kept["equal"]
    assert (kept["seeds"], kept["epochs"], kept["margin"]) == (3, 15, RECIPES["digits"].margin)


def test_more_seeds_are_added_and_a_row_of_other_epochs_begins_anew(bench, monkeypatch, tmp_path):
    bench.append("stopped")
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", "3"])
    accuracy.main()
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", "4"])
    accuracy.main()
    assert len(bench) == 1 + 4 * len(accuracy.WAYS)
    (path,) = tmp_path.glob("accuracy/*/*.json")
    record = json.loads(path.read_text())
    assert record["recipes"]["digits"]["seeds"] == 4
    assert record["recipes"]["digits"].pop("date") == record["date"]  # records of before have none
    path.write_text(json.dumps(record))
    monkeypatch.setattr(_record, "today", lambda: "2100-01-01")
    accuracy.main()
    record = json.loads(path.read_text())
    assert _tasks.dates(record) == record["recipes"]["digits"]["date"] == record["date"]
    record["recipes"]["digits"]["epochs"] = 99
    path.write_text(json.dumps(record))
    accuracy.main()
    assert len(bench) == 1 + 8 * len(accuracy.WAYS)
    (path,) = tmp_path.glob("accuracy/*/*.json")  # it is filed under the day of its newest recipe
    record = json.loads(path.read_text())
    assert path.stem == record["date"] == _tasks.dates(record) == "2100-01-01"


def metrics(monkeypatch, differences):
    """Trainings whose plan differs from strict fp32 by this much, seed by seed."""

    def trained(name, way, seed, plan, epochs):
        metric = 0.9 + (differences[seed] if way == "plan" else 0.0)
        return row(way, seed, 50.0 if way == "plan" else 100.0 + seed, metric)

    monkeypatch.setattr(accuracy, "trained", trained)


def kept(tmp_path, name="digits"):
    (path,) = tmp_path.glob("accuracy/*/*.json")
    return json.loads(path.read_text())["recipes"][name]


DIFFERENCES = [-0.0065104, -0.0026042, -0.0078125, -0.0091146, 0.0039062]  # p = 0.054 of three, 0.038 of five


def test_seeds_that_are_added_until_it_is_shown_do_not_show_it(bench, monkeypatch, tmp_path):
    assert RECIPES["digits"].margin == 0.01
    metrics(monkeypatch, DIFFERENCES)
    for seeds in ("3", "5"):
        monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", seeds])
        accuracy.main()
        accuracy.main()  # looked at again, it is no other look
    found = kept(tmp_path)
    assert (found["looks"], found["level"], found["equal"]) == ([3, 5], 0.025, False)
    assert 0.03 < found["p"] < 0.05
    at_once = accuracy.summary(found["rows"], found["margin"])
    assert (at_once["looks"], at_once["level"], at_once["equal"]) == ([5], 0.05, True)


def test_a_look_that_an_older_record_does_not_name_counts(bench, monkeypatch, tmp_path):
    metrics(monkeypatch, DIFFERENCES)
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", "3"])
    accuracy.main()
    (path,) = tmp_path.glob("accuracy/*/*.json")
    record = json.loads(path.read_text())
    del record["recipes"]["digits"]["looks"]
    path.write_text(json.dumps(record))
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", "5"])
    accuracy.main()
    assert kept(tmp_path)["looks"] == [3, 5]


def of_other_code(monkeypatch):
    monkeypatch.setattr(_record, "where", lambda: {"vivace": "0.1.0 of another line"})


def test_looks_are_carried_over_to_rows_of_other_code(bench, monkeypatch, tmp_path):
    metrics(monkeypatch, DIFFERENCES)
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", "3"])
    accuracy.main()
    (path,) = tmp_path.glob("accuracy/*/*.json")
    record = json.loads(path.read_text())
    for key in ("vivace", "looks"):
        del record["recipes"]["digits"][key]  # of before, when neither was kept
    path.write_text(json.dumps(record))
    monkeypatch.setattr(_record, "today", lambda: "2100-01-01")
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", "5"])
    accuracy.main()
    found = kept(tmp_path)
    assert (found["looks"], found["level"], found["equal"]) == ([3, 5], 0.025, False)
    assert found["date"] == "2100-01-01"
    of_other_code(monkeypatch)
    for _ in range(2):  # as many seeds of other rows are another look, of the same rows they are none
        accuracy.main()
        assert kept(tmp_path)["looks"] == [3, 5, 5]
    record = json.loads(next(tmp_path.glob("accuracy/*/*.json")).read_text())
    record["recipes"]["digits"]["margin"] = 0.02
    next(tmp_path.glob("accuracy/*/*.json")).write_text(json.dumps(record))
    accuracy.main()
    assert kept(tmp_path)["looks"] == [5]  # another margin is another claim


def test_a_row_of_other_code_begins_anew_where_it_is_named_and_stays_where_it_is_whole(
    bench, monkeypatch, tmp_path, capsys
):
    bench.append("stopped")
    monkeypatch.setattr(accuracy, "RECIPES", {name: RECIPES[name] for name in ("digits", "keras_cnn")})
    monkeypatch.setattr("sys.argv", ["accuracy.py"])
    assert accuracy.main() == 0
    assert kept(tmp_path)["vivace"] == _record.where()["vivace"]
    each = 3 * len(accuracy.WAYS)
    assert len(bench) == 1 + 2 * each
    of_other_code(monkeypatch)
    assert accuracy.main() == 0  # hours are not lost to a line
    assert len(bench) == 1 + 2 * each
    assert "digits: 101 s -> 50 s" in (said := capsys.readouterr().out)
    assert "by other code, left as it is until digits is named" in said
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits"])
    assert accuracy.main() == 0
    assert len(bench) == 1 + 3 * each
    assert "digits: begins anew, as it was measured with another code" in capsys.readouterr().out
    assert kept(tmp_path)["vivace"] == "0.1.0 of another line"
    assert kept(tmp_path, "keras_cnn")["vivace"] != "0.1.0 of another line"


def test_rows_that_are_not_whole_are_not_joined_by_those_of_other_code(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(accuracy, "RECIPES", {"digits": RECIPES["digits"]})
    monkeypatch.setattr("sys.argv", ["accuracy.py"])
    with pytest.raises(KeyboardInterrupt):
        accuracy.main()
    of_other_code(monkeypatch)
    assert accuracy.main() == 0
    assert len([each for each in bench if each != "stopped"]) == 5 + 3 * len(accuracy.WAYS)
    assert "digits: begins anew, as it was measured with another code" in capsys.readouterr().out


def test_todays_record_of_another_budget_is_not_overwritten(bench, monkeypatch, tmp_path):
    bench.append("stopped")
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits"])
    accuracy.main()
    before = kept(tmp_path)
    monkeypatch.setattr("sys.argv", ["accuracy.py", "keras_cnn", "--budget", "60"])
    with pytest.raises(SystemExit, match=r"today's record is of another budget: put '.*json' away, or go on"):
        accuracy.main()
    assert kept(tmp_path) == before
    monkeypatch.setattr(_record, "today", lambda: "2100-01-01")
    assert accuracy.main() == 0  # on another day it is a record of its own
    assert len(list(tmp_path.glob("accuracy/*/*.json"))) == 2


def test_a_recipe_that_fails_says_why_and_the_next_one_follows(bench, monkeypatch, tmp_path, capsys):
    bench.append("stopped")
    fine = accuracy.trained

    def trained(name, way, *given):
        if (name, way) == ("digits", "plan"):
            raise accuracy.Failed("plan, seed 0: the disk is full")
        return fine(name, way, *given)

    monkeypatch.setattr(accuracy, "trained", trained)
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "keras_cnn"])
    assert accuracy.main() == 1
    assert "digits: FAILED: plan, seed 0: the disk is full" in capsys.readouterr().out
    (path,) = tmp_path.glob("accuracy/*/*.json")
    recipes = json.loads(path.read_text())["recipes"]
    assert recipes["digits"]["failed"]
    assert recipes["keras_cnn"]["equal"]
    monkeypatch.setattr(accuracy, "trained", fine)
    assert accuracy.main() == 0  # the failed one goes on
    assert "failed" not in json.loads(path.read_text())["recipes"]["digits"]


def test_a_training_that_dies_is_told_by_its_last_line(tmp_path):
    with pytest.raises(accuracy.Failed, match=r"strict, seed 0: .*there is no recipe 'nothing'"):
        accuracy.trained("nothing", "strict", 0, tmp_path / "plan.toml", 1)


def test_a_try_leaves_no_record(bench, tmp_path, monkeypatch):
    bench.append("stopped")
    monkeypatch.setattr("sys.argv", ["accuracy.py", "digits", "--seeds", "3", "--epochs", "1"])
    assert accuracy.main() == 0
    assert not list(tmp_path.rglob("*.json"))


def test_two_seeds_are_too_few(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["accuracy.py", "--seeds", "2"])
    with pytest.raises(SystemExit):
        accuracy.main()
    assert "--seeds must be at least 3, not 2" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["strict", "defaults"])
def test_a_training_tells_its_curve_and_a_metric_of_what_it_has_not_seen(way, monkeypatch, capsys):
    began = str(time.time() - 100)
    monkeypatch.setattr("sys.argv", ["_accuracy_child.py", "digits", way, "1", began, "--epochs", "1"])
    _accuracy_child.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    ((seconds, metric),) = found["curve"]
    assert 100 < seconds <= found["seconds"]
    assert metric == pytest.approx(found["metric"])  # of digits, the same data
    assert metric > 0.3
    assert found["peak_bytes"] > 2**20


def test_the_newest_result_of_each_recipe_counts_whatever_its_record():
    newer, older = record(), record(shift=-0.05)
    older["recipes"]["keras_cnn"] = older["recipes"]["digits"]
    newer |= {"date": "2026-02-02"}
    newer["recipes"]["keras_cnn"] = {"margin": 0.02, "rows": [], "failed": "the disk is full"}
    (one,) = _tasks.together([newer, older])
    assert one["date"] == "2026-02-02"
    assert one["recipes"]["digits"]["equal"]
    assert not one["recipes"]["keras_cnn"]["equal"]
    for file, words in _cases.WORDS.items():
        assert words["failed later"].format(failed="the disk is full") in _cases.page([one], [], file)
    assert _tasks.dates(one) == "2026-01-01 / 2026-02-02"
    assert _tasks.table([one], "README.md").count("\n| `") == 2
    later = {**record(), "recipes": {"digits": {**newer["recipes"]["digits"], "date": "2025-12-31"}}}
    (one,) = _tasks.together([{**later, "date": "2026-03-03"}, older])
    assert not one["recipes"]["digits"]["equal"]  # the older record's row is the newer one
    again = {**record(), "date": "2026-03-03"}
    again["recipes"]["keras_cnn"] = again["recipes"]["digits"]
    (one,) = _tasks.together([newer, older, again])
    assert "failed" not in one["recipes"]["keras_cnn"]  # measured since


def test_searches_of_another_budget_have_a_table_of_their_own():
    whole, short = record(), {**record(shift=-0.05), "budget": "60", "date": "2026-02-02"}
    whole["recipes"]["keras_cnn"] = whole["recipes"]["digits"]
    short["command"] = "scripts/bench accuracy --budget 60"
    one, other = _tasks.together([short, whole])
    assert (one["budget"], one["recipes"]["digits"]["equal"]) == ("fast", True)
    assert (other["budget"], other["recipes"]["digits"]["equal"]) == ("60", False)
    for file in _tasks.WORDS:
        first, second = _tasks.table([one, other], file).split("--budget 60`")
        assert first.count("\n| `") == 2
        assert second.count("\n| `") == 1
        assert "`scripts/bench accuracy --budget 60`" in _cases.page([one, other], [], "cases.md")


def test_a_recipe_that_is_none_any_more_is_left_out():
    found = record()
    found["recipes"]["forgotten"] = found["recipes"]["digits"]
    (one,) = _tasks.together([found])
    assert _tasks.table([one], "README.md").count("\n| `") == 1
    assert "forgotten" not in _cases.page([one], [], "cases.md")


def record(**of_rows):
    recipe = {"margin": 0.01, "rows": rows(**of_rows), **SEARCH}
    recipe |= accuracy.summary(recipe["rows"], recipe["margin"])
    machine = {"fingerprint": "0123", "device": "A processor", "cores": 2}
    kept = {"benchmark": "accuracy", "date": "2026-01-01", "vivace": "1.0", "machine": machine}
    kept |= {"budget": "fast", "command": "scripts/bench accuracy --budget fast"}
    return {**kept, "recipes": {"digits": recipe, "entities": {"margin": 0.01, "rows": []}}}


@pytest.mark.parametrize("file", _cases.WORDS)
def test_a_case_says_what_helped_what_did_not_and_what_to_do(file):
    page = _cases.page([record()], [], file)
    assert RECIPES["digits"].metric in page
    assert f" {SEEDS} " in page
    assert "`bf16_autocast`" in page
    assert "`compile` (0.70x)" in page
    assert "`ddp` (one device is here)" in page
    assert "entities" not in page  # not trained to its end yet
    assert _cases.WORDS[file]["take"][:12] in page
    worse, left = (
        _cases.page([record(**of)], [], file) for of in ({"shift": -0.05}, {"plan_seconds": 100.0})
    )
    assert _cases.WORDS[file]["doubt"] in worse
    assert _cases.WORDS[file]["of"].format(reached=0, seeds=SEEDS) in worse
    assert _cases.WORDS[file]["leave"][:24] in left
    free = _cases.WORDS[file]["cost_nothing"].format(
        seconds="1 min 30 s"
    )  # no gain beyond noise pays it back
    assert (free in page, free in left) == (False, True)
    assert _cases.WORDS[file]["none"] in _cases.page([], [], file)
    failed = record()
    failed["recipes"]["digits"] = {"margin": 0.01, "rows": [], "failed": "the disk is full"}
    assert "the disk is full" in _cases.page([failed], [], file)
    later = record()
    later["recipes"]["digits"]["failed"] = "the disk is full"
    assert _cases.WORDS[file]["failed later"].format(failed="the disk is full") in (
        told := _cases.page([later], [], file)
    )
    assert RECIPES["digits"].metric in told
    assert _cases.WORDS[file]["failed row"].partition("{")[0] not in told


@pytest.mark.parametrize("file", _cases.WORDS)
def test_a_plan_that_is_no_faster_than_pytorch_as_it_comes_is_not_advised(file):
    words, found = _cases.WORDS[file], record()
    one = found["recipes"]["digits"]
    for row in one["rows"]:
        row["seconds"] = 70.0 + row["seed"] if row["way"] == "defaults" else row["seconds"]
    one |= accuracy.summary(one["rows"], one["margin"])
    page = _cases.page([found], [], file)
    paid = words["cost"].format(seconds="1 min 30 s", runs=5)  # which save 20 s each, not 50
    assert paid in page
    assert words["take"].partition("{")[0] in page
    for row in one["rows"]:
        row["seconds"] = 51.0 + row["seed"] % 2 if row["way"] == "defaults" else row["seconds"]
    one |= accuracy.summary(one["rows"], one["margin"])
    page = _cases.page([found], [], file)
    assert one["speed"]["strict"]["low"] > 1 > one["speed"]["defaults"]["low"]
    assert words["leave"].partition("{")[0] in page
    assert words["planned"].format(what="`bf16_autocast`") in page
    assert words["cost_nothing"].format(seconds="1 min 30 s") in page
    assert words["helped"].partition("{")[0] not in page
    one["plan"] = {}
    assert words["leave_steps"] in _cases.page([found], [], file)


@pytest.mark.parametrize("file", _cases.WORDS)
def test_a_later_look_says_how_small_p_had_to_be(file):
    found = record()
    one = found["recipes"]["digits"]
    one |= accuracy.summary(one["rows"], one["margin"], [3])
    said = _cases.WORDS[file]["looked"].format(number=2, level=0.025)
    assert said in _cases.page([found], [], file)
    table = _tasks.table([found], file.replace("cases", "README"))
    assert said in table


TUNED = {
    "job": "lstm",
    "date": "2026-01-02",
    "vivace": "1.0",
    "machine": {"fingerprint": "0123", "device": "A processor", "cores": 2},
    "plan": {"bf16_autocast": {}},
    "reason": "",
    "speedup": {"estimate": 2.5, "low": 2.4, "high": 2.6},
    "waterfall": [
        {"step": "host_allocator", "ratio": {"estimate": 1.5, "low": 1.4, "high": 1.6}},
        {"step": "bf16_autocast", "ratio": {"estimate": 2.5, "low": 2.4, "high": 2.6}},
    ],
    "break_even_steps": 41,
    "seconds": 120.0,
    "trials": SEARCH["trials"],
}


@pytest.mark.parametrize("file", _cases.WORDS)
def test_a_tuned_job_is_a_case_of_steps(file):
    older = TUNED | {"date": "2026-01-01", "speedup": {"estimate": 9.0, "low": 9.0, "high": 9.0}}
    page = _cases.page([], [TUNED, older], file)
    assert "2.40-2.60" in page
    assert "9.00" not in page  # the newest record of a job counts
    assert "`bf16_autocast`" in page
    assert "1.50" in page
    assert "`compile` (0.70x)" in page
    assert " 41" in page
    assert _cases.WORDS[file]["take_steps"] in page
    none = _cases.page([], [TUNED | {"plan": {}, "reason": "the machine was unsteady"}], file)
    assert "the machine was unsteady" in none
    assert _cases.WORDS[file]["leave_steps"] in none


@pytest.mark.parametrize("file", _cases.WORDS)
def test_what_brought_nothing_in_its_turn_did_not_help(file):
    words, after = _cases.WORDS[file], {"a": 1.5, "b": 2.5, "c": 2.45, "d": 2.452}
    steps = [{"step": name, "ratio": {"estimate": ratio}} for name, ratio in after.items()]
    page = _cases.page([], [TUNED | {"waterfall": steps}], file)
    parts = [
        words["part"].format(name=name, before=before, after=ratio)
        for (name, ratio), before in zip(after.items(), [1.0, *after.values()], strict=False)
    ]
    assert words["helped"].format(what=f"{parts[0]}, {parts[1]}") in page
    assert words["without"].format(what=f"{parts[2]}, {parts[3]}") in page


@pytest.mark.parametrize("file", _tasks.WORDS)
def test_the_first_table_is_time_to_the_same_metric(file):
    words = _tasks.WORDS[file]
    table = _tasks.table([record()], file)
    assert "`digits`: accuracy" in table
    assert "1 min 42 s, 52 s" in table
    assert "1.97x (" in table
    assert "; 1.93x (" in table  # over PyTorch as it comes
    assert "0.900, 0.900" in table
    assert words["same"][True].partition("{")[0] in table
    worse = _tasks.table([record(shift=-0.05)], file)
    assert words["same"][False].partition("{")[0] in worse
    assert words["never"].format(missing=SEEDS, seeds=SEEDS) in worse
    assert words["none"] in _tasks.table([{**record(), "recipes": {}}], file)


@pytest.mark.parametrize("file", _evidence.WORDS)
def test_the_evidence_begins_with_the_geometric_mean(file):
    (_, first), (_, second) = _evidence.accuracy(record(), file)
    assert first.startswith("1.97x")
    assert "0.9000" in second
    assert not list(_evidence.accuracy({"recipes": {}}, file))
