"""Tuning from end to end on a job whose best plan is known; and everything that candidates can do wrong."""

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import vivace
from vivace.errors import AnswerIsNo, FolderError, InputError
from vivace.events import EventKind
from vivace.files import take_lock
from vivace.ledger import Code, Ledger, Outcome, Trial
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.technique import Numerics
from vivace.technique.registry import find
from vivace.tuning.bench import Bench
from vivace.tuning.budget import parse_memory
from vivace.tuning.objective import ONE
from vivace.tuning.requests import Done, Verify
from vivace.tuning.search import Search, Setting
from vivace.tuning.setting import Conclusion
from vivace.tuning.times import Times
from vivace.tuning.tuner import _Tuning, as_called
from vivace.verifying.verdict import Verdict

STAGE = f"{Path(__file__).parents[1] / 'scenes' / 'stage.py'}:job"
BUDGET_SECONDS = 26
pytestmark = pytest.mark.usefixtures("hurried")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, hurried):
    folder = tmp_path_factory.mktemp("tuned") / "run"
    events = []

    def listen(event):
        events.append(event.kind)

    # As long as that a stutter of 0.3 s while a plan warms up does not decide whether it pays.
    result = vivace.tune(STAGE, budget=BUDGET_SECONDS, steps=1000, out=folder, on_event=listen)
    return result, folder, events


@pytest.mark.slow
def test_the_planted_speed_up_is_found_verified_and_confirmed(tuned):
    result, folder, events = tuned
    assert "planted_quick" in result.plan.names, result.reason
    assert result.speedup.low > 2.0
    assert result.verdict is not None
    assert result.verdict.kept
    assert Plan.load(folder / "plan.toml") == result.plan
    assert {"phase", "trial_begin", "trial_end", "verdict"} <= set(events)
    assert " + ".join(step["step"] for step in result.waterfall) == " + ".join(result.plan.names)
    confirmed = [trial for trial in result.trials if trial.role == "confirmation"]
    assert confirmed[-1].ratio == result.speedup
    assert (result.outcome, result.exit_code) == ("faster", 0)
    assert result.waterfall[-1]["ratio"] == dataclasses.asdict(result.speedup)


@pytest.mark.slow
def test_the_search_can_be_replayed_from_its_ledger(tuned):
    result, folder, _ = tuned
    Source(STAGE).load()  # registers the planted techniques, which the plans name
    records = Ledger(folder / "ledger.jsonl").read()
    begin = next(i for i, document in enumerate(records) if document["record"] == "search")
    search = Search(Setting.from_dict({k: v for k, v in records[begin].items() if k != "record"}))
    asked = []
    for document in records[begin + 1 :]:
        answer = _answer(dict(document))
        if answer is not None:
            asked.append(search.ask())
            plan = getattr(asked[-1], "plan", None)
            told = document.get("techniques", document.get("plan"))  # a warm-up's line names none
            assert plan is None or told is None or plan.to_dict() == told
            search.tell(answer)
    assert len(asked) > 5
    assert search.ask() is None
    assert search.conclusion.plan == result.plan
    assert search.conclusion.speedup == result.speedup


def _answer(document):
    """What a search was told, of a line of its ledger; None of the other lines."""
    kind = document.pop("record")
    if kind == "trial" and not document["role"].startswith("baseline"):
        return Trial.from_dict(document)
    if kind == "verdict":
        return Verdict(**{key: value for key, value in document.items() if key != "plan"})
    if kind == "done":
        plan = Plan.from_dict(document["plan"]) if document["plan"] is not None else None
        return Done(document["seconds"], plan, document["warmup_seconds"])
    return None


@pytest.mark.slow
def test_what_may_help_is_tried_before_a_second_baseline_where_time_is_short(tuned):
    roles = [trial.role for trial in tuned[0].trials if trial.status != "refused"]
    assert roles[0] == "candidate"
    assert set(tuned[0].baselines) == {"strict_fp32", "default", "tf32"}
    assert tuned[0].baselines["default"] or "too short" in tuned[0].baseline_notes["default"]
    for trial in tuned[0].trials:
        if trial.role == "baseline_default" and trial.ratio:  # as the page draws it
            strict = tuned[0].baselines["strict_fp32"]
            assert tuned[0].baselines["default"] == pytest.approx(strict * trial.ratio.counts)


