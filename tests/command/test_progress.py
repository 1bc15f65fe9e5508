"""What the terminal says while `tune` and `train` work, and at their end: a line a trial, no word torn."""

import dataclasses
import errno
import io
import os
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.spinner import Spinner

from vivace.command import endings
from vivace.command import progress as progress_module
from vivace.command.progress import TrainProgress, TuneProgress, VerifyProgress
from vivace.events import Event, EventKind
from vivace.ledger import Outcome, Ratio, Trial
from vivace.pages.status import Status
from vivace.plan import Plan
from vivace.training.training import Run
from vivace.tuning.result import LongPlan, Result
from vivace.verifying.table import headline
from vivace.verifying.verdict import Verdict

PLAN = {"host_allocator": {}, "channels_last": {}, "bf16_weights": {}, "fused_optimizer": {"kind": "foreach"}}


def trial(techniques, reason="", **fields):
    status = "refused" if reason else "measured"
    given = {"techniques": techniques, "plan_id": "1", "machine": "m", "job": "j", "status": status}
    return Trial(**given, reason=reason, promise="exact", **fields)


def measured(techniques):
    return trial(techniques, ratio=Ratio(2.0, 1.9, 2.1), pairs=((2.0, 1.0),), rounds=1)


def refused(name, reason="it acts on cuda, and this job runs on cpu"):
    return "trial_end", {"trial": trial({name: {}}, reason)}


def shown(progress, *events, terminal=False):
    """Each line without its time."""
    file = io.StringIO()
    with progress:
        progress._console = Console(file=file, width=80, soft_wrap=True)
        if terminal:
            progress._status = Console(file=io.StringIO()).status("")
        for event in events:
            progress(Event(EventKind(event[0]), event[1]))
    return [line[10:] for line in file.getvalue().splitlines()]


def test_refusals_without_a_trial_share_a_line_a_reason():
    lines = shown(
        TuneProgress(),
        refused("tf32"),
        refused("ddp", "at most 1.00x is predicted on this job"),
        refused("allocator"),
        ("trial_begin", {"plan": "channels_last"}),
        ("trial_end", {"trial": measured({"channels_last": {}})}),
        ("trial_begin", {"plan": "compile"}),
        refused("compile"),
        refused("cuda_graph_step"),
    )
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "tf32, allocator: it acts on cuda, and this job runs on cpu",
        "ddp: at most 1.00x is predicted on this job",
        "(1.90-2.10)  channels_last",
        "compile: it acts on cuda, and this job runs on cpu",
        "cuda_graph_step: it acts on cuda, and this job runs on cpu",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_on_a_terminal_long_plans_are_folded_between_words(terminal):
    events = [("trial_begin", {"plan": ""}), ("trial_end", {"trial": measured(PLAN)})]
    lines = shown(TuneProgress(), *events, terminal=terminal)
    assert len(lines) == (2 if terminal else 1)
    assert " ".join(" ".join(lines).split()) == (
        "2.00x (1.90-2.10) host_allocator + channels_last + bf16_weights + fused_optimizer (kind=foreach)"
    )
    assert all(len(line) <= 70 for line in lines) is terminal


def test_a_training_that_goes_on_says_where():
    progress = TrainProgress()
    lines = shown(
        progress,
        ("resume", {"step": 19}),
        ("epoch", {"epoch": 1, "step": 32, "loss": 0.5}),
        ("stop", {"interrupted": False, "steps": 64, "run_path": "runs/train"}),
    )
    assert lines == ["goes on after step 19", "epoch 1  step 32  loss 0.5"]
    assert progress.ended


def test_a_training_of_known_length_says_when_it_ends():
    progress = TrainProgress()
    begun = progress._begin
    times = [begun, begun, begun + 62.0]
    progress._now = Status(lambda: times.pop(0))
    lines = shown(
        progress,
        ("begin", {"step": 0, "epochs": 3, "steps": 96, "steps_per_epoch": 32}),
        ("step", {"epoch": 1, "step": 1, "loss": 0.9}),
        ("epoch", {"epoch": 1, "step": 32, "loss": 0.5}),
    )
    assert lines == ["epoch 1/3  step 32  loss 0.5  ends in 2 min 08 s"]


