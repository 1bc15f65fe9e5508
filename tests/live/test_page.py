"""The page of a script's run: the answer first, what was tried with its intervals, what was proven."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from vivace.ledger import Ledger
from vivace.live.answering import answer_of, came_of, details
from vivace.live.errand import LEDGER
from vivace.live.page import page
from vivace.live.search import _trial

SCENE = runpy.run_path(str(Path(__file__).parents[1] / "scenes" / "found.py"))
FASTER, RECORDS = SCENE["FASTER"], SCENE["RECORDS"]


def test_the_answer_comes_first_and_everything_tried_stands_below():
    text = page(FASTER, RECORDS, "python a.py")
    order = [
        "25 s",
        "saved in this run",
        "Same model: yes",
        "bf16_autocast",
        "vivace export",
        "The run beside",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "0.70x as fast on a copy of a step" in text
    assert "the update of &lt;head&gt; is 9 of 5 off" in text
    assert "<script" not in text
    assert "step 260" in text


def test_what_was_found_too_late_claims_no_seconds():
    answer = answer_of({**FASTER, "saved_seconds": 0.1, "watched": 1}, "python a.py")
    assert not answer.figure
    assert "too late" in answer.sentence
    assert "One compared step" in answer.same
    given = {**FASTER, "tried": [{"plan": {}, "answer": "given"}]}
    answer = answer_of({**given, "saved_seconds": 0.1}, "python a.py")
    assert "Too short a run for the plan" in answer.sentence
    answer = answer_of({**given, "saved_seconds": -9.0}, "python a.py")
    assert "9 s longer for being looked at: the plan's start took longer" in answer.sentence
    others = answer_of({**FASTER, "saved_seconds": None}, "python a.py")
    assert others.figure == "1.50\N{MULTIPLICATION SIGN} as fast"
    assert "no seconds are claimed" in others.sentence
    by_processor = answer_of({**FASTER, "saved_seconds": None, "clock": "processor"}, "python a.py")
    assert "by the processor's own clock" in by_processor.sentence
    below = {"ratio": {"estimate": 1.05, "low": 0.98, "high": 1.12}, "saved_seconds": None, "clock": "wall"}
    answer = answer_of({**FASTER, **below}, "python a.py")
    assert "which reaches below 1: no seconds are claimed" in answer.sentence
    assert "processor" not in answer.sentence


@pytest.mark.parametrize("outcome", ["left_alone", "not_faster", "taken_back"])
def test_a_run_left_as_it_is_says_why(outcome):
    document = {**FASTER, "outcome": outcome, "reason": "it scales its loss", "plan": {}}
    answer = answer_of(document, "python a.py")
    assert not answer.figure
    assert "it scales its loss" in answer.sentence
    assert "it scales its loss" in page(document, [], "python a.py")


def test_the_speed_of_what_was_added_to_a_plan_is_told_as_beside_that_plan(led, tmp_path):
    def train():
        torch.manual_seed(0)
        model = nn.Linear(64, 32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(300):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()

    _, _, told = led(train, factors={"fused_optimizer": 0.5, "bf16_autocast": 0.25})
    added = [entry for entry in told["tried"] if entry.get("beside")]
    assert added, told["tried"]
    first, second = added[0]["beside"][0], next(n for n in added[0]["plan"] if n not in added[0]["beside"])
    name = f"{second}, beside {first}"
    assert name in dict(came_of(told))
    assert name in dict(details(told, [])[0][1])
    assert name in (tmp_path / "run.html").read_text()
    assert _trial(added[0])["beside"] == [first]
    assert told["ratio"]["estimate"] == pytest.approx(4.0)  # of the whole, beside the script as it is


def test_the_curve_of_the_run_as_it_is_holds_no_steps_of_a_plan():
    beside = {
        "record": "adopted",
        "plan": {"a": {}, "b": {}},
        "beside": ["a"],
        "pairs": [[7.0, 6.0] * 2],
        "step": 9,
    }
    text = page({**FASTER}, [*RECORDS, beside], "python a.py")
    assert text.count("adopted at step") == 2
    plain = page({**FASTER}, RECORDS, "python a.py")
    assert _curve(text) == _curve(plain) != ""


def _curve(text):
    return text[text.index('<div class="plots">') : text.index("What was tried")]


def test_the_page_of_a_run_is_of_its_own_process_alone(led, tmp_path):
    """Others that the script starts may write into the same folder."""
    other = {"process": 1, "plan": {"x": {}}, "step": 123_456, "pairs": []}

    def train():
        model = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Ledger(tmp_path / LEDGER).append("adopted", other)
        for _ in range(200):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    _, _, told = led(train, "fused_optimizer")
    assert list(told["plan"]) == ["fused_optimizer"]
    text = (tmp_path / "run.html").read_text()
    assert "adopted at step" in text
    assert "adopted at step 123456" not in text
