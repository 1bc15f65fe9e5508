"""What less memory costs, and what the batch's size does: charts and rows from the ledger."""

# ruff: noqa: RUF001 - the figures stand here as a reader sees them

import re

import pytest

import vivace
from vivace.reporting import memory
from vivace.reporting.reading import load

MIB = 2**20
CHOICE = {
    "record": "memory",
    "budget_bytes": 110 * MIB,
    "plan": {"checkpoint": {"cheap": ["*"]}},
    "peak_bytes": 108 * MIB,
    "kept_bytes": 160 * MIB,
    "step_seconds": 0.25,
    "seconds": 0.02,
    "curve": [[90 * MIB, 0.05], [110 * MIB, 0.02], [160 * MIB, 0.0]],
}
BATCHES = {
    "record": "batches",
    "base_samples": 8,
    "rule": "linear",
    "batches": [
        {"samples": 4, "samples_per_second": 30.0, "ratio": {"estimate": 0.94, "low": 0.9, "high": 0.98}}
        | {"peak_bytes": 90 * MIB, "reason": ""},
        {"samples": 8, "samples_per_second": 32.0, "ratio": {"estimate": 1.0, "low": 1.0, "high": 1.0}}
        | {"peak_bytes": 160 * MIB, "reason": ""},
        {"samples": 16, "samples_per_second": 36.0, "ratio": {"estimate": 1.125, "low": 1.1, "high": 1.15}}
        | {"peak_bytes": 300 * MIB, "reason": ""},
        {"samples": 32, "samples_per_second": None, "ratio": None, "peak_bytes": None}
        | {"reason": "it would need about 0.57 GiB"},
    ],
}


@pytest.fixture
def folder(ledger, tune_folder):
    return tune_folder([*ledger, CHOICE, BATCHES])


def points(plot, line):
    """The points of a chart's line, in thousandths of its width and height."""
    (path,) = re.findall(rf'class="line {line}" d="([^"]*)"', plot)
    return [tuple(map(int, found)) for found in re.findall(r"[ML](\d+) (\d+)", path)]


def test_the_curve_falls_and_what_was_taken_is_a_point(folder):
    plot = memory.pareto(load(folder))
    curve = points(plot, "reference")
    assert [x for x, _ in curve] == [0, 286, 1000]
    assert [y for _, y in curve] == sorted(y for _, y in curve)  # downwards on the screen: less time
    assert points(plot, "points") == [(257, curve[1][1])]
    text = vivace.report(folder).read_text(encoding="utf-8")
    assert "160 MiB become 108 MiB, at 8.0 % more time" in text
    assert plot in text


def test_batches_are_rows_and_curves_and_the_rule_is_named(folder):
    content = load(folder)
    titles = [re.search('aria-label="([^"]*)"', plot)[1] for plot in memory.speeds(content)]
    assert titles == ["Samples a second", "Peak memory, MiB"]
    assert [size.fastest for size in memory.sizes(content)] == [False, False, True, False]
    text = vivace.report(folder).read_text(encoding="utf-8")
    assert "16 samples at once are the fastest beyond noise, 1.12× (1.10–1.15) of your 8. Nothing was" in text
    assert "The linear rule: multiply the learning rate by the same factor." in text
    assert "it would need about 0.57 GiB" in text


def test_a_larger_batch_is_not_called_faster_within_noise(ledger, tune_folder):
    largest = {**BATCHES["batches"][2], "ratio": {"estimate": 1.125, "low": 0.99, "high": 1.2}}
    batches = {**BATCHES, "batches": [*BATCHES["batches"][:2], largest]}
    content = load(tune_folder([*ledger, batches]))
    assert memory.advice(content) == "No other size is faster than your batch of 8 beyond noise."


def test_what_is_faster_beyond_noise_comes_before_what_only_seems_faster(ledger, tune_folder):
    unsure = {"samples": 32, "samples_per_second": 37.0, "peak_bytes": 600 * MIB, "reason": ""}
    unsure |= {"ratio": {"estimate": 1.16, "low": 0.95, "high": 1.3}}
    content = load(tune_folder([*ledger, {**BATCHES, "batches": [*BATCHES["batches"][:3], unsure]}]))
    assert [size.samples for size in memory.sizes(content) if size.fastest] == [16]
    assert memory.advice(content).startswith("16 samples at once are the fastest beyond noise, 1.12× (1.10–")


@pytest.mark.parametrize(
    ("record", "changes", "told"),
    [
        (CHOICE, {"curve": 7}, "memory.curve is no list"),
        (CHOICE, {"curve": [3, [90 * MIB, 0.05, 1]]}, "memory.curve[0] is no list"),
        (CHOICE, {"curve": [["<b>", 0.05], [2, 3]]}, "memory.curve[0][0] is no number"),
        (CHOICE, {"step_seconds": [1]}, "memory.step_seconds is no number"),
        (CHOICE, {"budget_bytes": 10**400, "reason": {"a": 1}}, "memory.budget_bytes is no number"),
        (BATCHES, {"batches": 7}, "batches.batches is no list"),
        (BATCHES, {"batches": [{"samples": 4, "ratio": 7}]}, "batches.batches[0].ratio is no table"),
        (BATCHES, {"batches": [{"samples": 4, "reason": [1]}]}, "batches.batches[0].reason is no text"),
        (BATCHES, {"base_samples": "8", "rule": ["x"]}, "batches.base_samples is no number"),
    ],
)
def test_what_is_no_such_record_is_left_out_and_said(ledger, tune_folder, record, changes, told):
    folder = tune_folder([*ledger, {**record, **changes}])
    assert f"ledger.jsonl, {told}" in load(folder).skipped
    page = vivace.report(folder).read_text(encoding="utf-8")
    assert "Left out, as it cannot be read: ledger.jsonl" in page


def test_the_records_as_they_are_written_fit_whole(folder):
    assert load(folder).skipped == ()


def test_a_refusal_is_said_and_damaged_records_draw_nothing(ledger, tune_folder):
    refusal = {"record": "memory", "budget_bytes": 2**30, "reason": "no part of the model is repeated"}
    batches = {"record": "batches", "batches": [7, {"samples": "x"}, {"samples": 4}], "base_samples": 4}
    content = load(tune_folder([*ledger, refusal, batches]))
    assert memory.pareto(content) is None
    assert memory.sentence(content).endswith("within 1.00 GiB: no part of the model is repeated.")
    assert [size.samples for size in memory.sizes(content)] == [4]
    assert memory.speeds(content) == []
    assert memory.advice(content) == ""
    content = load(tune_folder([*ledger, {**CHOICE, "curve": [[1], ["x", 2], [3, None]]}]))
    assert memory.pareto(content) is None
    content = load(tune_folder(ledger))
    assert (memory.sentence(content), memory.advice(content), memory.sizes(content)) == ("", "", [])