def test_a_trial_that_wanted_memory_says_so():
    crowded = dataclasses.replace(measured({"channels_last": {}}), full=3)
    begun = "trial_begin", {"plan": "channels_last", "role": "candidate"}
    lines = shown(TuneProgress(), begun, ("trial_end", {"trial": crowded}))
    assert " ".join(lines).endswith("channels_last, while the GPU's memory was full 3 times")


def test_a_terminal_that_is_gone_ends_no_training():
    def stop():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with TrainProgress() as progress:
        progress._status = SimpleNamespace(stop=stop)


@pytest.mark.parametrize(
    ("metric", "told"), [(-3.2e-5, "-3.2e-05"), (0.0, "0.0000"), (-12345.67, "-12345.6700")]
)
def test_a_small_metric_is_no_nought(metric, told):
    epoch = {"epoch": 1, "step": 32, "metric": metric, "metric_data": "validation"}
    assert shown(TrainProgress(), ("epoch", epoch)) == [f"epoch 1  step 32  metric {told}"]


def test_a_notice_is_in_letters_that_every_terminal_has():
    (line,) = shown(TrainProgress(), ("notice", {"text": "rank 1 is 5.03\u00d7 slower (4.50\u20135.60)"}))
    assert line == "rank 1 is 5.03x slower (4.50-5.60)"


@pytest.mark.parametrize(("width", "lines"), [(80, 4), (40, 8)])
def test_on_a_narrow_terminal_a_line_has_room(width, lines):
    file, progress = io.StringIO(), TuneProgress()
    with progress:
        progress._console = Console(file=file, width=width)
        progress._status = Console(file=io.StringIO()).status("")
        progress._print("refused  " + "a reason of some words " * 7, indent=20)
    found = file.getvalue().rstrip().splitlines()
    assert len(found) <= lines
    assert all(len(line) <= width for line in found)


def test_without_a_terminal_a_long_epoch_tells_a_line_a_minute(monkeypatch):
    monkeypatch.setattr(progress_module, "A_LINE_SECONDS", 0.0)
    begun = ("begin", {"step": 0, "epochs": 3, "steps": 96, "steps_per_epoch": 32})
    step = ("step", {"epoch": 1, "step": 7, "loss": 0.5, "samples_per_second": 1204.0})
    line = "epoch 1/3, step 7/32, loss 0.5, 1,204 samples/s"
    assert shown(TrainProgress(), begun, step) == [line]
    assert shown(TrainProgress(), begun, step, terminal=True) == []


def test_the_line_of_a_terminal_runs_on_and_is_one_line():
    progress = TuneProgress()
    with progress:
        progress(Event(EventKind.PHASE, {"name": "searching", "budget_seconds": 600.0}))
        progress(Event(EventKind.TRIAL_BEGIN, {"plan": " + ".join(["compile"] * 30)}))
        file = io.StringIO()
        Console(file=file, width=80).print(Spinner("dots", progress_module._Line(progress._now)))
    assert "0:00 of 10:00, trying compile + compile" in file.getvalue()
    assert file.getvalue().count("\n") == 1


def answer(plan=None, command="", **known):
    """What `tune` says at its end about a plan and all that is `known` of it."""
    given = {"speedup": Ratio(2.0, 1.9, 2.1), "verdict": None, "outcome": Outcome.FASTER} | known
    result = Result(
        plan=Plan.from_dict(PLAN if plan is None else plan),
        plan_path="my runs/tune/plan.toml",
        baselines={},
        baseline_notes={},
        break_even_steps=791,
        input_pipeline={},
        waterfall=[],
        trials=[],
        report_path="my runs/tune/report.html",
        seconds=60.0,
        **given,
    )
    file = io.StringIO()
    endings.tuned(result, "train.py:job", Console(file=file, width=80), command=command)
    return " ".join(file.getvalue().split())


@pytest.mark.parametrize(("steps", "told"), [(300, True), (900, False), (None, False)])
def test_a_warm_up_that_one_run_does_not_gain_back_is_said(steps, told):
    assert ("after 791 steps, and this job takes 300" in answer(job_steps=steps)) is told


def test_what_tuning_cost_stands_beside_what_it_saves():
    said = answer(training_seconds={"reference": 600.0, "plan": 310.0}, verdict=VERDICT)
    assert "Tuning took 1 min; the plan saves 4 min 50 s a training." in said
    assert "Tuning took" not in answer({}, outcome=Outcome.NOTHING_HELPS)


