"""The page says what the ledger says, survives what a run may leave behind, and cannot be made to act."""

# ruff: noqa: RUF001 - the figures stand here as a reader sees them

import html.parser
import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

import vivace
from vivace import pictures
from vivace.errors import FolderError
from vivace.reporting import phrases, terminal
from vivace.reporting.reading import load

VOID = {"meta", "link", "img", "br", "hr", "input"}


class _Reader(html.parser.HTMLParser):
    """The text a reader sees, every tag with its attributes, and whether the tags are balanced."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.open = "", [], []
        self.feed(page)
        self.close()
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data + " "


def read(folder):
    path = vivace.report(folder)
    assert path == folder / "report.html"
    reader = _Reader(path.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


def only(documents, **roles):
    """The records without the kinds and roles that are named."""
    return [
        d for d in documents if d["record"] not in roles["without"] and d.get("role") not in roles["without"]
    ]


@pytest.mark.parametrize(
    ("section", "figures"),
    [
        ("gain", ["2.31× as fast as strict fp32 (2.24–2.38)."]),
        ("same", ["Same model: yes. Worst of 157 checks: 4.3 of 8 allowed (size of the update, step 21)."]),
        ("does", ["channels_last feature maps in NHWC memory order"]),
        ("next", ["Next vivace train examples/imagenet.py:job --plan runs/tune/plan.toml"]),
        (
            "facts",
            [
                "as fast as PyTorch's defaults 1.91×",
                "steps until the warm-up is gained back 514",
                "peak memory; 24.6 GiB in strict fp32 11.4 GiB",
                "measured; 3 ruled out or failed 13 trials",
                "the search took 13 min 32 s",
            ],
        ),
        (
            "plan",
            [
                "53 convolutions in channels-last order",
                "mode=max-autotune-no-cudagraphs",
                "runs/tune/plan.toml",
            ],
        ),
        (
            "baselines",
            ["strict fp32 1,184", "PyTorch defaults 1,433", "TF32 allowed 1,918", "The plan 2,735"],
        ),
        ("waterfall", ["bf16_autocast 2.02× +80 %", "fused_optimizer 2.31× +2 %"]),
        (
            "trials",
            ["1.71× 1.66–1.76 2,025 13.9 GiB 3.4 s 38 steps", "0.72× 0.70–0.74 852 9.40 GiB 3.1 s never"],
        ),
        ("noise", ["1.01× 0.98–1.04 1,196 26.0 GiB 6.2 s – "]),
        (
            "refused",
            ["fused_norm refused the model has no layer norm", "failed child process ran out of GPU memory"],
        ),
        ("predicted", ["7 of 9 measured gains", "tf32 1.49× 1.10–1.45"]),
        (
            "verified",
            [
                "120 steps, 8 shadow runs, 1 min 36 s",
                "direction of the update, step 21 1.40 8.00 0.041 0.0293 yes",
            ],
        ),
        ("memory", ["Peak, strict fp32 24.6 GiB", "Peak, the plan 11.4 GiB", "Budget 20.0 GiB", "97.5 MiB"]),
        ("profile", ["backward 62 %", "data 3.4 %", "216 ms a step"]),
        (
            "machine",
            ["NVIDIA H100 80GB HBM3, 80.0 GiB", "torch 2.15.0", "shared memory 64.0 GiB", "25,557,032"],
        ),
        (
            "again",
            ["vivace tune examples/imagenet.py:job --budget balanced --memory 20GiB", "vivace report "],
        ),
    ],
)
def test_each_section_shows_its_figures(section, figures, ledger, tune_folder):
    text = read(tune_folder(ledger)).text
    for figure in figures:
        assert figure in text, section


@pytest.mark.parametrize(
    "name", ["run.html", "profile.html", "compress.html", "sweep.html", "model_card.html"]
)
def test_the_folder_of_another_verb_has_its_page_already(name, tmp_path):
    """Nothing is written beside it: a run of a script would refuse a folder with another's file in it."""
    (tmp_path / "run.json").write_text('{"outcome": "faster", "steps": 3}')
    (tmp_path / name).write_text("<p>")
    assert vivace.report(tmp_path) == tmp_path / name
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}')
    assert vivace.report(tmp_path).name == "report.html"


