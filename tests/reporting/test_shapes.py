"""Records of another form than they are written in: left out and named, and the rest is shown."""

import copy
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from vivace.reporting import terminal
from vivace.reporting.page import render
from vivace.reporting.reading import load
from vivace.reporting.shapes import NUMBER, TEXT, Each, fitting

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def test_what_fits_is_kept_and_what_does_not_is_named():
    shape = {"a": NUMBER, "b": [{"c": TEXT}], "d": Each(NUMBER)}
    skipped = []
    value = {"a": True, "b": [{"c": 1, "e": 5}, 7, {"c": "x"}], "d": {"x": 1, "y": "1"}, "other": [1]}
    found = fitting(value, shape, "file", skipped)
    assert found == {"b": [{"e": 5}, {"c": "x"}], "d": {"x": 1}, "other": [1]}
    assert sorted(skipped) == [
        "file.a is no number",
        "file.b[0].c is no text",
        "file.b[1] is no table",
        "file.d.y is no number",
    ]
    assert fitting([], shape, "file", skipped) is None
    assert fitting(10**400, NUMBER, "x", skipped) is None


def test_what_this_version_writes_fits_whole(ledger, tune_folder, train_folder):
    assert load(tune_folder(ledger)).skipped == ()
    assert load(train_folder).skipped == ()


def test_a_sample_may_have_a_name(train_folder):
    run = json.loads((train_folder / "run.json").read_text())
    run["damaged"] = [{"index": "scan 3", "path": "", "error": "OSError: truncated", "times": 1}]
    (train_folder / "run.json").write_text(json.dumps(run))
    assert load(train_folder).skipped == ()


def test_what_is_left_out_is_said(ledger, tune_folder):
    ledger[0]["machine"] = ["none"]
    content = load(tune_folder(ledger))
    assert content.skipped == ("ledger.jsonl, run.machine is no table",)
    assert "Left out, as it cannot be read: ledger.jsonl, run.machine is no table" in render(content)


def places(document, path=()):
    """Every place in a document at which something else could stand."""
    if path:
        yield path
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items if isinstance(document, (dict, list)) else ():
        yield from places(value, (*path, key)) if isinstance(value, (dict, list)) else [(*path, key)]


def changed(documents, path, value):
    found = copy.deepcopy(documents)
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return found


def shown(folder):
    """The report of a folder, on the page and in the terminal."""
    content = load(folder)
    text = render(content)
    terminal(folder, Console(file=io.StringIO(), width=100))
    return text


def test_a_technique_whose_settings_are_empty_is_shown(ledger, tune_folder):
    result = next(record for record in ledger if record["record"] == "result")
    result["plan"] = dict.fromkeys(result["plan"])
    assert all(name in shown(tune_folder(ledger)) for name in result["plan"])


@pytest.mark.parametrize("loss", [1.6e308, 9e307, 2.2e-313, 1e-200, -1e300])
def test_a_loss_at_the_ends_of_what_floats_hold_is_no_error(loss, ledger, tune_folder):
    (index,) = [i for i, record in enumerate(ledger) if "curves" in record]
    assert "<html" in shown(tune_folder(changed(ledger, (index, "curves", "reference", 0), loss)))


@pytest.mark.fault(41)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_report_of_any_records_is_a_page(data, ledger, tune_folder, bad_input):
    bad_input()
    path = data.draw(st.sampled_from([p for p in places(ledger) if len(p) > 1]))
    folder = tune_folder(changed(ledger, path, data.draw(JSON)))
    assert "<html" in shown(folder)


@pytest.mark.fault(41)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_report_of_any_training_is_a_page(data, train_folder, bad_input):
    bad_input()
    lines = [json.loads(line) for line in (train_folder / "metrics.jsonl").read_text().splitlines()][:5]
    facts = json.loads((train_folder / "run.json").read_text())
    found = [facts, *lines]
    path = data.draw(st.sampled_from([p for p in places(found) if len(p) > 1]))
    first, *rest = changed(found, path, data.draw(JSON))
    before = {name: (train_folder / name).read_text() for name in ("metrics.jsonl", "run.json")}
    (train_folder / "run.json").write_text(json.dumps(first))
    (train_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rest))
    try:
        assert "<html" in shown(train_folder)
    finally:
        for name, text in before.items():
            (train_folder / name).write_text(text)


@pytest.mark.fault(41)
@pytest.mark.parametrize("value", [None, {"estimate": None, "low": 1.0, "high": 2.0}])
@pytest.mark.parametrize("field", ["techniques", "reason", "predicted", "evidence", "ratio"])
def test_a_trial_without_a_field_is_a_page(field, value, ledger, tune_folder, bad_input):
    bad_input()
    for record in ledger:
        record.update({field: value} if record.get("record") == "trial" else {})
    assert "<html" in shown(tune_folder(ledger))
