"""Progress below a notebook's cell, with a notebook that only keeps what it is given to show."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import vivace
from vivace.events import Event, EventKind
from vivace.pages import notebook
from vivace.testing.jobs import TINY_JOBS


@pytest.fixture
def cell(monkeypatch):
    """What a cell shows, line after line; each takes the place of the one before."""
    shown = []

    def display(content, *, raw, display_id):
        assert raw
        assert display_id
        shown.append(content["text/plain"])
        return SimpleNamespace(update=lambda content, raw: shown.append(content["text/plain"]))

    ipython, displays = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    displays.display = display
    for module in (ModuleType("ipykernel"), ipython, displays):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return shown


def test_a_training_in_a_cell_shows_where_it_is(cell, tmp_path):
    run = vivace.train(TINY_JOBS["mlp"](), out=tmp_path / "run")
    assert cell[-1].startswith(f"epoch 1/1, step {run.steps}/{run.steps}, loss ")
    assert torch.load(tmp_path / "run/model.pt", weights_only=True)


def test_notices_stand_above_the_line(cell, capsys):
    line = notebook.listening(None)
    line(Event(EventKind.NOTICE, {"text": "2 cores can load 410 samples a second"}))
    line(Event(EventKind.PHASE, {"name": "searching", "budget_seconds": 600.0}))
    assert capsys.readouterr().err == "2 cores can load 410 samples a second\n"
    assert cell[-1] == "0:00 of 10:00, searching"


def test_the_persons_own_listener_is_the_only_one(cell):
    def own(event):
        pass

    assert notebook.listening(own) is own


def test_outside_of_a_notebook_nobody_listens(monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert notebook.listening(None) is None