@pytest.mark.slow
def test_a_confirmation_takes_several_pairs_of_processes(tmp_path, monkeypatch):
    for name in ("MOST_ROUNDS", "MOST_LATE_ROUNDS"):
        monkeypatch.setattr(f"vivace.tuning.bench.{name}", 3)
    monkeypatch.setattr("vivace.ledger.WIDE", 1e9)  # also where the machine is busy
    ledger = Ledger(tmp_path / "ledger.jsonl")
    bench = Bench(Source(STAGE), vivace.inspect(), ledger, _deaf, allow=Numerics.ROUNDING, memory=None)
    try:
        bench.check()
        bench.open_reference()
        trial = bench.confirm(Plan([find("fused_optimizer")(kind="foreach")]), seconds=20, round_seconds=1)
        refused = bench.confirm(Plan([find("tf32")()]), seconds=20, round_seconds=1)
    finally:
        bench.close()
    assert 1 <= trial.rounds <= 3
    assert trial.rounds == 3 or trial.seconds > 10
    assert trial.ratio.low <= trial.ratio.estimate <= trial.ratio.high
    assert len(trial.pairs) >= 4 * trial.rounds
    assert all(seconds > 0 for seconds in trial.evaluations)
    assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial
    assert (refused.status, refused.rounds) == ("refused", 1)


@pytest.mark.slow
def test_a_fast_plan_that_trains_another_model_does_not_win(tuned):
    result, folder, _ = tuned
    measured = [t for t in result.trials if "planted_wrong" in t.techniques and t.status == "measured"]
    assert measured, "the wrong technique was fast, and must have been measured"
    assert "planted_wrong" not in result.plan.names
    broken = [v for v in Ledger(folder / "ledger.jsonl").read("verdict") if not v["kept"]]
    assert broken
    assert "planted_wrong" in broken[0]["plan"]


@pytest.mark.slow
def test_every_technique_has_a_trial_with_a_reason_or_a_ratio(tuned):
    result, _, _ = tuned
    tried = {name for trial in result.trials for name in trial.techniques}
    assert {"planted_crash", "planted_refusal", "planted_semantics", "tf32", "channels_last", "ddp"} <= tried
    reasons = {next(iter(t.techniques), ""): t for t in result.trials if t.status != "measured"}
    assert "SIGABRT" in next(t.reason for t in result.trials if "planted_crash" in t.techniques)
    refusals = [t for t in result.trials if "planted_refusal" in t.techniques]
    assert any("it never acts" in t.reason or t.code == Code.NOT_TRIED for t in refusals)
    assert "promises SEMANTICS" in reasons["planted_semantics"].reason
    assert all(t.reason for t in result.trials if t.status != "measured")


@pytest.mark.slow
def test_the_document_holds_the_contract_and_the_report_is_written(tuned):
    result, folder, _ = tuned
    document = json.loads(json.dumps(result.to_dict()))
    keys = "plan plan_path speedup baselines promise verdict break_even_steps trials report_path seconds"
    assert set(keys.split()) <= set(document)
    assert set(document["baselines"]) == {"strict_fp32", "default", "tf32"}
    trial_keys = {"techniques", "status", "reason", "ratio", "peak_bytes", "warmup_seconds"}
    assert all(trial_keys <= set(trial) for trial in document["trials"])
    assert "planted_quick" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_second_run_builds_upon_the_first_and_ctrl_c_keeps_its_best(tuned, begin_command, tmp_path):
    Source(STAGE).load()  # registers the planted techniques, which the plan may name
    first = [trial for trial in tuned[0].trials if trial.ratio]
    (tmp_path / "run").mkdir()
    shutil.copy(tuned[1] / "ledger.jsonl", tmp_path / "run")
    command = begin_command("tune", STAGE, "--budget", "120", "--json", "--out", str(tmp_path / "run"))
    ledger, deadline = Ledger(tmp_path / "run" / "ledger.jsonl"), time.monotonic() + 600
    while time.monotonic() < deadline and command.process.is_alive():
        second = [t for t in ledger.trials() if t.ratio][len(first) :]
        if any(trial.role == "candidate" for trial in second):
            break
        time.sleep(0.2)
    os.kill(command.pid, signal.SIGTERM)  # taken for Ctrl-C
    code, output, errors = command.end(600)
    assert code == 130, errors
    tried = next(trial for trial in second if trial.role == "candidate")
    assert "planted_quick" in tried.techniques
    assert "planted_wrong" not in tried.techniques  # it was fast, and caught
    document = json.loads(output)
    assert document["interrupted"]
    assert document["plan"] == tried.techniques
    assert Plan.load(tmp_path / "run" / "plan.toml").to_dict() == document["plan"]
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_trial_that_stands_in_the_ledger_counts_though_ctrl_c_comes_at_once(tmp_path):
    faster = []

    def listen(event):
        trial = event.payload["trial"] if event.kind == EventKind.TRIAL_END else None
        if trial and trial.role == "candidate" and trial.ratio and trial.ratio.low > 1.5:
            faster.append(trial.techniques)
            raise KeyboardInterrupt

    result = vivace.tune(STAGE, budget=BUDGET_SECONDS, out=tmp_path / "run", on_event=listen)
    assert result.interrupted
    assert [result.plan.to_dict()] == faster
    assert Plan.load(tmp_path / "run" / "plan.toml") == result.plan


