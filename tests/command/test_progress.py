"""What the terminal says while `tune` and `train` work: a line a trial, refusals by reason, no word torn."""

import io

import pytest
from rich.console import Console

from vivace.command.progress import TrainProgress, TuneProgress, VerifyProgress, epilogue
from vivace.events import Event, EventKind
from vivace.ledger import Outcome, Ratio, Trial
from vivace.plan import Plan
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
    lines = shown(
        TrainProgress(),
        ("resume", {"step": 19}),
        ("epoch", {"epoch": 1, "step": 32, "loss": 0.5}),
        ("stop", {"interrupted": False, "steps": 64, "run_path": "runs/train"}),
    )
    assert lines == ["goes on after step 19", "epoch 1  step 32  loss 0.5", "trained: 64 steps, runs/train"]


def answer(plan=None, **known):
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
    epilogue(result, "train.py:job", Console(file=file, width=80))
    return file.getvalue()


@pytest.mark.parametrize(("steps", "told"), [(300, True), (900, False), (None, False)])
def test_a_warm_up_that_one_run_does_not_gain_back_is_said(steps, told):
    assert ("after 791 steps, and this job takes 300" in answer(job_steps=steps)) is told


@pytest.mark.parametrize("has_metric", [True, False])
def test_only_commands_that_work_are_named_at_the_end(has_metric):
    commands = [line.strip() for line in answer(has_metric=has_metric).partition("next:\n")[2].splitlines()]
    metric = " --metric" if has_metric else ""
    assert commands == [
        "vivace train train.py:job --plan 'my runs/tune/plan.toml'",
        f"vivace verify train.py:job --plan 'my runs/tune/plan.toml'{metric}",
        "vivace report 'my runs/tune'",
    ]


def test_the_reference_is_neither_verified_nor_trained_as_a_plan():
    said = answer({}, has_metric=True, outcome=Outcome.NOTHING_HELPS, reason="no technique was faster")
    assert said.startswith("\nNothing was faster beyond noise: train as you do.\nno technique was faster.\n")
    assert said.endswith("next:\n  vivace profile train.py:job\n  vivace report 'my runs/tune'\n")


def test_verify_says_how_long_it_takes():
    text = "the reference has run; about 2 min 10 s for the plan and its shadows"
    assert shown(VerifyProgress(), ("prepared", {"seconds": 9.0, "left_seconds": 130.0})) == [text]


def test_what_could_not_be_verified_is_not_called_broken():
    unknown = Verdict(None, "rounding", 0.0, 0.0, 0, 0, "it could not be verified: the child died")
    assert headline(unknown) == "promise ROUNDING not judged: it could not be verified: the child died"


def test_the_limit_of_loading_is_said_before_the_search():
    text = "2 cores can load 410 samples a second, the step consumes 1,900: no number of workers can feed it"
    assert shown(TuneProgress(), ("notice", {"text": text})) == [text]


@pytest.mark.parametrize(
    ("outcome", "first"),
    [
        (Outcome.COULD_NOT_MEASURE, "Nothing could be measured, and nothing is decided."),
        (Outcome.NOTHING_TRIED, "Nothing was tried, and nothing is decided."),
    ],
)
def test_what_was_not_measured_is_not_called_slow(outcome, first):
    said = answer({}, outcome=outcome, reason="the machine was busy")
    assert said.startswith(f"\n{first}\nthe machine was busy.\n")
    assert "faster beyond noise" not in said
    assert "vivace tune train.py:job --budget balanced --out 'my runs/tune'" in said


@pytest.mark.parametrize(("data", "told"), [("training", True), ("validation", False), (None, False)])
def test_a_job_without_validation_hears_that(data, told):
    assert ("its metric is of the training data" in answer(metric_data=data)) is told


def test_a_wide_interval_is_told_by_its_lower_end():
    assert answer(speedup=Ratio(2.1, 1.4, 3.24)).startswith(
        "\nat least 1.40x as fast as strict fp32 (1.40-3.24): host_allocator"
    )


def test_a_broken_promise_comes_before_the_speed():
    broken = Verdict(False, "rounding", 9.0, 9.0, 40, 8, "update scale is 9.8 envelopes off")
    lines = answer(verdict=broken).splitlines()
    assert lines[1:3] == [
        "Not the same model.",
        "promise ROUNDING BROKEN: update scale is 9.8 envelopes off",
    ]
    assert lines[3].startswith("2.00x as fast")


def test_the_plan_for_longer_trainings_and_the_minutes_are_named():
    plan = Plan.from_dict({"compile": {}})
    longer = LongPlan(plan, "my runs/tune/plan-long.toml", Ratio(1.42, 1.36, 1.49), 20.1, 6614, False)
    said = answer(
        job_steps=330,
        training_seconds={"reference": 3.3, "plan": 2.7},
        warmup_seconds=0.1,
        cold_warmup_seconds=9.0,
        long_plan=longer,
    )
    said = " ".join(said.split())
    assert "one training (330 steps): 3.3 s -> 2.7 s; the warm-up is 9 s where nothing" in said
    assert (
        "For trainings of 6,614 steps and more: compile, 1.42x (1.36-1.49), after a warm-up of 20 s" in said
    )
    assert "not verified yet; saved as my runs/tune/plan-long.toml" in said


@pytest.mark.parametrize(
    ("data", "name"), [("training", "metric on the training data"), ("validation", "metric")]
)
def test_a_metric_of_the_training_data_is_called_that(data, name):
    epoch = {"epoch": 1, "step": 32, "metric": 0.9414, "metric_data": data}
    stop = {"interrupted": False, "steps": 64, "run_path": "runs/train"}
    lines = shown(TrainProgress(), ("epoch", epoch), ("stop", stop | {"metric": 0.95, "metric_data": data}))
    assert lines == [f"epoch 1  step 32  {name} 0.9414", f"trained: 64 steps, {name} 0.9500, runs/train"]
