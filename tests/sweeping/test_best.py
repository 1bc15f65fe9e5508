"""The job file of the best configuration, read by a process that knows nothing of the sweep."""

import importlib
import math
import sys

import pytest

from vivace.job import JobFunction, load
from vivace.sweeping.best import write_best

TRAIN = """
import torch, vivace
from .parts import EPOCHS

def job(width: int = 4) -> vivace.Job:
    return vivace.Job(
        model=lambda: torch.nn.Linear(width, 2),
        data=lambda: [torch.zeros(2, width)],
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        epochs=EPOCHS,
    )
"""


UNCLIPPED = """
import torch, vivace

def job(clip: float = 1.0) -> vivace.Job:
    return vivace.Job(
        model=lambda: torch.nn.Linear(2, 2),
        data=lambda: [torch.zeros(2, 2)],
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        metric_name=str(clip),
    )
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """``package()`` imports a module that takes a name from its neighbour; later it is forgotten."""
    folder = tmp_path / "src" / "networks_of_mine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "parts.py").write_text("EPOCHS = 7\n")
    (folder / "train.py").write_text(TRAIN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with monkeypatch.context() as there:
        there.syspath_prepend(folder.parent)
        yield importlib.import_module("networks_of_mine.train")
    forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "networks_of_mine"]:
        del sys.modules[name]


def test_what_is_not_finite_is_written_as_python_reads_it(tmp_path):
    (tmp_path / "train.py").write_text(UNCLIPPED)
    reference = write_best(
        tmp_path / "best.py", JobFunction(f"{tmp_path / 'train.py'}:job"), {"clip": math.inf}, "The best."
    )
    assert load(reference).metric_name == "inf"


@pytest.mark.parametrize("by_name", [True, False])
def test_it_finds_a_job_that_imports_from_its_own_package(package, by_name, tmp_path):
    function = JobFunction("networks_of_mine.train:job" if by_name else package.job)
    (tmp_path / "out").mkdir()
    reference = write_best(tmp_path / "out" / "best.py", function, {"width": 5}, "The best of 3 trials.")
    forget()
    sys.path.remove(str(tmp_path / "src"))
    found = load(reference)
    assert (found.epochs, found.model().in_features) == (7, 5)