def test_what_compiling_takes_is_foretold_by_this_machines_pace(tmp_path, monkeypatch):
    taught = []
    monkeypatch.setattr("vivace.tuning.tuner.compiling_pace", lambda fingerprint: 3.0)
    monkeypatch.setattr("vivace.tuning.tuner.learn_pace", lambda *given: taught.append(given))

    def listen(event):
        if event.kind == EventKind.TRIAL_BEGIN:
            raise KeyboardInterrupt

    result = vivace.tune(STAGE, budget=BUDGET_SECONDS, out=tmp_path / "run", on_event=listen)
    (begun,) = Ledger(tmp_path / "run" / "ledger.jsonl").read("search")
    ((fingerprint, foretold_seconds, trials),) = taught
    assert begun["compiling_seconds"] == pytest.approx(3.0 * foretold_seconds)
    assert fingerprint == vivace.inspect().fingerprint
    assert trials == result.trials


def test_an_end_long_after_the_budget_is_told_before_verifying_and_again_where_it_is_later():
    heard = []
    bench = SimpleNamespace(on_event=lambda kind, payload: heard.append((kind, payload["text"])))
    search = SimpleNamespace(times=Times(60.0, 0.1, 3.0))  # 16 s of verifying and 10 s of confirming
    tuning = SimpleNamespace(search=search, bench=bench, seconds=60.0, told_late=0.0)
    plan = Plan([find("fused_optimizer")()])
    _Tuning._tell_late(tuning, Verify(plan, 3.0, left=22.0))
    assert not heard, "4 s of a minute are not worth a line"
    for _ in range(2):
        _Tuning._tell_late(tuning, Verify(plan, 3.0, left=5.0))
    ((kind, text),) = heard
    assert kind == "notice"
    assert "takes about 21 s more than the budget" in text
    _Tuning._tell_late(tuning, Verify(plan, 3.0, left=5.0, more=2))
    assert "takes about 52 s more than the budget" in heard[-1][1]


@pytest.mark.parametrize("crowd", [True, False])
def test_beside_others_plans_are_verified_on_one_thread(tmp_path, monkeypatch, crowd):
    monkeypatch.setattr("vivace.training.crew.crowded", lambda: crowd)
    monkeypatch.setenv("THREADS_SEEN", str(tmp_path / "seen"))
    machine, source = vivace.inspect(), Source(STAGE.replace("stage.py", "two_threads.py"))
    ledger, plan = Ledger(tmp_path / "ledger.jsonl"), Plan([find("fused_optimizer")()])
    bench = Bench(source, machine, ledger, lambda *_: None, allow=Numerics.ROUNDING, memory=None)
    tuning = SimpleNamespace(bench=bench, machine=machine, verifier=None)
    try:
        verdict = _Tuning._judged(tuning, Verify(plan, 2.0, left=2.0))
    finally:
        tuning.verifier.close()
        bench.close()
    assert verdict.kept, verdict.reason
    assert set((tmp_path / "seen").read_text(encoding="utf-8").split()) == {"1" if crowd else "2"}


@pytest.mark.slow
def test_a_memory_budget_that_nothing_fits_is_answered_with_no(tmp_path):
    """Ten seconds may end before the blocks' turn comes; the answer says which of the two it was."""

    def answered():  # where the machine is too unsteady for any trial, the same command goes on
        for _ in range(3):
            result = vivace.tune(STAGE, budget=10, memory="1KiB", out=tmp_path / "run")
            assert result.outcome == "could_not_measure", result.reason

    with pytest.raises(
        AnswerIsNo,
        match=r"no plan fits into 1.00 KiB and keeps its promise; the smallest peak measured is .* KiB, "
        r"and (no decisions for the blocks bring|the budget ended before its blocks could be looked at)",
    ):
        answered()


