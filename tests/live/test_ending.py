"""What a script's run says at its end: twelve lines, and with details all that its page holds."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.live.answering import came_of, searched
from vivace.live.ending import PREFIX, said
from vivace.live.page import page
from vivace.pages.answer import MOST_LINES, lines

SCENE = runpy.run_path(str(Path(__file__).parents[1] / "scenes" / "found.py"))
FASTER, RECORDS, VERDICT = SCENE["FASTER"], SCENE["RECORDS"], SCENE["VERDICT"]
COMMAND = "python train.py --epochs 90 --data a/folder/with/pictures --workers 4"
LONG = " ".join(["the loss of a layer with a long name is 9 of 5 allowed"] * 6)
MANY = [{"plan": {f"a_technique_{i}": {}}, "answer": f"{i}: {LONG}"} for i in range(30)]
WORST = {
    **FASTER,
    "tried": [*FASTER["tried"], *MANY],
    "problems": [f"Traceback\n{LONG}", LONG],
    "only_the_rest": LONG,
    "page": "runs/run/run.html",
}


@pytest.mark.parametrize("outcome", ["faster", "not_faster", "taken_back", "left_alone", "nothing_seen"])
def test_the_longest_ending_is_twelve_lines_of_eighty_columns(outcome, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    document = WORST | {"outcome": outcome}
    if outcome != "faster":
        document |= {"plan": {}, "reason": LONG, "next": f"vivace profile -- {COMMAND}"}
    told = said(document, COMMAND)
    assert len(told) <= MOST_LINES
    assert all(line.startswith(PREFIX) for line in told)
    assert [line for line in told if len(line) > 80 and "Next: " not in line] == []
    assert any(line.startswith(f"{PREFIX}Page: runs/run/run.html") for line in told)


@pytest.mark.parametrize("columns", ["1", "8", "9", "30"])
def test_the_narrowest_terminal_gets_the_last_words_too(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    for records in (None, []):
        told = "".join(line.removeprefix(PREFIX).strip() for line in said(WORST, COMMAND, records))
        assert "runs/run/run.html" in told.replace(" ", "")


def test_a_loss_of_the_whole_run_is_said():
    cost = {"saved_seconds": -1.5, "own_seconds": 3.2}
    (first, *_) = said({**FASTER, **cost}, COMMAND)
    assert "This run took up to 1.5 s longer for being looked at" in first
    told = " ".join(said({**FASTER, **cost}, COMMAND))
    assert "1.50x" in told
    assert "saved in this run" not in told
    for outcome in ("not_faster", "taken_back", "left_alone"):
        document = {**FASTER, **cost, "outcome": outcome, "plan": {}, "reason": "nothing was faster"}
        told = " ".join(said(document, COMMAND))
        assert "This run took up to 1.5 s longer" in told
        assert "nothing was faster" in told
        assert "longer" not in " ".join(said({**document, "saved_seconds": -0.1}, COMMAND))


def test_why_nothing_acts_on_the_calls_is_no_reason_that_hides_another():
    rest = "it calls its model 2 times for 1 backward pass"
    document = {**FASTER, "outcome": "left_alone", "plan": {}, "tried": [], "only_the_rest": rest}
    told = " ".join(line.removeprefix(PREFIX) for line in said({**document, "reason": "too short"}, COMMAND))
    assert "was left as it is: too short. Its model's calls are as they were: it calls" in told


def test_a_script_that_is_ended_keeps_what_it_printed_and_ends_its_daemons():
    program = (
        "import multiprocessing, time\n"
        "from vivace.live.ending import end_at_once\n"
        "start = multiprocessing.get_context('fork').Process\n"
        "start(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "print('loss 0.5')\n"
        "end_at_once()\n"
    )
    # The daemon holds the other end of the pipe: this ends with it.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    assert done.stdout == "loss 0.5\n"


def test_a_fault_is_told_once():
    problem, reason = "Traceback\nKeyError: 'a'", "a fault of Vivace's own, KeyError: 'a'"
    document = {**FASTER, "outcome": "left_alone", "plan": {}, "reason": reason, "problems": [problem]}
    assert " ".join(said(document, COMMAND)).count("KeyError") == 1
    assert "KeyError" in " ".join(said({**FASTER, "problems": [problem]}, COMMAND))


def test_a_ratio_is_that_of_the_clock_that_answered():
    """On a processor that others use: by the wall's clock alone, what was adopted would look undecided."""
    timed = {"wall": {"estimate": 1.1, "low": 0.7, "high": 1.4}, "cpu": FASTER["ratio"], "clock": "processor"}
    entry = {"plan": {"bf16_autocast": {}}, "answer": "faster", **timed}
    ((_, told),) = came_of({**FASTER, "tried": [entry]})
    assert told == "1.50\N{MULTIPLICATION SIGN} (1.30\N{EN DASH}1.70), by the processor's clock"
    assert "0.70" in came_of({**FASTER, "tried": [{**entry, "clock": "wall"}]})[0][1]
    assert "1.30 to 1.70" in page({**FASTER, "tried": [entry]}, RECORDS, COMMAND)


def test_details_are_the_ledger_before_the_answer(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = said(FASTER, COMMAND, RECORDS)
    answer = said(FASTER, COMMAND)
    assert told[-len(answer) :] == answer
    of_page = said({**FASTER, "page": "runs/run/run.html"}, COMMAND, RECORDS)
    assert f"{PREFIX}Page: runs/run/run.html" in of_page  # without a word on --details
    before = "\n".join(told[: -len(answer)])
    for text in (
        "1.50x (1.30-1.70)",
        "9 of 5 off",
        "0.70x as fast on a copy",
        "adopted at step 60",
        "step 260",
        "400",
    ):
        assert text in before


def test_what_a_script_is_called_is_no_control_code():
    told = said({**FASTER, "problems": ["\x1b[31mred"]}, "python a.py")
    assert not any("\x1b" in line for line in told)


@pytest.mark.parametrize("found", [True, False])
def test_a_search_on_a_script_ends_as_short(found):
    document = {**WORST, "speedup": FASTER["ratio"], "report_path": "runs/tune/run.html", "reason": LONG}
    document |= {} if found else {"outcome": "none_kept", "plan": {}}
    told = lines(searched(document, COMMAND), 80)
    assert len(told) <= MOST_LINES
    assert ("1.50x as fast in a step of the script" in told[0]) is found
    assert "Nothing that the script wrote was kept." in told


def test_a_reason_that_several_share_is_told_once():
    why = "its model is compiled"
    tried = [{"plan": {name: {}}, "answer": why} for name in ("channels_last", "bf16_autocast")]
    tried += [
        {"plan": {"tf32": {}}, "answer": "not_kept", "verdict": {**VERDICT, "kept": False, "reason": "x"}}
    ]
    document = {**FASTER, "outcome": "not_faster", "plan": {}, "reason": "nothing was faster", "tried": tried}
    told = said(document, "python a.py")
    assert sum(why in line for line in told) == 1
    assert any("channels_last, bf16_autocast" in line for line in told)
