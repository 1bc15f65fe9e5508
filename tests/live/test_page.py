"""The page of a script's run: the answer first, what was tried with its intervals, what was proven."""

import pytest

from vivace.live.page import answer_of, page

RATIO = {"estimate": 1.5, "low": 1.3, "high": 1.7}
VERDICT = {"kept": True, "reason": "", "score": 1.2, "limit": 5.0, "seconds": 0.2}
FASTER = {
    "outcome": "faster",
    "reason": "",
    "steps": 400,
    "seconds": 90.0,
    "own_seconds": 2.0,
    "problems": [],
    "plan": {"bf16_autocast": {}},
    "tried": [
        {"plan": {"bf16_autocast": {}}, "answer": "faster", "step": 60, "wall": RATIO, "verdict": VERDICT},
        {
            "plan": {"fused_optimizer": {}},
            "answer": "not_kept",
            "verdict": {**VERDICT, "kept": False, "reason": "the update of <head> is 9 of 5 off"},
        },
        {"plan": {"channels_last": {}}, "answer": "0.70x on a copy of the step"},
    ],
    "ratio": RATIO,
    "saved_seconds": 25.0,
    "plan_steps": 300,
    "watched": 2,
    "limit": 5.0,
    "worst": 1.2,
    "next": "vivace run --plan runs/run/plan.toml -- python a.py",
    "in_your_code": "vivace export --plan runs/run/plan.toml",
}
RECORDS = [
    {"record": "adopted", "plan": {"bf16_autocast": {}}, "step": 60, "pairs": [[0.2, 0.13, 0.2, 0.13]] * 4},
    {"record": "watched", "step": 260, **VERDICT},
]


def test_the_answer_comes_first_and_everything_tried_stands_below():
    text = page(FASTER, RECORDS, "python a.py")
    order = [
        "25 s",
        "saved of this run",
        "Same model: yes",
        "bf16_autocast",
        "vivace export",
        "The run beside",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "0.70x on a copy of the step" in text
    assert "the update of &lt;head&gt; is 9 of 5 off" in text
    assert "<script" not in text
    assert "step 260" in text


def test_what_was_found_too_late_claims_no_seconds():
    answer = answer_of({**FASTER, "saved_seconds": None, "watched": 1}, "python a.py")
    assert answer.figure == "1.50x"
    assert "too late" in answer.sentence
    assert "Watched once" in answer.same


@pytest.mark.parametrize("outcome", ["left_alone", "not_faster", "taken_back"])
def test_a_run_left_as_it_is_says_why(outcome):
    document = {**FASTER, "outcome": outcome, "reason": "it scales its loss", "plan": {}}
    answer = answer_of(document, "python a.py")
    assert not answer.figure
    assert "it scales its loss" in answer.sentence
    assert "it scales its loss" in page(document, [], "python a.py")