def test_that_nothing_fits_stands_in_the_ledger_and_on_the_page(tmp_path):
    ledger, tuning = Ledger(tmp_path / "ledger.jsonl"), object.__new__(_Tuning)
    trial = Trial({"compile": {}}, "p", "m", "j", "measured", ratio=ONE, pairs=((1.0, 1.0),), peak_bytes=2048)
    tuning.bench = SimpleNamespace(
        memory=1024, trials=[trial], no_blocks="", observed={"peak_bytes": 4096}, ledger=ledger
    )
    tuning.folder, tuning.begin = tmp_path, time.monotonic()
    ledger.append("run", {"job": {"name": "job.py:job"}, "memory_bytes": 1024})
    ledger.append("trial", {**trial.to_dict(), "ratio": {"estimate": 1.4, "low": 1.3, "high": 1.5}})
    told = str(tuning._nothing_fits())
    assert told.startswith("no plan fits into 1.00 KiB and keeps its promise; the smallest peak measured is")
    page = (tmp_path / "report.html").read_text()
    assert "Nothing fits into the memory that is allowed" in page
    assert told[1:] in page
    assert "Interrupted" not in page


def test_a_training_of_a_second_is_told_before_the_search_that_it_is_too_short(tmp_path):
    heard = []
    result = vivace.tune(STAGE, out=tmp_path, on_event=lambda event: heard.append(event.payload.get("name")))
    assert (result.outcome, result.exit_code, len(result.plan)) == ("too_short", 0, 0)
    assert " and 16 steps of " in result.reason  # of a second the start is the larger part
    parts = result.training_parts["reference"]
    assert result.training_seconds == {"reference": pytest.approx(sum(parts.values()))}
    assert parts["start"] > parts["steps"] > 0
    assert "--runs" in result.reason
    assert result.baselines["strict_fp32"] > 0
    assert [phase for phase in heard if phase] == ["checking the job"]
    assert Plan.load(tmp_path / "plan.toml") == Plan()
    found = Plan.from_dict({"fused_optimizer": {}})
    for name in ("plan.toml", "plan-long.toml"):
        found.save(tmp_path / name)
    assert vivace.tune(STAGE, out=tmp_path, on_event=heard.append).outcome == "too_short"
    stays = f"'{tmp_path / 'plan.toml'}' stays as an earlier search left it"
    assert stays in [event.payload.get("text") for event in heard if not isinstance(event, str | None)]
    assert [Plan.load(tmp_path / name) for name in ("plan.toml", "plan-long.toml")] == [found, found]
    assert "too short to tune" in (tmp_path / "report.html").read_text()


def test_with_a_limit_of_memory_a_short_training_is_searched_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("vivace.tuning.tuner.least_seconds", lambda step_seconds: 1e6)
    monkeypatch.setattr(
        _Tuning, "run", lambda self: self.finish(Conclusion(Plan(), ONE, Outcome.INTERRUPTED))
    )
    outcomes = [
        vivace.tune(STAGE, out=tmp_path / str(memory), memory=memory).outcome for memory in ("8GiB", None)
    ]
    assert outcomes == [Outcome.INTERRUPTED, Outcome.TOO_SHORT]


STREAM = """
import torch
import vivace
from torch.utils.data import DataLoader, IterableDataset
from vivace.testing.jobs import mlp


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(64):
            yield torch.full((16,), float(number)), number % 4


def job():
    plain = mlp()
    return vivace.Job(
        model=lambda: torch.nn.Linear(16, 4),
        data=lambda: DataLoader(Stream(), batch_size=8),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=plain.optimizer,
        epochs=3,
    )
"""


def heard_until(phase, job, **settings):
    """What was told until a phase began, at which the person pressed Ctrl-C; and the result."""
    heard = []

    def listen(event):
        heard.append(event.payload.get("text", ""))
        if event.payload.get("name") == phase:
            raise KeyboardInterrupt

    result = vivace.tune(job, on_event=listen, **settings)
    return " ".join(filter(None, heard)), result


def test_a_budget_longer_than_the_training_is_told_before_the_search(tmp_path):
    told, result = heard_until("opening the reference", STAGE, budget="2m", out=tmp_path)
    assert "The training takes about " in told
    assert ", the budget is 2 min: tuning may take longer than it can save" in told
    assert result.interrupted


