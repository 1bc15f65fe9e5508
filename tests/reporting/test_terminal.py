"""The terminal says what the page says, in 80 columns, and reads nothing as markup."""

# ruff: noqa: RUF001 - the figures stand here as a reader sees them

import io
import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

import vivace
from vivace.errors import FolderError
from vivace.reporting import terminal


def shown(folder, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    terminal(folder, console)
    return console.file.getvalue()


def test_everything_fits_80_columns(ledger, tune_folder):
    text = shown(tune_folder(ledger))
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    for figure in (
        "2.31x as fast as strict fp32 (2.24-2.38).",
        "Same model: yes. Worst of 157 checks: 4.3 of 8 allowed (size of the update, step\n21).",
        "the model has no layer norm",
        "7 of 9 inside",
        "1.91×",
        "2,735",
        "1.71× (1.66–1.76)   13.9 GiB",
        "direction of the",
        "24.6 GiB",
        "NVIDIA H100",
        "vivace tune examples/imagenet.py:job",
    ):
        assert figure in text, figure


def test_refusals_for_one_reason_share_a_row(ledger, tune_folder):
    known = next(d for d in ledger if d["record"] == "trial" and d["status"] == "refused")
    ledger[2:2] = [{**known, "techniques": {name: {}}, "reason": "no card"} for name in ("one", "two")]
    text = shown(tune_folder(ledger))
    assert "one, two" in text
    assert text.count("no card") == 1


@pytest.mark.parametrize("steps", [500, 900])
def test_a_warm_up_that_one_run_does_not_gain_back_is_said(steps, ledger, tune_folder):
    ledger[-1]["job_steps"] = steps
    said = "after 514 steps, and this job takes 500" in " ".join(shown(tune_folder(ledger)).split())
    assert said is (steps < 514)


@pytest.mark.parametrize("crowded", [True, False])
def test_that_steps_were_timed_on_one_thread_is_said(crowded, ledger, tune_folder):
    ledger[-1]["crowded"] = crowded
    assert ("Timed on one thread" in " ".join(shown(tune_folder(ledger)).split())) is crowded


def test_names_are_neither_markup_nor_control_codes(ledger, tune_folder):
    attack = "[bold red]Net[/] \x1b[2J"
    ledger[0]["job"]["model"] = ledger[0]["command"] = ledger[-1]["verdict"]["reason"] = attack
    ledger[-1]["promise"] = attack
    text = shown(tune_folder(ledger))
    assert text.count("[bold red]Net[/]") == 3
    assert "\x1b" not in text


def test_the_path_of_a_plan_for_longer_trainings_is_told_whole(ledger, tune_folder, monkeypatch):
    plan = {"compile": {}, "fused_optimizer": {"kind": "foreach"}, "bf16_autocast": {}}
    path, speed = f"/{'elsewhere/' * 9}plan-long.toml", {"estimate": 1.42, "low": 1.36, "high": 1.49}
    facts = {"speedup": speed, "warmup_seconds": 20.1, "from_steps": 6614}
    ledger[-1]["long_plan"] = {"plan": plan, "plan_path": path, **facts}
    folder = tune_folder(ledger)
    monkeypatch.chdir(folder.parent)
    text = " ".join(shown(Path(folder.name)).split())
    assert f"For trainings of 6,614 steps and more there is {folder.name}/plan-long.toml: compile" in text


def test_facts_of_the_job_are_no_pythons(ledger, tune_folder):
    text = shown(tune_folder(ledger))
    assert "25,557,032" in text
    assert "{" not in text


def test_without_a_verdict_it_says_so(ledger, tune_folder):
    text = shown(tune_folder([d for d in ledger if d["record"] not in ("verdict", "result")]))
    assert "Not verified: the run holds no verdict." in text


def test_a_train_run(train_folder):
    text = shown(train_folder)
    assert "4 min 12 s to train 900 steps in 3 epochs; metric 0.975; training loss 0.0712." in text
    assert "4 min 12 s" in text


def test_a_stopped_run_of_several_ranks_goes_on_with_as_many(train_folder):
    path = train_folder / "run.json"
    stopped = {"interrupted": True, "interrupted_by": "SIGTERM", "job": "job.py:job"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **stopped, "ranks": 2}))
    text = " ".join(shown(train_folder).split())
    assert f"torchrun --nproc-per-node 2 -m vivace train job.py:job --out {train_folder} --resume" in text