@pytest.mark.parametrize(
    ("name", "document", "why"),
    [
        ("run.json", {"own_seconds": 0.1, "reason": "it ended after 5 steps"}, "it ended after 5 steps"),
        ("ledger.jsonl", {"record": "tried", "process": 7, "plan": {}}, "it has not come to its end"),
    ],
)
def test_a_run_of_a_script_without_a_page_is_no_training(name, document, why, tmp_path):
    """One that was left alone, and one that was killed; the next run would refuse another's file there."""
    (tmp_path / name).write_text(json.dumps({"steps": 50, "seconds": 100.0, **document}) + "\n")
    for look in (vivace.report, lambda place: terminal(place, Console(file=io.StringIO()))):
        with pytest.raises(FolderError, match=f"is the folder of a script's run, which has no page: {why}"):
            look(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_trials_are_sorted_by_ratio(ledger, tune_folder):
    text = read(tune_folder(ledger)).text
    table = text[text.index("Pays after") : text.index("Refused and failed")]
    ratios = [float(found) for found in re.findall(r"(\d\.\d\d)×", table)]
    assert ratios == sorted(ratios, reverse=True)
    assert len(ratios) == 13


def test_the_page_is_one_file_without_scripts_or_outside_links(ledger, tune_folder):
    folder = tune_folder(ledger)
    reader = read(folder)
    for tag, attributes in reader.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "href", "xlink:href", "action", "srcset"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "http" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert len(page) < 100_000
    assert sorted(file.name for file in folder.iterdir()) == ["ledger.jsonl", "report.html"]


@pytest.mark.fault(41)
def test_hostile_names_are_text(ledger, tune_folder):
    attack = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    spoiled = json.loads(json.dumps(ledger).replace("ResNet", "SPOIL").replace("fused_norm", "SPOIL"))
    spoiled = json.loads(json.dumps(spoiled).replace("the model has no layer norm", "SPOIL"))
    spoiled = json.loads(json.dumps(spoiled).replace("SPOIL", json.dumps(attack)[1:-1]))
    spoiled[0]["job"]["name"] = "../x"
    spoiled[0]["machine"]["devices"][0]["name"] = attack
    spoiled[-1]["waterfall"][1]["step"] = attack
    spoiled[-2]["checks"][0]["name"] = attack
    spoiled[0]["command"] = "</pre>" + attack
    reader = read(tune_folder(spoiled))
    assert not [tag for tag, _ in reader.tags if tag in ("script", "img")]
    assert reader.text.count("<script>alert(1)</script>") >= 6
    assert "../x" in reader.text


def test_a_torn_or_foreign_line_is_left_out_and_said(ledger, tune_folder):
    folder = tune_folder([*ledger, {"record": "trial", "status": "measured"}])
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(b'{"record": "trial", "reason": "\xc3')
    assert "1 trial in the ledger could not be read and is left out." in read(folder).text


def test_an_interrupted_run_shows_what_it_measured(ledger, tune_folder):
    text = read(tune_folder(only(ledger, without=("verdict", "result", "confirmation")))).text
    assert "Interrupted; best so far 2.36× as fast (2.29–2.43) by channels_last + bf16_autocast" in text
    assert "neither confirmed nor verified" in text
    assert "Not verified: the run holds no verdict." in text
    assert "TF32 allowed 1,918" in text


def test_an_interrupted_result_says_so(ledger, tune_folder):
    ledger[-1]["interrupted"] = True
    assert "this is the best it had found" in read(tune_folder(ledger)).text
    ledger[-1].update(plan={}, speedup={"estimate": 1.0, "low": 1.0, "high": 1.0}, waterfall=[], verdict=None)
    text = read(tune_folder(ledger)).text
    assert "Nothing was faster" not in text
    assert "the best it had found" not in text


@pytest.mark.parametrize("kept", [True, False])
def test_the_verdict_of_another_plan_says_nothing_about_this_one(kept, ledger, tune_folder):
    ledger[-1].update(interrupted=True, verdict=None)
    ledger[-2].update(plan={"channels_last": {}}, kept=kept, reason="of channels_last")
    text = read(tune_folder(ledger)).text
    assert "Same model: not verified yet." in text
    assert "of channels_last" not in text


def test_without_trials_the_page_still_names_job_and_machine(ledger, tune_folder):
    text = read(tune_folder(ledger[:1])).text
    assert "Interrupted before anything faster was found: nothing is decided" in text
    assert "No trial was measured." in text
    assert "NVIDIA H100" in text


def test_a_missing_verdict_is_not_a_kept_promise(ledger, tune_folder):
    documents = only(ledger, without=("verdict",))
    documents[-1]["verdict"] = None
    text = read(tune_folder(documents)).text
    assert "Same model: not verified yet." in text
    assert "Next vivace verify examples/imagenet.py:job --plan runs/tune/plan.toml" in text


def test_nothing_faster_says_train_as_you_do(ledger, tune_folder):
    ledger[-1].update(plan={}, speedup={"estimate": 1.0, "low": 1.0, "high": 1.0}, waterfall=[])
    ledger[-1]["baselines"]["tf32"] = None
    ledger[-1]["baseline_notes"] = {"tf32": "this processor has no TF32"}
    ledger[-1]["reason"] = "compile was not faster again in fresh processes"
    text = read(tune_folder(ledger)).text
    assert "Nothing was faster beyond noise: train as you do." in text
    assert "Compile was not faster again in fresh processes" in text
    assert "TF32 allowed – this processor has no TF32" in text


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("nothing_helps", "Nothing was faster beyond noise: train as you do."),
        ("none_kept", "Nothing faster kept its promise: train as you do."),
        ("could_not_measure", "Nothing is decided."),
        ("nothing_tried", "Nothing was tried, and nothing is decided."),
        ("time_ended", "Too little time was given, and nothing is decided."),
        ("nothing_fits", "Nothing fits into the memory that is allowed."),
        ("too_short", "This training is too short to tune: train as you do."),
    ],
)
def test_each_ending_has_its_own_sentence(outcome, said, ledger, tune_folder):
    ledger[-1].update(plan={}, outcome=outcome, reason="because of this", waterfall=[], verdict=None)
    text = read(tune_folder(ledger)).text
    assert f"{said} Because of this." in text
    assert ("faster beyond noise" in text) is (outcome == "nothing_helps")


