"""Tuning beside others: what counts as the right plan, and that the others are really there."""

import time

import _record
import busy
import psutil
import pytest

from vivace.plan import Plan

GOOD, FAIR = Plan.from_dict({"channels_last": {}}), Plan.from_dict({"host_allocator": {}})


@pytest.mark.parametrize(
    ("beside", "speeds", "right"),
    [
        (GOOD, {Plan(): 2.0}, True),
        (FAIR, {GOOD: 0.96, Plan(): 1.92}, True),  # another plan that is as good
        (FAIR, {GOOD: 0.75, Plan(): 1.5}, False),
        (FAIR, {GOOD: 1.0, Plan(): 0.9}, False),  # both are slower than none
        (Plan(), {GOOD: 0.5}, False),
        (Plan(), {GOOD: 0.98}, True),
    ],
)
def test_right_is_what_is_as_fast_as_the_plan_that_was_found_alone(
    beside, speeds, right, tmp_path, monkeypatch
):
    plans = [GOOD, beside]

    def tuned(reference, budget, out):
        told = {"outcome": "faster", "speedup": {"estimate": 2.0}, "seconds": 120.0, "trials": []}
        return told | {"plan": plans.pop(0).to_dict()}

    monkeypatch.setattr(busy, "tuned", tuned)
    monkeypatch.setattr(busy, "busy", lambda load: busy.contextlib.nullcontext())
    took = busy.speed
    monkeypatch.setattr(
        busy,
        "speed",
        lambda *s: took(*s) if s[1] == s[2] else {"estimate": speeds[s[2]]},  # else it runs
    )
    row = busy.row_of("gpt", tmp_path, "fast", 4)
    assert row["right"] is right
    assert ("right" if right else "WRONG") in busy.told(row)


def test_a_row_is_not_run_again_unless_something_else_is_asked(tmp_path, monkeypatch):
    ran, written = [], []

    def row_of(name, work, budget, load):
        ran.append((name, budget, load))
        found, over = {"plan": {}}, {"alone": {"estimate": 1.0}}
        return {"job": name, "right": True, "alone": found, "beside": found, "over": over}

    monkeypatch.setattr(busy, "row_of", row_of)
    monkeypatch.setattr(busy, "JOBS", ("gpt",))
    monkeypatch.setattr(_record, "write", written.append)
    for words in (["gpt"], [], ["--load", "2"], ["--budget", "30"], []):
        monkeypatch.setattr("sys.argv", ["busy.py", *words, "--work", str(tmp_path)])
        busy.main()
        assert bool(written) is (words != ["gpt"])  # some jobs are no record of all
    assert ran == [("gpt", "fast", 4), ("gpt", "fast", 2), ("gpt", "30", 4)]
    monkeypatch.setattr(busy, "JOBS", ("gpt", "mlp"))
    with monkeypatch.context() as patch:  # Ctrl-C in the second one
        patch.setattr(busy, "row_of", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        before = len(written)
        with pytest.raises(KeyboardInterrupt):
            busy.main()
        assert len(written) == before
    monkeypatch.setattr(busy, "JOBS", ("gpt",))
    assert written[-1]["command"] == "scripts/bench busy --load 4 --budget fast"
    here = _record.where()
    monkeypatch.setattr(_record, "where", lambda: {**here, "machine": "another"})
    busy.main()
    assert len(ran) == 4


def spawned(before):
    """The processes that have come since, but for the one that `multiprocessing` counts its resources in."""
    children = set(psutil.Process().children(recursive=True)) - before
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def within(seconds, condition):
    """Does it hold before so much time is over?"""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def test_the_others_are_there_and_gone_again():
    before = set(psutil.Process().children(recursive=True))
    with busy.busy(2):
        assert within(60, lambda: len(spawned(before)) == 2)
        others = spawned(before)
        for other in others:
            used = other.cpu_times().user
            assert within(60, lambda other=other, used=used: other.cpu_times().user > used + 0.2)
    assert psutil.wait_procs(others, timeout=20)[1] == []
