"""The page of a compression: the chart shows what was judged."""

import dataclasses
import io
import runpy
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from vivace.compressing.answering import answer, stayed
from vivace.compressing.page import chart, front, render
from vivace.compressing.result import Beside, Compressed, Tried
from vivace.compressing.table import draw
from vivace.ledger import Ratio
from vivace.serving.forms import FORMS

SUBJECT = {
    "metric_name": "accuracy", "metric": 0.9, "samples": 70, "threads": 2, "model": "M", "num_parameters": 9
}  # fmt: skip
CHANGE = {
    "value": 0.89,
    "reference": 0.9,
    "low": -0.02,
    "high": 0.0,
    "margin": 0.05,
    "needed": None,
    "samples": 9,
}


def tried(name, status, speed=None, change=None, reason=""):
    form = next(form for form in FORMS if form.name == name)
    ratio = Ratio(speed, 0.9 * speed, 1.1 * speed) if speed else None
    times = {"p50": 1 / speed, "p99": 2 / speed} if speed else {}
    return Tried(
        name, form.does, form.runtime, form.numbers, status, reason, ratio=ratio, change=change, **times
    )


@pytest.fixture
def found():
    forms = (
        tried("eager_fp32", "kept", 1.0),
        tried("onnx_fp32", "kept", 3.0, {**CHANGE, "value": 0.9}),
        tried("openvino_int8", "slower", 2.0, reason="slower than onnx_fp32, and not judged further"),
        tried("aoti_fp32", "untried", reason="the budget ended first"),
        tried("compiled_fp32", "unmeasured", reason="could not be measured (others used up to 52 %)"),
    )
    return Compressed("job", "latency", 1, 0.05, "onnx_fp32", forms, SUBJECT, {}, (), 1.0, "", page_path="p")


def test_what_was_not_judged_has_no_place_among_metrics(found):
    drawn = str(chart(found))
    assert "onnx_fp32" in drawn
    assert "openvino_int8" not in drawn
    assert {one.name for one in front(found)} == {"onnx_fp32"}
    worse = dataclasses.replace(found, tried=(*found.tried[:2], tried("onnx_int8", "kept", 5.0, CHANGE)))
    assert {one.name for one in front(worse)} == {"onnx_fp32", "onnx_int8"}


def test_every_answer_stands_on_the_page(found):
    page = render(found)
    for one in found.tried[1:]:
        assert one.status in page
        assert one.reason in page


def test_what_stayed_in_fp32_and_why_is_told_on_the_page_and_in_the_terminal(found):
    operators = [
        {"name": f"block{i}", "numbers": "fp32", "why": "left out of int8 by NNCF"} for i in range(6)
    ]
    operators.insert(3, {"name": "head", "numbers": "fp32", "why": "OpenVINO does not tell why"})
    int8 = dataclasses.replace(found.tried[2], stayed=tuple(operators))
    assert stayed(int8) == [
        "6 ran in fp32 (block0, block1, block2, block3 and 2 more): left out of int8 by NNCF",
        "1 ran in fp32 (head): OpenVINO does not tell why",
    ]
    found = dataclasses.replace(found, tried=(*found.tried[:2], int8))
    console = Console(file=io.StringIO(), width=400)
    draw(found, console, details=True)
    for text in (render(found), console.file.getvalue()):
        assert all(line in text for line in stayed(int8))


BESIDE = (
    Beside("eager_fp32", "", 1, "", Ratio(1.0, 1.0, 1.0), 1.0, 2.0, 1.0, 9),
    Beside("compiled_default", "as it comes", 1, "", Ratio(3.5, 3.4, 3.6), 0.3, 0.4, 3.47, 9),
    Beside("trained_plan", "", 1, "no answer within 60 s"),
    Beside("onnx_fp32", "", 1, "", Ratio(3.0, 2.9, 3.1), 0.3, 0.4, 3.0, 9),
    Beside("trained_plan", "", 8, "", Ratio(9.0, 8.9, 9.1), 0.3, 0.4, 26.1, 9),
)


def test_where_none_is_smaller_nothing_is_said_of_faster_ones(found):
    nothing = dataclasses.replace(found, chosen="eager_fp32", tried=found.tried[:3])
    assert answer(nothing).sentence.startswith("No form is better than your model as it is")
    ended = dataclasses.replace(nothing, go_on="vivace compress --resume")
    assert answer(ended).sentence.startswith("No form that was tried is better than your model as it is")
    sized = dataclasses.replace(nothing, objective="size")
    assert answer(sized).sentence.startswith("No form is smaller than your model as it is")


def test_what_is_timed_beside_stands_on_the_page_and_in_the_details(found):
    found = dataclasses.replace(found, beside=BESIDE)
    console = Console(file=io.StringIO(), width=400)
    draw(found, console, details=True)
    for text in (render(found), console.file.getvalue()):
        for told in (
            "compiled_default",
            "no answer within 60 s",
            "3.47",
            "26.1",
            "9.00\N{MULTIPLICATION SIGN}",
        ):
            assert told in text


def test_what_is_faster_than_the_answer_and_was_not_judged_is_said(found):
    def said(**changes):
        notes = answer(dataclasses.replace(found, beside=BESIDE, **changes)).notes
        return [note for note in notes if "was not judged" in note]

    assert said() == [
        "compiled_default (as it comes) is 3.50\N{MULTIPLICATION SIGN} as fast, and was not judged"
    ]
    assert said(batch=8) == []
    assert said(objective="size") == []


def test_the_details_fit_80_columns_and_no_name_is_cut():
    scene = runpy.run_path(str(Path(__file__).parents[1] / "scenes" / "found.py"))
    console = Console(file=io.StringIO(), width=80)
    draw(scene["compressed"](), console, details=True)
    text = console.file.getvalue()
    commands = [line for line in text.splitlines() if line.startswith("Next: ")]
    assert max(cell_len(line) for line in text.splitlines() if line not in commands) <= 80
    assert "…" not in text
    for form in FORMS:
        assert form.name in text
        assert form.does.split()[0] in text


def test_the_fastest_of_what_too_few_samples_leave_open_is_told_first(found):
    slow, fast = (
        tried(name, "undecided", speed, {**CHANGE, "needed": 410}, "about 410 samples are needed")
        for name, speed in (("openvino_bf16", 4.0), ("onnx_int8", 7.0))
    )
    no_faster = tried("openvino_fp32", "undecided", 2.0, CHANGE, "it could be")
    told = answer(dataclasses.replace(found, tried=(*found.tried, slow, fast, no_faster))).notes
    assert [note.split()[0] for note in told if "would be" in note] == ["onnx_int8", "openvino_bf16"]


def test_what_was_not_tried_is_not_among_what_was(found):
    told = answer(found)
    assert [name for name, _ in told.parts] == ["onnx_fp32", "openvino_int8", "compiled_fp32"]
    (note,) = (note for note in told.notes if note.startswith("not tried"))
    assert note.endswith("the time was over: aoti_fp32")
    assert "the budget ended first" in render(found)
