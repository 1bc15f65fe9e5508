"""The first screen and the ending: one order, twelve lines, no word torn, and a verdict in plain words."""

import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from vivace.pages.answer import MOST_LINES, Answer, ending, shown_parts
from vivace.pages.sameness import of_run, plain, sameness
from vivace.verifying.figures import DICTATED, Quantity
from vivace.verifying.judgement import outright, sentence_of
from vivace.verifying.table import draw
from vivace.verifying.verdict import Verdict

CHECKS = [
    {"name": "loss, from step 0", "score": 1.2, "limit": 8.0},
    {"name": "decay, from step 21", "score": 4.31, "limit": 8.0},
    {"name": "residual of 0.bias, from step 21", "score": 5.0, "limit": 20.0},
    {"name": "buffers", "score": None, "limit": 8.0},
]
ANSWER = Answer(
    command="tune",
    subject="train.py:job",
    figure="31 min \N{RIGHTWARDS ARROW} 13 min",
    sentence="for one training",
    same="Same model: yes. Worst of 157 checks: 4.3 of 8 allowed (weight decay, step 21)",
    same_kept=True,
    parts=(("compile", "the model compiled"), ("bf16_weights", "the model in bfloat16")),
    notes=("its warm-up is long",),
    next=("vivace train train.py:job --plan runs/tune/plan.toml",),
    page="runs/tune/report.html",
)


def told(answer, width=80, *, details=False):
    console = Console(file=io.StringIO(), width=width)
    ending(answer, console, details=details)
    return console.file.getvalue().splitlines()


def test_an_ending_has_the_order_of_the_page():
    assert told(ANSWER) == [
        "31 min -> 13 min for one training.",
        "Same model: yes. Worst of 157 checks: 4.3 of 8 allowed (weight decay, step 21).",
        "What the plan does:",
        "  compile       the model compiled",
        "  bf16_weights  the model in bfloat16",
        "Its warm-up is long.",
        "Page: runs/tune/report.html  (all of it here: --details)",
        "Next: vivace train train.py:job --plan runs/tune/plan.toml",
    ]


def test_nobody_is_sent_to_the_details_that_stand_above():
    brief, whole = told(ANSWER), told(ANSWER, details=True)
    assert [line for line in brief if line not in whole] == [
        "Page: runs/tune/report.html  (all of it here: --details)"
    ]
    assert whole[-2] == "Page: runs/tune/report.html"
    untested = {"pairs": 0, "not_tested": "the job has a step of its own"}
    assert "--details" not in shown(details=True, bias=untested)
    assert "--details" in shown(details=False)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("num_parts", [0, 3, 30])
@pytest.mark.parametrize("num_notes", [0, 1, 9])
def test_the_longest_answer_has_twelve_lines(width, num_parts, num_notes):
    words = "word " * 60
    parts = tuple((f"technique_{i}", words) for i in range(num_parts))
    lines = told(
        Answer(
            command="tune",
            subject="job",
            sentence=words.strip(),
            same=words.strip(),
            parts=parts,
            notes=(words.strip(),) * num_notes,
            next=("vivace train job",),
            page="page.html",
        ),
        width,
    )
    assert len(lines) <= MOST_LINES
    assert max(map(cell_len, lines)) <= width
    assert lines[-1] == "Next: vivace train job"
    assert ("and " in " ".join(lines)) is (num_parts == 30 or (num_parts == 3 and num_notes > 0))
    assert not {word for line in lines for word in line.split()} & {"wor", "wo", "w"}


def test_the_first_note_is_told_before_the_parts_are():
    """As that a search was interrupted."""
    words = "word " * 40
    parts, next_ = tuple((f"form_{i}", words) for i in range(9)), ("vivace export", "vivace compress")
    notes = ("interrupted: 11 forms more might be tried", "another one")
    found = Answer("compress", "job", words, same=words, parts=parts, notes=notes, next=next_, page="p.html")
    assert told(found)[-5:-3] == ["  and 8 more", "Interrupted: 11 forms more might be tried."]