@pytest.mark.parametrize("base", [{}, {"ddp": {}}])
def test_a_search_that_lost_a_rank_is_not_called_slow(base, ledger, tune_folder):
    """Nobody has ended it, and what it began with is all that it has."""
    one = {"estimate": 1.0, "low": 1.0, "high": 1.0}
    ledger[-1].update(plan=base, reference=base, speedup=one, outcome="interrupted", verdict=None)
    text = read(tune_folder(only(ledger, without=("verdict",)))).text
    assert "Interrupted; best so far 2.36× as fast (2.29–2.43) by channels_last + bf16_autocast" in text
    assert "Not faster beyond noise" not in text
    assert "Next vivace tune examples/imagenet.py:job --budget balanced" in text


def test_the_best_so_far_fits_into_the_memory_that_is_allowed(ledger, tune_folder):
    """Of bf16_autocast and channels_last together the peak is 13.7 GiB, of the others it is more."""
    without = [d for d in ledger if d["record"] != "result" and d.get("peak_bytes") != int(11.4 * 2**30)]
    ledger[0]["memory_bytes"] = 13.8 * 2**30
    assert "best so far 2.02× as fast" in read(tune_folder(without)).text
    ledger[0]["memory_bytes"] = 8 * 2**30
    assert "Interrupted before anything faster was found" in read(tune_folder(without)).text