def test_a_search_that_ends_before_its_first_trial_leaves_an_earlier_plan(tmp_path):
    heard_until("opening the reference", STAGE, budget=BUDGET_SECONDS, out=tmp_path)
    found = Plan.from_dict({"fused_optimizer": {}})
    for name in ("plan.toml", "plan-long.toml"):
        found.save(tmp_path / name)
    told, result = heard_until("opening the reference", STAGE, budget=BUDGET_SECONDS, out=tmp_path)
    assert result.interrupted
    assert f"'{tmp_path / 'plan.toml'}' stays as an earlier search left it" in told
    assert [Plan.load(tmp_path / name) for name in ("plan.toml", "plan-long.toml")] == [found, found]


def test_the_length_of_a_stream_is_asked_for(tmp_path):
    (tmp_path / "stream.py").write_text(STREAM)
    job = f"{tmp_path / 'stream.py'}:job"
    told, result = heard_until("opening the reference", job, out=tmp_path / "out")
    assert "give --steps N" in told
    assert "sought for 10 min" in told
    assert (result.job_steps, result.training_seconds) == (None, {})
    told, result = heard_until("opening the reference", job, steps=100_000_000, out=tmp_path / "out")
    assert "--steps" not in told
    assert result.job_steps == 100_000_000


def test_blocks_that_do_not_fit_are_an_answer_with_the_smallest_peak(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    bench = Bench(Source(STAGE), vivace.inspect(), ledger, _deaf, allow=Numerics.ROUNDING, memory=1024)
    try:
        bench.check()
        assert bench.choose_blocks(300.0) is None
    finally:
        bench.close()
    (chosen,) = ledger.read("memory")
    assert "bring the peak to 1.00 KiB; the smallest measured is" in chosen["reason"]
    assert bench.no_blocks == f", and {chosen['reason']}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "quick"}, "the budget is 'quick'; it must be fast, balanced, max"),
        ({"budget": 1}, "the budget is 1"),
        ({"budget": float("nan")}, "the budget is nan"),
        ({"runs": 0}, "runs is 0; it must be 1 or more"),
        ({"memory": "lots"}, "the memory budget is 'lots'"),
        ({"memory": "-3GiB"}, "the memory budget is '-3GiB'"),
        ({"allow": "anything"}, "allow is 'anything'; it must be exact, rounding or semantics"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    with pytest.raises(InputError) as caught:
        vivace.tune(STAGE, **arguments, out=tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_sizes():
    assert [parse_memory(m) for m in ("20GiB", "1.5 gib", "800MiB", "2GB", 7, None)] == [
        20 * 2**30,
        int(1.5 * 2**30),
        800 * 2**20,
        2 * 10**9,
        7,
        None,
    ]


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FolderError, match=r"is not empty \(thesis\.txt\): name another with --out"):
        vivace.tune(STAGE, out=tmp_path)
    with pytest.raises(FolderError, match="is a file; name a folder"):
        vivace.tune(STAGE, out=tmp_path / "thesis.txt")
    with pytest.raises(FolderError, match=r"cannot be made, as '.*thesis\.txt' is a file"):
        vivace.tune(STAGE, out=tmp_path / "thesis.txt" / "below")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_plan_that_no_search_wrote_stays(tmp_path):
    (tmp_path / "plan.toml").write_text("format = 1\n")
    with pytest.raises(FolderError, match=r"is not empty \(plan\.toml\): name another with --out"):
        vivace.tune(STAGE, out=tmp_path)
    assert (tmp_path / "plan.toml").read_text() == "format = 1\n"


@pytest.mark.fault(35)
def test_two_searches_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    with take_lock(folder, "tune"), pytest.raises(FolderError, match="another tune is running in"):
        vivace.tune(STAGE, out=folder)
    assert [path.name for path in folder.iterdir()] == ["lock"]


def _deaf(kind, payload):
    """Listen to nothing."""


def test_a_call_in_python_is_told_with_what_is_not_its_default():
    assert as_called("auto", 1, None, None, "rounding", Path("runs/tune")) == "vivace.tune(job)"
    told = as_called("5m", "auto", 100, "2GiB", "exact", Path("other"))
    given = "budget='5m', runs='auto', steps=100, memory='2GiB', allow='exact', out='other'"
    assert told == f"vivace.tune(job, {given})"