def test_the_first_parts_are_folded_where_not_all_are():
    """The one that is to be copied."""
    call = 'openvino.Core().compile_model("model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})'
    lines = told(
        dataclasses.replace(ANSWER, parts=(("call", call), *(("others", "word " * 30),) * 3)), width=60
    )
    (first,) = (number for number, line in enumerate(lines) if line.startswith("  call"))
    assert " ".join(" ".join(lines[first : first + 2]).split()) == f"call {call}"
    assert sum(line.endswith("...") for line in lines) == 3


def test_names_are_neither_markup_nor_control_codes():
    lines = told(Answer(command="tune", subject="", sentence="[bold]a[/] \x1b[2J", parts=(("\x1b[1m", "b"),)))
    assert lines[0].startswith("[bold]a[/]")
    assert "\x1b" not in "".join(lines)


def test_the_first_screen_counts_the_parts_that_it_leaves_out():
    parts = tuple((f"technique_{i}", "") for i in range(12))
    few, many = (Answer(command="tune", subject="", sentence="", parts=each) for each in (parts[:8], parts))
    assert shown_parts(few) == parts[:8]
    assert shown_parts(many)[-1] == ("and 5 more", "below")
    noted = dataclasses.replace(many, notes=("a note",) * 4)
    assert (len(shown_parts(noted)), shown_parts(noted)[-1]) == (7, ("and 6 more", "below"))
    assert shown_parts(dataclasses.replace(few, notes=("a note",) * 20)) == (
        parts[0],
        ("and 7 more", "below"),
    )


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ({}, "Same model: not verified yet"),
        (
            {"kept": True, "promise": "rounding", "num_checks": 157, "checks": CHECKS},
            "Same model: yes. Worst of 157 checks: 4.3 of 8 allowed (weight decay, step 21)",
        ),
        (
            {
                "kept": False,
                "promise": "rounding",
                "checks": [{"name": "scale", "score": 980.0, "limit": 8.0}],
            },
            "Same model: no. Worst of 1 check: 980 of 8 allowed (size of the update)",
        ),
        (
            {
                "kept": False,
                "promise": "rounding",
                "checks": [{"name": "scale", "score": 8.04, "limit": 8.0}],
            },
            "Same model: no. Worst of 1 check: 8.04 of 8 allowed (size of the update)",
        ),
        (
            {"kept": False, "promise": "rounding", "checks": CHECKS, "reason": "metric 0.91 against 0.97"},
            "Same model: no. Metric 0.91 against 0.97",
        ),
        ({"kept": True, "promise": "exact", "checks": CHECKS}, "Same model: yes, bit for bit"),
        ({"kept": None, "promise": "rounding", "reason": "it crashed"}, "Same model: not judged. It crashed"),
        (
            {"kept": True, "promise": "semantics", "reason": "metric 0.91 against 0.92"},
            "Same metric: yes. Metric 0.91 against 0.92",
        ),
        ({"kept": True, "checks": [{"name": None}, 7, {"score": "x", "limit": 8}]}, "Same model: yes"),
    ],
)
def test_a_verdict_in_one_line(verdict, said):
    assert sameness(verdict) == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("residual of 0.bias, from step 21", "direction of the update of 0.bias, step 21"),
        ("dictated residual, early, from step 0", "direction of the update with given gradients, early"),
        ("dictated scale of 0.bias, late", "size of the update of 0.bias with given gradients, late"),
        ("displacement of the course, from step 0", "all weights at the end"),
        ("buffer 1.running_mean, from step 40", "buffer 1.running_mean, step 40"),
        ("gradient size, from step 40", "typical size of the gradient, step 40"),
        ("scale, over evaluations and epochs", "size of the update after evaluations and ends of epochs"),
        (
            "decay of body.bias, over evaluations and epochs",
            "weight decay of body.bias after evaluations and ends of epochs",
        ),
    ],
)
def test_checks_have_plain_names(name, said):
    assert plain(name) == said


def test_every_quantity_of_a_verdict_has_plain_words():
    """Those of single buffers and outputs, of the job's facts and of first values say it by themselves."""
    itself = {"buffer", "output", "output scale", "facts", "random numbers drawn", "initial value"}
    itself |= {"metric of the same weights"}
    quantities = {quantity for quantity in Quantity if quantity not in DICTATED}
    assert {q for q in quantities if plain(q) == q} - {"loss", "loss curve"} == itself


