"""The bench when one of its processes dies: the next form is measured beside new ones."""

import pytest

from vivace.compressing import bench
from vivace.errors import ChildFailed
from vivace.serving.forms import BY_NAME


class Process:
    """Stands for a child process; once dead, it answers nothing."""

    begun: list

    def __init__(self, name, *_, **__):
        self.name, self.alive, self.asked = name, True, []
        self.begun.append(self)

    def ask(self, command, *_, **__):
        if not self.alive:
            raise ChildFailed("the process died")
        self.asked.append(command)
        return {"threads": 1}

    def close(self):
        self.alive = False


class Served:
    """Stands for a process that serves a form."""

    def __init__(self, owner, form):
        self.child, self.step_seconds = Process(form.name), 1.0

    def open(self, *_):
        return 0.0

    def block(self, steps):
        return 1.0

    def ask(self, command, **_):
        return self.child.ask(command)

    def close(self):
        self.child.close()


def judged(self, form, *_):
    """An answer that asks both processes."""
    self._reference.ask("block")
    self.judge.ask("change")
    return self._tried(form, "kept")


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A bench that has begun."""
    Process.begun = []
    monkeypatch.setattr(bench, "Child", Process)
    monkeypatch.setattr(bench, "Server", Served)
    monkeypatch.setattr(bench.Bench, "_judged", judged)
    found = bench.Bench(None, "run", tmp_path, tmp_path, tmp_path / "log", 1)
    found.begin()
    return found


def test_what_has_died_is_begun_again_before_the_next_form(begun):
    form = BY_NAME["eager_bf16"]
    judge, reference = begun.judge, begun._reference
    assert begun.attempt(form, by_size=False).status == "kept"
    assert (begun.judge, begun._reference) == (judge, reference)
    judge.alive = reference.child.alive = False
    assert begun.attempt(form, by_size=False).status == "kept"
    assert begun.judge is not judge
    assert begun.judge.asked == ["record", "change"]
    assert begun._reference is not reference