def test_a_wide_interval_is_no_estimate_on_the_page(ledger, tune_folder):
    wide = {"estimate": 20.43, "low": 1.12, "high": 340.0}
    ledger[-1]["waterfall"][1]["ratio"] = wide
    next(d for d in ledger if d.get("techniques") == {"channels_last": {}})["ratio"] = wide
    text = read(tune_folder(ledger)).text
    assert "20.4" not in text
    assert "channels_last at least 1.12× +12 %" in text
    assert "at least 1.12× 1.12–340" in text
    assert "bf16_autocast 2.02× +80 %" in text
    ledger[-1]["speedup"] = {"estimate": 2.1, "low": 1.4, "high": 3.24}
    assert "At least 1.40× as fast as strict fp32 (1.40–3.24)" in read(tune_folder(ledger)).text


def test_a_plan_for_longer_trainings_stands_beside_the_plan(ledger, tune_folder):
    ledger[-1] |= {
        "job_steps": 330,
        "warmup_seconds": 0.2,
        "cold_warmup_seconds": 9.0,
        "training_seconds": {"reference": 3.3, "plan": 2.7},
        "long_plan": {
            "plan": {"compile": {}},
            "plan_path": "/elsewhere/runs/tune/plan-long.toml",
            "speedup": {"estimate": 1.42, "low": 1.36, "high": 1.49},
            "warmup_seconds": 20.1,
            "from_steps": 6614,
            "verified": True,
        },
    }
    folder = tune_folder(ledger)
    text = read(folder).text
    assert f"For trainings of 6,614 steps and more there is {folder}/plan-long.toml: compile, 1.42×" in text
    assert "as fast, after a warm-up of 20 s; same model" in text
    assert "3.3 s → 2.7 s for one training of 330 steps, all included; a step is 2.31× as fast" in text
    assert "one run does not gain by it" not in text
    assert "steps until the warm-up is gained back" not in text
    assert "9 s where nothing is compiled yet 200 ms" in text


def test_no_warm_up_is_gained_back_in_a_training_that_gains_nothing(ledger, tune_folder):
    """Evaluations and watching cost more than the steps save."""
    told = {"job_steps": 600, "training_seconds": {"reference": 3.3, "plan": 3.3}}
    ledger[-1] |= told
    text = read(tune_folder(ledger)).text
    assert "One training of 600 steps gains nothing" in text
    assert "steps until the warm-up is gained back" not in text


def test_a_plan_that_makes_one_training_longer_is_no_gain(ledger, tune_folder):
    """Its steps are faster, and the training is over before its warm-up is gained back."""
    ledger[-1] |= {"job_steps": 4, "training_seconds": {"reference": 0.003, "plan": 0.62}}
    text = read(tune_folder(ledger)).text
    assert "One training of 4 steps gains nothing: 3.00 ms as it is, 620 ms under the plan" in text
    assert "\N{RIGHTWARDS ARROW} 620 ms" not in text
    assert "vivace train examples/imagenet.py:job --plan" not in text


@pytest.mark.parametrize("low", [0.99, 1.0])
def test_a_gain_inside_the_noise_is_not_called_faster(low, ledger, tune_folder):
    ledger[-1]["speedup"] = {"estimate": 1.02, "low": low, "high": 1.05}
    assert "Not faster beyond noise" in read(tune_folder(ledger)).text


