"""Child processes end with what started them, however young they are."""

from pathlib import Path

import pytest

from vivace.processes import launch
from vivace.processes.launch import Child, Source

JOB = Path(__file__).parents[1] / "scenes" / "served.py"


@pytest.mark.timeout(60)  # what it is about: it waited for ever
def test_a_child_that_was_forked_a_moment_ago_is_killed_too():
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), Child("vivace.measuring.worker:Worker", Source(f"{JOB}:job")):
            raise ZeroDivisionError


def test_a_path_among_the_folders_of_modules_does_not_keep_children_from_starting(monkeypatch):
    """Python passes over it; in the text of a program it is a name that nobody knows."""
    told = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda command, **_: told.append(command))
    monkeypatch.setattr("sys.path", ["one", Path("two")])
    launch._Zygote()._socket.close()
    assert "sys.path[:] = ['one'];" in told[0][2]