def test_verify_ends_with_the_line_and_what_the_plan_does(tmp_path):
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.channels_last]\n")
    checks = tuple({**check, "value": 0.1, "envelope": 0.1, "kept": True} for check in CHECKS[:3])
    verdict = Verdict(True, "rounding", 1.0, 1.0, 33, 8, "", 12.0, checks, 157)
    console = Console(file=io.StringIO(), width=80)
    draw(verdict, "my job.py:job", str(tmp_path / "plan.toml"), console)
    lines = console.file.getvalue().strip().splitlines()
    assert lines[0] == ANSWER.same + "."
    assert lines[2] == "  channels_last  feature maps in NHWC memory order"
    assert lines[-1].startswith("Next: vivace train 'my job.py:job' --plan ")
    assert "157 checks, 8 shadow runs" in " ".join(lines)
    draw(verdict, "my job.py:job", str(tmp_path / "plan.toml"), console, details=True)
    assert "direction of the update of 0.bias, step 21" in console.file.getvalue()


def test_a_layer_is_named_to_its_end_and_is_no_markup():
    layer = f"heads.[cls].{'projection_of_the_' * 5}output"
    check = {**CHECKS[0], "name": f"residual of {layer}, from step 21", "value": 0.1, "envelope": 0.1}
    console = Console(file=io.StringIO(), width=80)
    verdict = Verdict(True, "rounding", 1.0, 1.0, 33, 8, "", 12.0, ({**check, "kept": True},), 1)
    draw(verdict, "job.py:job", "", console, details=True)
    table = console.file.getvalue().partition("\n\n")[0]
    assert layer in "".join(table.split())


def test_what_broke_is_said_once_and_in_plain_words():
    broken = {"name": "decay, from step 21", "quantity": "decay", "layer": None, "step": 21, "kept": False}
    broken |= {"value": 1.0, "envelope": 1e-7, "score": 1e7, "limit": 8.0}
    for note in ("", "and more of it"):
        reason = "; ".join(filter(None, (sentence_of(broken), note)))
        verdict = Verdict(False, "rounding", 1.0, 1.0, 33, 8, reason, 12.0, (broken,), 99)
        console = Console(file=io.StringIO(), width=80)
        draw(verdict, "job.py:job", "", console)
        said = " ".join(console.file.getvalue().split())
        assert "Worst of 99 checks: 10,000,000 of 8 allowed (weight decay, step 21)." in said
        assert ("And more of it." in said) is bool(note)
        assert "envelopes" not in said


def test_no_shadow_is_counted_where_none_was_needed():
    found = outright(False, "weight_decay of 0.weight is 0.01, and 0.05 in the original", Quantity.FACTS)
    fields = {key: found[key] for key in ("kept", "reason", "loss_envelopes", "displacement_envelopes")}
    checks = {"checks": tuple(found["checks"]), "num_checks": found["num_checks"]}
    console = Console(file=io.StringIO(), width=80)
    draw(Verdict(promise="rounding", steps=33, seeds=8, **fields, **checks), "job.py:job", "", console)
    said = " ".join(console.file.getvalue().split())
    assert "Same model: no. weight_decay of 0.weight is 0.01" in said
    assert "1 check" in said
    assert "shadow" not in said


def shown(details=True, seen=(0.0065, 0.013), kept=True, left_out=(), **fields):
    checks = [{**check, "value": 0.1, "envelope": 0.1, "kept": True} for check in CHECKS[:3]]
    checks += [
        {**checks[0], "name": str(quantity), "quantity": quantity, "seen_from": least}
        for quantity, least in zip((Quantity.GRADIENT_BIAS, Quantity.GRADIENT_DRIFT), seen, strict=True)
    ]
    verdict = Verdict(kept, "rounding", 1.0, 1.0, 33, 8, "", 12.0, tuple(checks), 157, **fields)
    verdict = dataclasses.replace(verdict, details=left_out)
    console = Console(file=io.StringIO(), width=200)
    draw(verdict, "job.py:job", "", console, details=details)
    return console.file.getvalue()