def test_a_broken_promise_leads(ledger, tune_folder):
    for document in (ledger[-2], ledger[-1]["verdict"]):
        document |= {"kept": False, "reason": "update scale is 9.8 envelopes from strict fp32"}
    ledger[-2]["checks"][1] |= {"kept": False, "score": 9.8}
    ledger[-1]["verdict"]["checks"] = ledger[-2]["checks"]
    reader = read(tune_folder(ledger))
    text = reader.text
    assert "Not the same model. Same model: no. Worst of 157 checks: 9.8 of 8 allowed (size of the" in text
    assert "The promise ROUNDING is broken: update scale is 9.8 envelopes from strict fp32." in text
    assert "Its steps ran 2.31× as fast as strict fp32." in text
    assert "as fast as PyTorch's defaults" not in text
    assert ("header", {"class": "bad"}) in reader.tags
    assert not [tag for tag, found in reader.tags if found.get("class") == "figure"]
    assert "size of the update, step 21 9.80 8.00 0.00082 0.000191 no" in text


@pytest.mark.parametrize("lost", [None, float("nan")])  # as it is written, and as an older version wrote it
def test_losses_that_are_not_numbers_interrupt_the_line(ledger, tune_folder, lost):
    ledger[-2]["curves"]["plan"][60] = lost
    page = vivace.report(tune_folder(ledger)).read_text(encoding="utf-8")
    line = re.search(r'class="line plan" d="([^"]+)"', page)
    assert line is not None
    assert line[1].count("M") == 2
    assert "nan" not in page.lower()


def test_a_train_run_alone(train_folder):
    reader = read(train_folder)
    assert "4 min 12 s to train 900 steps in 3 epochs; metric 0.975; training loss 0.0712." in reader.text
    assert "resumed from step" in reader.text
    assert "Trials" not in reader.text
    assert [a["aria-label"] for _, a in reader.tags if "aria-label" in a] == [
        "Training loss",
        "Metric",
        "Samples a second",
    ]


def test_watched_steps_are_drawn_under_their_limit(train_folder):
    """Of many the farthest of each few, so that none beyond the limit is lost."""
    lines = [{"step": step, "watch_score": 1.0, "watch_kept": True} for step in range(1, 900)]
    lines[450] |= {"watch_score": 20.0}
    lines[460] |= {"watch_score": None, "watch_kept": False}
    with (train_folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    facts = json.loads((train_folder / "run.json").read_text())
    watched = {"steps": 899, "kept": True, "worst": 20.0, "limit": 16.0, "share": 0.007}
    (train_folder / "run.json").write_text(json.dumps(facts | {"watched": watched}))
    page = vivace.report(train_folder).read_text(encoding="utf-8")
    chart = page[page.index("Watched steps: how far") :]
    dots = re.search(r'class="line points" d="([^"]+)"', chart)
    limit = re.search(r'class="line reference" d="M0 (\d+)L1000 (\d+)"', chart)
    assert dots is not None
    assert limit is not None
    heights = [int(dot.split("h")[0].split()[1]) for dot in dots[1].split("M")[1:]]
    assert len(heights) >= 50
    assert sum(height < int(limit[1]) for height in heights) == 1
    assert "the dashed line is the limit, 16" in chart


def test_a_run_with_one_watched_step_has_no_chart_of_them(train_folder):
    with (train_folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 1, "watch_score": 1.0, "watch_kept": True}) + "\n")
    assert "Watched steps" not in vivace.report(train_folder).read_text(encoding="utf-8")


def test_a_metric_of_the_training_data_is_called_that(train_folder):
    facts = json.loads((train_folder / "run.json").read_text())
    (train_folder / "run.json").write_text(json.dumps(facts | {"metric_data": "training"}))
    assert "metric on the training data 0.975" in read(train_folder).text
    named = {"metric_data": "validation", "metric_name": "accuracy"}
    (train_folder / "run.json").write_text(json.dumps(facts | named))
    assert "epochs; accuracy on the validation data 0.975" in read(train_folder).text
    (train_folder / "run.json").write_text(json.dumps(facts | {"metric_data": "validation"}))
    assert "epochs; metric on the validation data 0.975" in read(train_folder).text