def test_that_a_length_is_not_known_is_said_with_the_answer():
    assert "tune it with --steps N" in answer(job_steps=None, verdict=VERDICT)
    assert "--steps" not in answer(job_steps=300, verdict=VERDICT)


VERDICT = Verdict(True, "rounding", 0.5, 0.5, 40, 8, "")


@pytest.mark.parametrize(
    ("verdict", "command"),
    [
        (VERDICT, "vivace train train.py:job --plan 'my runs/tune/plan.toml'"),
        (None, "vivace verify train.py:job --plan 'my runs/tune/plan.toml'"),
    ],
)
def test_the_next_command_is_named_at_the_end(verdict, command):
    assert answer(verdict=verdict).endswith(f"Next: {command}")


def test_the_reference_is_neither_verified_nor_trained_as_a_plan():
    said = answer({}, has_metric=True, outcome=Outcome.NOTHING_HELPS, reason="no technique was faster")
    assert said.startswith("Nothing was faster beyond noise: train as you do. No technique was faster.")
    assert said.endswith("Next: vivace profile train.py:job")
    assert "Same model" not in said


def test_verify_says_how_long_it_takes():
    text = "the reference has run; about 2 min 10 s for the plan and its shadows"
    told = {"seconds": 9.0, "left_seconds": 130.0}
    assert shown(VerifyProgress(), ("prepared", told)) == [text]
    assert shown(VerifyProgress(), ("prepared", told | {"compiles": True})) == [
        text + ", and what compiling takes"
    ]


def test_what_could_not_be_verified_is_not_called_broken():
    unknown = Verdict(None, "rounding", 0.0, 0.0, 0, 0, "it could not be verified: the child died")
    assert headline(unknown) == "promise ROUNDING not judged: it could not be verified: the child died"


def test_the_limit_of_loading_is_said_before_the_search():
    text = "2 cores can load 410 samples a second, the step consumes 1,900: no number of workers can feed it"
    assert shown(TuneProgress(), ("notice", {"text": text})) == [text]


@pytest.mark.parametrize(
    ("outcome", "first"),
    [
        (Outcome.COULD_NOT_MEASURE, "Nothing is decided."),
        (Outcome.NOTHING_TRIED, "Nothing was tried, and nothing is decided."),
    ],
)
def test_what_was_not_measured_is_not_called_slow(outcome, first):
    said = answer({}, outcome=outcome, reason="the machine was busy")
    assert said.startswith(f"{first} The machine was busy.")
    assert "faster beyond noise" not in said
    assert "vivace tune train.py:job --budget balanced --out 'my runs/tune'" in said


def test_too_little_time_names_the_budget_that_says_more():
    command = "vivace tune train.py:job --budget 40 --allow exact --out runs/tune"
    known = {"outcome": Outcome.TIME_ENDED, "reason": "compile was not tried", "more_time": "5m"}
    said = answer({}, command=command, **known)
    assert said.startswith("Too little time was given, and nothing is decided: give --budget 5m. Compile")
    assert "train as you do" not in said
    assert "Next: vivace tune train.py:job --budget 5m --allow exact --out runs/tune" in said
    assert "budget='5m'" in answer({}, command="vivace.tune(job, budget=40, allow='exact')", **known)


@pytest.mark.parametrize(("data", "told"), [("training", True), ("validation", False), (None, False)])
def test_a_job_without_validation_hears_that(data, told):
    assert ("its metric is of the training data" in answer(metric_data=data)) is told


def test_a_wide_interval_is_told_by_its_lower_end():
    assert answer(speedup=Ratio(2.1, 1.4, 3.24)).startswith(
        "At least 1.40x as fast as strict fp32 (1.40-3.24). Same model: not verified yet."
    )


def test_a_broken_promise_comes_before_the_speed():
    broken = Verdict(False, "rounding", 9.0, 9.0, 40, 8, "update scale is 9.8 envelopes off")
    said = answer(verdict=broken)
    assert said.startswith("Not the same model. Same model: no. Update scale is 9.8 envelopes off.")
    assert said.index("Same model: no") < said.index("Its steps ran 2.00x as fast as strict fp32")
    assert "vivace train" not in said


