"""The first screen of a profile: the evidence of what holds the step back is told whole."""

from vivace.pages.answer import MOST_LINES, lines
from vivace.profiling.answering import answer


def document():
    gain = {"low": 1.63, "high": 2.06}
    waits = "42 % of the step (165 ms) waits for data: collating samples into batches (most in tiny.py:11)"
    launches = "Twice the batch takes forward and backward 1.17 times as long: handing over takes the time"
    return {
        "target": "jobs.py:job",
        "tune": "vivace tune jobs.py:job",
        "verdicts": [
            {
                "cause": "input",
                "evidence": waits,
                "gain": gain,
                "next": "index the whole tensor by a batch of indices; vivace tune jobs.py:job measures it",
            }
        ],
        "bounds": [{"name": "launch", "evidence": launches, "gain": gain, "next": "a larger batch"}],
        "shares": {
            "data": 0.42,
            "place": 0.018,
            "forward": 0.19,
            "backward": 0.21,
            "update": 0.13,
            "idle": 0.03,
        },
        "step_seconds": 0.396,
        "samples_per_second": 80.0,
        "bound_seconds": 0.018,
        "share_of_limit": 0.045,
        "bound_by": "compute",
        "memory": {"peak_bytes": 9e6},
        "page_path": "runs/profile/profile.html",
        "work": {"epochs": 3, "steps_per_epoch": 128},
    }


def test_a_gpu_that_a_script_leaves_idle_stands_on_the_first_screen():
    found = answer(document() | {"idle_gpu": "the script trains on the processor, not on the H100"})
    assert "The script trains on the processor, not on the H100" in found.notes


def test_times_that_other_processes_disturbed_are_marked():
    quiet, disturbed = (
        answer(document() | more) for more in ({}, {"disturbed": True, "foreign_share": 0.37})
    )
    assert (
        "Other processes used 37 % of the processor meanwhile, so all times are disturbed" in disturbed.notes
    )
    assert [name for name, _ in disturbed.facts][:2] == ["a step, disturbed", "samples a second, disturbed"]
    assert "disturbed" not in str(quiet)


def test_two_causes_stand_whole_beside_the_shares_of_the_step_and_its_limit():
    told = lines(answer(document()), 80)
    assert len(told) <= MOST_LINES
    text = " ".join(" ".join(told).split())
    assert "..." not in text
    assert "batches (most in tiny.py:11)" in text
    assert "handing over takes the time" in text
    assert "A step takes 396 ms, at 4.5 % of this machine's limit: data 42 %" in text