def test_what_watching_a_run_found(train_folder):
    path = train_folder / "run.json"
    watched = {"steps": 214, "kept": True, "worst": 2.1, "limit": 16.0, "share": 0.007}
    path.write_text(json.dumps({**json.loads(path.read_text()), "watched": watched}))
    text = " ".join(shown(train_folder).split())
    assert "loss 0.0712. Watched 214 steps: the same model; worst 2.1 of 16; it cost 0.7 %." in text


def test_a_plan_that_was_found_while_it_trained(train_folder):
    path = train_folder / "run.json"
    ratio = {"estimate": 1.42, "low": 1.35, "high": 1.5}
    found = {
        "outcome": "faster",
        "reason": "",
        "ratio": ratio,
        "saved_seconds": 70.0,
        "step": 130,
        "ended": True,
    }
    facts = json.loads(path.read_text()) | {"plan": {"bf16_autocast": {}}, "found": found}
    path.write_text(json.dumps(facts))
    text = " ".join(shown(train_folder).split())
    assert "4 min 12 s instead of about 5 min 22 s to train 900 steps" in text
    assert "Same model: yes. Proven on a step of this run before the plan acted." in text
    del found["step"], found["saved_seconds"], found["ended"]
    path.write_text(json.dumps(facts))
    text = " ".join(shown(train_folder).split())
    assert "Steps under the plan were 1.42x as fast (1.35-1.50); the search had not ended." in text
    nothing = {"outcome": "not_faster", "reason": "nothing was faster"}
    path.write_text(json.dumps(facts | {"plan": {}, "found": nothing}))
    assert "Nothing was changed while it trained: nothing was faster." in " ".join(
        shown(train_folder).split()
    )


@pytest.mark.parametrize(("epochs", "said"), [(1, "in 1 epoch;"), (2, "in 2 epochs;")])
def test_a_run_that_had_nothing_left_to_do_has_no_speed(epochs, said, train_folder):
    path = train_folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "epochs": epochs, "samples_per_second": 0.0}))
    assert said in shown(train_folder)
    assert "samples a second" not in shown(train_folder)


def test_ceilings_stand_in_their_units(ledger, tune_folder):
    ledger[0]["machine"]["ceilings"] = {"matmul_bf16": 1.5e12, "launch_seconds": 1.83e-6}
    text = shown(tune_folder(ledger))
    assert "1.50 TFLOP/s" in text
    assert "1.83 µs" in text


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FolderError):
        shown(tmp_path / "nothing")


@pytest.mark.parametrize(
    "features", [{"loading_limit": "<b>2 cores can load 410"}, {"batch_norm": True}, [], None]
)
@pytest.mark.parametrize("told", ["", "2 cores can load 410; measured to help: decoded_cache"])
def test_the_limit_of_loading_stands_on_the_page_too(features, told, ledger, tune_folder):
    ledger[1]["features"], ledger[-1]["loading"] = features, told
    folder = tune_folder(ledger)
    page = vivace.report(folder).read_text(encoding="utf-8")
    limited = isinstance(features, dict) and "loading_limit" in features
    text = told or ("<b>2 cores can load 410" if limited else "")
    assert (f"Loading: {text.replace('<', '&lt;').replace('>', '&gt;')}." in page) is bool(text)
    assert (f"Loading: {text}." in shown(folder)) is bool(text)


def test_of_another_verb_it_says_whose_folder_it_is(tmp_path):
    (tmp_path / "compress.html").write_text("<p>")
    assert "vivace compress" in shown(tmp_path)
