"""What a notebook shows of each result: small, escaped, without a script, a style sheet or a link."""

import html.parser
import re
from pathlib import Path

import pytest

import vivace
from vivace.ledger import Outcome, Ratio, Trial
from vivace.machine import Device, Finding, Machine
from vivace.pages.answer import Answer
from vivace.pages.render import card

SPITEFUL = '<script>alert("x")</script> & <img src=x onerror=alert(1)>'
MOST_CHARACTERS = 4000
EMPTY = {"img", "br", "hr"}
PLAN = {"channels_last": {}, "bf16_autocast": {}}


class Nesting(html.parser.HTMLParser):
    """Every element that opens also closes, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.open += [] if tag in EMPTY else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def plan():
    return vivace.Plan.from_dict(PLAN)


def verdict(kept=True):
    figure = {"score": 4.31, "limit": 8.0, "envelope": 0.01, "kept": True}
    checks = ({"name": "decay, from step 21", **figure},)
    reason = "" if kept else SPITEFUL
    return vivace.Verdict(kept, "rounding", 0.7, 4.31, 120, 8, reason, 12.0, checks, 157)


def result(**changes):
    ratio = Ratio(2.0, 1.9, 2.1)
    trial = Trial(PLAN, plan().id, "m", "j", "measured", ratio=ratio, pairs=((0.2, 0.1),) * 4)
    known = {
        "plan": plan(),
        "plan_path": "runs/tune/plan.toml",
        "speedup": ratio,
        "baselines": {"strict_fp32": 640.0, "default": None, "tf32": None},
        "baseline_notes": {},
        "verdict": verdict(),
        "break_even_steps": 3,
        "input_pipeline": {},
        "waterfall": [],
        "trials": [trial],
        "report_path": "runs/tune/report.html",
        "seconds": 118.0,
        "outcome": Outcome.FASTER,
        "job_steps": 3000,
        "training_seconds": {"reference": 600.0, "plan": 310.0},
    }
    return vivace.Result(**known | changes)


def run(**changes):
    known = {"run_path": SPITEFUL, "steps": 900, "epochs": 3, "metric": 0.975, "loss": 0.07}
    known |= {"seconds": 252.0, "samples_per_second": 2718.0, "resumed_from_step": None}
    known |= {"metric_data": "validation", "metric_name": "accuracy", "plan": PLAN, "does": plan().does}
    return vivace.Run(**known | changes)


def machine(**changes):
    device = Device("cpu", SPITEFUL, 2**34, ("avx2",))
    return Machine((device,), 2, {"torch": "2.15.0"}, {}, **changes)


def profile():
    shares = {"data": 0.1, "forward": 0.4, "backward": 0.5}
    return vivace.Profile("cpu", 0.123, shares, {}, 100, 0.0, 2**20, 2**24)


SHOWN = {
    "result": (
        result,
        ["10 min", "5 min 10 s", "2.00", "Same model: yes", "channels_last", "vivace.train(job"],
    ),
    "nothing helps": (lambda: result(plan=vivace.Plan(), outcome=Outcome.NOTHING_HELPS), ["train as you do"]),
    "kept": (verdict, ["Same model: yes", "4.3 of 8", "weight decay, step 21", "157"]),
    "broken": (lambda: verdict(kept=False), ["Same model: no"]),
    "not judged": (lambda: verdict(kept=None), ["not judged"]),
    "profile": (profile, ["123 ms", "backward", "50 %", "16.0 MiB"]),
    "plan": (plan, ["ROUNDING", "bf16_autocast"]),
    "empty plan": (vivace.Plan, ["The job as it is"]),
    "machine": (machine, ["16.0 GiB", "2.15.0"]),
    "broken machine": (
        lambda: machine(findings=(Finding("no driver", "install it"),)),
        ["No driver; next: "],
    ),
    "run": (run, ["4 min 12 s", "900 steps in 3 epochs", "accuracy on the validation data", "0.975"]),
    "stopped run": (lambda: run(interrupted=True, interrupted_by="SIGINT"), ["Stopped by SIGINT after"]),
    "run on training data": (lambda: run(metric_data="training"), ["accuracy on the training data"]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_result_is_shown_by_its_answer(name):
    make, told = SHOWN[name]
    page = make()._repr_html_()
    text = re.sub(r"<[^>]*>", "", page)
    for part in told:
        assert part in text
    assert len(page) <= MOST_CHARACTERS
    assert "<script" not in page
    assert "<img" not in page
    assert not re.search(r"https?:|<style|<link", page)
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []
    assert nesting.seen <= {"div", "b", "span", "code"}


def test_a_profile_of_the_command_is_shown_by_its_answer():
    gain = {"low": 1.2, "high": 1.5}
    document = {
        "target": SPITEFUL,
        "tune": "vivace tune",
        "verdicts": [{"cause": "input", "evidence": "it waits", "gain": gain, "next": "num_workers=2"}],
        "bounds": [],
        "shares": {"data": 0.2, "forward": 0.8},
        "step_seconds": 0.215,
        "samples_per_second": 297.0,
        "memory": {"peak_bytes": 9e6},
    }
    page = vivace.Profiled(document, Path("profile.html"), None)._repr_html_()
    assert "num_workers=2" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_the_longest_answer_stays_small():
    parts = tuple((f"technique_{i}", "word " * 20) for i in range(60))
    page = card(Answer("tune", "job", "a sentence", parts=parts, tone="bad"))
    assert page.count("technique_") == 7
    assert "and 53 more" in page
