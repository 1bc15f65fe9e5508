"""What an earlier run has left goes when there is something to put in its place, and nothing else does."""

import fcntl
import os
import threading

import pytest

from vivace.errors import FolderError
from vivace.live.errand import LEDGER, OWN, PAGE, PLAN, Errand, lying_in

OLD_PLAN = "format = 1\n\n[techniques.fused_optimizer]\n"


@pytest.fixture
def errand(tmp_path):
    """Of a run with the plan that an earlier one has left in its folder."""
    for name in OWN:
        (tmp_path / name).write_text(OLD_PLAN)
    plan = {"fused_optimizer": {}}
    return Errand(str(tmp_path), "runs/run", "python train.py", plan, earlier=lying_in(tmp_path))


def test_a_given_plan_takes_the_place_of_the_one_there(errand, tmp_path):
    errand.make_way()
    assert not errand.is_earlier(PLAN)
    assert {file.name for file in tmp_path.iterdir()} == {PLAN, "lock"}


def test_a_given_plan_is_not_lost_where_it_cannot_be_written_again(errand, tmp_path, monkeypatch):
    def full(path, text):
        raise FolderError(f"'{path}' cannot be written: No space left on device")

    monkeypatch.setattr("vivace.plan.replace_text", full)
    with pytest.raises(FolderError, match="No space left"):
        errand.make_way()
    assert (tmp_path / PLAN).read_text() == OLD_PLAN


def test_processes_of_one_script_make_way_one_after_the_other(errand, tmp_path):
    another = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(another, fcntl.LOCK_EX)
    waits = threading.Thread(target=errand.make_way)
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    (tmp_path / LEDGER).unlink()
    (tmp_path / LEDGER).write_text("the other's")
    os.close(another)
    waits.join()
    assert (tmp_path / LEDGER).read_text() == "the other's"
    assert not (tmp_path / PAGE).exists()