def change(folder, **facts):
    """Give the run of a training other facts."""
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_what_a_resumed_run_would_have_taken_counts_the_steps_of_all_its_processes(train_folder):
    """160 s of this process' 600 steps are 240 s of all 900."""
    tuned = {"speedup": {"estimate": 2, "low": 2, "high": 2}}
    change(train_folder, stepping_seconds=160.0, tuned=tuned, plan={"compile": {}})
    assert "4 min 12 s instead of about 8 min 12 s to train 900 steps" in read(train_folder).text


@pytest.mark.parametrize("written", ["{torn", None])
def test_a_training_that_has_not_ended_is_told_by_its_metrics(written, train_folder):
    """It goes on, or it was killed: nothing says what it is called."""
    if written is None:
        (train_folder / "run.json").unlink()
    else:
        (train_folder / "run.json").write_text(written, encoding="utf-8")
    reader = read(train_folder)
    assert "Not ended, or still running: 900 steps so far; metric 0.975; training loss 0.0" in reader.text
    assert ("header", {"class": "open"}) in reader.tags
    assert f"vivace train JOB --out {train_folder} --resume" in reader.text


def test_a_resumed_training_that_was_killed_is_not_told_by_the_process_before(train_folder):
    facts = {"steps": 300, "epochs": 1, "metric": 0.925, "loss": 0.6, "interrupted": True}
    change(train_folder, **facts, interrupted_by="SIGTERM", job="job.py:job", plan={"compile": {}}, ranks=2)
    text = read(train_folder).text
    assert "Not ended, or still running: 900 steps so far; metric 0.975; training loss 0.0" in text
    assert "SIGTERM" not in text
    again = f"torchrun --nproc-per-node 2 -m vivace train job.py:job --out {train_folder} --resume"
    assert again in text
    change(train_folder, steps=900)
    assert "Stopped by SIGTERM after 900 steps in 1 epoch; metric 0.925" in read(train_folder).text


def test_the_metric_is_drawn_over_minutes(train_folder):
    lines = [json.loads(line) for line in (train_folder / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "metric" in line]
    for line, seconds in zip(measured, (60.0, 180.0, 240.0), strict=True):
        line["seconds"] = seconds
    (train_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = json.loads((train_folder / "run.json").read_text())
    (train_folder / "run.json").write_text(json.dumps(facts | {"metric_name": "mean IoU"}))
    page = vivace.report(train_folder).read_text(encoding="utf-8")
    assert "Mean IoU" in page
    line = re.search(r'class="line plan" d="M([^"]+)"', page)  # the first chart's
    assert line is not None
    across = [float(point.split()[0]) for point in line[1].split("L")]
    assert across == pytest.approx([0, 1000 * 2 / 3, 1000], abs=1)  # 1, 3 and 4 minutes


def test_steps_repeated_after_a_resume_are_drawn_once(train_folder):
    with (train_folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 600, "epoch": 2, "loss": 0.2}) + "\n")
    page = vivace.report(train_folder).read_text(encoding="utf-8")
    line = re.search(r'class="line plan" d="M([^"]+)"', page)
    assert line is not None
    places = [int(point.split()[0]) for point in line[1].split("L")]
    assert places == sorted(places)
    assert len(places) == 90