def test_the_plan_for_longer_trainings_and_the_minutes_are_named():
    plan = Plan.from_dict({"compile": {}})
    longer = LongPlan(plan, "my runs/tune/plan-long.toml", Ratio(1.42, 1.36, 1.49), 20.1, 6614, False)
    said = answer(
        {"channels_last": {}},
        job_steps=1000,
        training_seconds={"reference": 3.3, "plan": 2.7, "plan_low": 2.6, "plan_high": 2.9},
        warmup_seconds=0.1,
        cold_warmup_seconds=9.0,
        long_plan=longer,
    )
    assert said.startswith("3.3 s -> 2.7 s (2.6 s to 2.9 s) for one training of 1,000 steps, all included;")
    told = "For trainings of 6,614 steps and more there is my runs/tune/plan-long.toml: compile, 1.42x"
    assert told in said
    narrow = {"reference": 3.3, "plan": 2.7, "plan_low": 2.71, "plan_high": 2.72}
    said = answer({"channels_last": {}}, job_steps=1000, training_seconds=narrow)
    assert said.startswith("3.3 s -> 2.7 s for one training of 1,000 steps, all included;")


@pytest.mark.parametrize(
    ("data", "name"), [("training", "metric on the training data"), ("validation", "metric")]
)
def test_a_metric_of_the_training_data_is_called_that(data, name):
    epoch = {"epoch": 1, "step": 32, "metric": 0.9414, "metric_data": data}
    assert shown(TrainProgress(), ("epoch", epoch)) == [f"epoch 1  step 32  {name} 0.9414"]


RUN = Run(
    "runs/train", 900, 3, 0.975, 0.0712, 252.0, 2718.0, None, metric_data="validation", job="train.py:job"
)
TUNED = {"speedup": {"estimate": 2.0, "low": 1.9, "high": 2.1}, "verdict": VERDICT.to_dict()}


def trained(**changes):
    file = io.StringIO()
    endings.trained(dataclasses.replace(RUN, **changes), Console(file=file, width=80))
    return " ".join(file.getvalue().split())


def test_a_training_ends_with_its_minutes():
    said = trained()
    assert said.startswith("4 min 12 s to train 900 steps in 3 epochs; metric on the validation data 0.975;")
    assert said.endswith("Next: vivace report runs/train")
    assert "Same model" not in said


def test_a_training_that_max_steps_ended_says_how_to_go_on():
    said = trained(steps=20, epochs=1, epochs_left=2)
    assert said.startswith("4 min 12 s to train 20 steps in 1 epoch, ended early by --max-steps; metric")
    assert said.endswith("Next: vivace train train.py:job --out runs/train --resume")


def test_a_training_under_a_tuned_plan_says_what_that_saved():
    plan = {"plan": {"compile": {}}, "does": {"compile": "the model compiled"}}
    said = trained(**plan, tuned=TUNED, stepping_seconds=240.0)
    assert said.startswith("4 min 12 s instead of about 8 min 12 s to train 900 steps")
    assert "Same model: yes, as tune verified. What the plan does: compile the model compiled" in said
    assert "Its steps are 2.00x as fast as in strict fp32, as tune measured." in said
    assert "Same model: not verified yet." in trained(**plan)
    one = {"speedup": {"estimate": 1.0, "low": 1.0, "high": 1.0}}
    assert "as tune measured" not in trained(tuned=one)  # of an empty plan


def test_where_it_was_trained_both_ways_the_time_of_the_other_is_told_and_none_foretold():
    plan = {"plan": {"compile": {}}, "tuned": TUNED, "stepping_seconds": 240.0}
    file, run = io.StringIO(), dataclasses.replace(RUN, **plan)
    for steps in (RUN.steps, 450):
        other = dataclasses.replace(RUN, seconds=303.0, steps=steps)
        endings.trained(run, Console(file=file, width=80), beside=other)
    said = " ".join(file.getvalue().split())
    assert said.startswith("4 min 12 s instead of 5 min 03 s to train 900 steps")
    assert said.count("4 min 12 s instead of about 8 min 12 s") == 1  # the other was not as long


def test_a_stopped_training_says_how_to_go_on():
    said = trained(interrupted=True, interrupted_by="SIGTERM")
    assert said.startswith("Stopped by SIGTERM after 900 steps in 3 epochs;")
    assert said.endswith("Next: vivace train train.py:job --out runs/train --resume")