def test_verify_says_how_small_a_bias_would_have_been_seen_or_why_none():
    told = shown(bias={"pairs": 32, "not_tested": ""})
    assert (
        "over 32 steps of each: seen four times of five from a mean gradient too long or too short by" in told
    )
    assert "by 0.7 %, one that is off in any direction by 1.3 % on" in told
    why = "the job has a step of its own"
    assert f"Bias was not tested: {why}." in shown(bias={"pairs": 0, "not_tested": why})
    assert "Bias" not in shown()  # of a plan that does not round


@pytest.mark.parametrize(
    ("seen", "told"),
    [((0.0065, 0.09), ""), ((0.0065, 0.12), "from 12 % of a gradient"), ((0.3, 0.12), "from 30 % of a")],
)
def test_the_first_screen_says_where_only_a_large_bias_would_have_been_seen(seen, told):
    tested = {"pairs": 6, "not_tested": ""}
    first = shown(details=False, seen=seen, bias=tested)
    assert ("lean to one side" in first) == bool(told)
    assert told in first
    assert "lean to one side" not in shown(details=False, seen=seen, bias=tested, kept=False)


def test_the_first_screen_says_where_no_bias_would_have_been_seen():
    first = shown(details=False, bias={"pairs": 0, "not_tested": "the job has a step of its own"})
    assert "Whether errors lean to one side was not tested; --details says why." in first


def test_what_does_not_bear_on_the_answer_stands_in_the_details_alone():
    left_out = ("batches of other shapes were looked for in what came in 10 s (812 of epoch 1)",)
    assert "of other shapes" not in shown(details=False, left_out=left_out)
    assert shown(left_out=left_out).count("Batches of other shapes were looked for in what came in 10 s") == 1


def test_verify_says_that_the_data_were_compared_to_their_end():
    whole, cut = ({"batches": 1200, "whole": whole} for whole in (True, False))
    told = shown(details=False, fed={"data": [whole] * 3})
    assert "Batches were compared to the end of the data: 3 epochs of 1,200 batches" in told
    assert "end of the data" not in shown(fed={"data": [whole, whole, cut]})


@pytest.mark.parametrize(
    ("run", "said", "kept"),
    [
        ({}, "", None),
        ({"plan": {}, "watched": None, "found": {"outcome": "not_faster"}}, "", None),
        ({"plan": {"compile": {}}}, "Same model: not verified yet", None),
        ({"plan": {"compile": {}}, "watched": {"kept": None}}, "Same model: not verified yet", None),
        (
            {"plan": {"compile": {}}, "watched": {"kept": True, "steps": 12}, "steps": 900},
            "yes, in all 12 of 900 steps that were watched",
            True,
        ),
        ({"plan": {"compile": {}}, "watched": {"kept": True, "steps": 4}, "steps": 4}, "yes, in all 4", True),
        (
            {
                "plan": {"compile": {}},
                "watched": {"kept": True, "steps": 1},
                "steps": 900,
                "resumed_from_step": 660,
            },
            "not verified. Only 1 of 900 steps was watched; there it was the same",
            None,
        ),
        (
            {
                "plan": {"compile": {}},
                "watched": {"kept": True, "steps": 12},
                "steps": 900,
                "resumed_from_step": 890,
            },
            "yes, in all 12 of 900 steps that were watched",
            True,
        ),
        ({"plan": {"compile": {}}, "watched": {"kept": False}}, "Same model: no", False),
        (
            {"plan": {"compile": {}}, "found": {"outcome": "faster"}},
            "yes. Proven on a step of this run",
            True,
        ),
        ({"plan": {"compile": {}}, "tuned": {"verdict": {"kept": False}}}, "no, as tune verified", False),
        (
            {"plan": {"compile": {}}, "tuned": {"verdict": {"kept": True}}, "watched": {"kept": False}},
            "Same model: no",
            False,
        ),
    ],
)
def test_of_a_training_is_said_what_is_known_of_its_model(run, said, kept):
    line, answer = of_run(run)
    assert said in line
    assert answer is kept


def test_a_word_longer_than_a_line_is_cut_and_not_lost():
    lines = told(dataclasses.replace(ANSWER, parts=(("a" * 90, "of one kind"),) * 9), width=60)
    assert sum("aaaa" in line for line in lines) >= 3
    assert max(map(cell_len, lines)) <= 60