@pytest.mark.parametrize("prepare", [False, True])
def test_a_folder_without_a_run_is_refused_in_one_sentence(prepare, tmp_path):
    folder = tmp_path / "nothing"
    if prepare:
        folder.mkdir()
    with pytest.raises(FolderError, match="nothing") as caught:
        vivace.report(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_looked_into_is_no_fault_of_ours(tmp_path):
    """As one without permission; this name is too long for anybody."""
    folder = tmp_path / ("a" * 300)
    for look in (vivace.report, lambda place: terminal(place, Console(file=io.StringIO()))):
        with pytest.raises(FolderError, match="cannot be read: File name too long"):
            look(folder)


def test_what_of_a_training_cannot_be_read_is_said(train_folder):
    facts = json.loads((train_folder / "run.json").read_text())
    ratio = {"estimate": 0.0, "low": 0.0, "high": 1.0}
    (train_folder / "run.json").write_text(
        json.dumps(facts | {"found": {"outcome": "faster", "ratio": ratio}})
    )
    told = "Left out, as it cannot be read: run.json.found.ratio.estimate is no number above 0, and 1 more."
    assert told in read(train_folder).text


def test_a_plan_for_longer_trainings_without_a_speed_is_no_error(ledger, tune_folder):
    ledger[-1]["long_plan"] = {"plan": {}, "speedup": {"estimate": 0.0, "low": 1.0, "high": 1.0}}
    assert "result.long_plan.speedup.estimate is no number above 0" in read(tune_folder(ledger)).text


@pytest.mark.parametrize(
    ("data", "said"), [("training", "of the training data"), (None, "Predictions of the c")]
)
def test_pictures_are_of_the_data_that_the_run_names(data, said, train_folder):
    """A job without a metric does not say what its pictures are of."""
    facts = json.loads((train_folder / "run.json").read_text())
    (train_folder / "run.json").write_text(json.dumps(facts | {"metric_data": data}))
    drawn = pictures.document({"of the cats": [pictures.Text("a", ["b"])]})
    (train_folder / pictures.PICTURES).write_text(json.dumps(drawn))
    assert said in " ".join(read(train_folder).text.split())


def test_a_command_that_no_shell_reads_is_shown_as_it_is(ledger, tune_folder):
    del ledger[-1]
    ledger[0]["command"] = "vivace tune it's"
    assert "Next vivace tune it's" in read(tune_folder(ledger)).text


def test_one_shadow_run_is_one(ledger, tune_folder):
    ledger[-1]["verdict"] |= {"steps": 1, "seeds": 1}
    assert "was kept: 1 step, 1 shadow run, 1 min 36 s." in read(tune_folder(ledger)).text


def test_report_imports_no_torch(ledger, tune_folder):
    code = (
        "import sys, vivace; vivace.report(sys.argv[1]); "
        "heavy = {'torch', 'numpy', 'matplotlib', 'vivace.plan', 'vivace.technique.registry'}; "
        "found = heavy & set(sys.modules); "
        "sys.exit(f'imported {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tune_folder(ledger))], check=True)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (phrases.steps(1), "1 step"),
        (phrases.steps(float("inf")), "never"),
    ],
)
def test_steps_that_gain_back_a_cost(said, expected):
    assert said == expected


def test_a_fact_without_a_unit_is_rounded():
    assert [phrases.plain(value) for value in (2.6876271980062096, 14548, True)] == ["2.69", "14,548", "yes"]


def test_speeds_beside_each_other_were_measured_in_turns(ledger, tune_folder):
    """The machine was twice as fast when the plan was confirmed: that is none of the plan's gain."""
    for document in ledger:
        if document.get("role") == "confirmation":
            document["samples_per_second"] *= 2
    content = load(tune_folder(ledger))
    strict, usual, _, plan = (bar.value for bar in content.baselines)
    assert usual == pytest.approx(1.21 * strict)
    assert plan == pytest.approx(2.31 * strict)
    assert content.over_default == pytest.approx(2.31 / 1.21)


@pytest.mark.parametrize(
    ("energy", "told"),
    [
        ({"reason": "no counter is here"}, "energy: no counter is here not measured"),
        (
            {"joules": 50.0, "joules_per_sample": 0.02, "counters": ["package-0", "dram"]},
            "a sample; counted by package-0, dram 0.02 J",
        ),
    ],
)
def test_what_a_sample_of_a_training_took(train_folder, energy, told):
    facts = json.loads((train_folder / "run.json").read_text())
    (train_folder / "run.json").write_text(json.dumps(facts | {"energy": energy}))
    assert told in read(train_folder).text
