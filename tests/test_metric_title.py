"""A metric is called by its name, and by what data it is of, wherever a verb shows it."""

import dataclasses
import io
import json
import re
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import vivace
from vivace.compressing import answering as compressing
from vivace.compressing.page import render as compress_page
from vivace.compressing.table import draw as compress_table
from vivace.events import metric_title, scalars_of
from vivace.exporting import answering as exporting
from vivace.exporting.page import render as export_page
from vivace.pages.answer import lines
from vivace.sweeping import answering as sweeping
from vivace.sweeping.page import render as sweep_page
from vivace.sweeping.table import draw as sweep_table

FOUND = runpy.run_path(str(Path(__file__).parent / "scenes" / "found.py"))
TRAINING = {"metric_data": "training"}


def drawn(draw, found, **more):
    """A table in the terminal, in one line."""
    console = Console(width=200, file=io.StringIO())
    draw(found, console, **more)
    return " ".join(console.file.getvalue().split())


def compress():
    found = FOUND["compressed"]()
    found = dataclasses.replace(found, subject=found.subject | TRAINING)
    return [
        compress_page(found),
        drawn(compress_table, found, details=True),
        *lines(compressing.answer(found), 400),
    ]


def export():
    found = FOUND["exported"]()
    found = dataclasses.replace(found, trained=found.trained | TRAINING)
    return [export_page(found), *lines(exporting.answer(found), 400)]


def sweep():
    found = dataclasses.replace(FOUND["swept"](), **TRAINING)
    return [sweep_page(found), drawn(sweep_table, found), *lines(sweeping.answer(found), 400)]


def compare(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        facts = {"steps": 9, "stepping_seconds": 2.0, "metric": 0.5, "metric_name": "accuracy", **TRAINING}
        (folder / name / "run.json").write_text(json.dumps(facts))
    found = vivace.compare(folder / "a", folder / "b", out=folder / "c")
    return [Path(found.page_path).read_text(), *(row.name for row in found.differences)]


@pytest.mark.parametrize("verb", [compress, export, sweep, compare])
def test_a_metric_of_the_training_data_is_called_that(verb, tmp_path):
    told = verb(tmp_path) if verb is compare else verb()
    said = [text for text in told if re.search("accuracy", text, re.IGNORECASE)]
    assert said
    for text in said:
        assert not re.search("accuracy(?! on the training data)", text, re.IGNORECASE), text


def test_what_has_no_name_is_called_metric():
    assert metric_title({}) == "metric"
    assert metric_title({"metric_name": "F1", "metric_data": "validation"}) == "F1"


@settings(deadline=None)
@given(
    name=st.sampled_from(["loss", "epoch", "seconds", "samples_per_second", "accuracy", "metric", ""]),
    data=st.sampled_from(["training", "validation"]),
)
def test_no_curve_of_a_metric_is_another_figures(name, data):
    figures = {"epoch": 1, "loss": 1.25, "samples_per_second": 8.0, "seconds": 2.0}
    metric = {"step": 4, "metric": 0.5, "metric_name": name, "metric_data": data}
    with_all = scalars_of({**metric, **figures})
    assert with_all | figures == with_all
    assert len(with_all) == len(figures) + 1
    alone = scalars_of(metric)  # as the last one of a run is told: in the same curve
    assert alone.items() <= with_all.items()
    assert len(alone) == 1


def test_a_sweeps_table_shows_names_and_values_as_they_are():
    found, folder = FOUND["swept"](), f"/{'a_folder_of_many_words_' * 9}"
    trial = dataclasses.replace(found.trials[0], parameters={"data": folder})
    shown = drawn(sweep_table, dataclasses.replace(found, metric_name="F1 [macro]", trials=(trial,)))
    assert "F1 [macro]" in shown
    assert folder in "".join(shown.split())
