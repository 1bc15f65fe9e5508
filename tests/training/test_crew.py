"""What several ranks do for a verb: whose fault it is where time runs out, or a rank answers no more."""

import json
import os
import signal
import socket
import subprocess

import pytest
import torch.distributed as dist

from vivace.errors import ChildFailed, RankLost, TimedOut, VivaceError
from vivace.processes.launch import Source
from vivace.training import crew
from vivace.training.crew import Company, Crew
from vivace.training.meeting import AWAITED, awaited

WAITS = "rank 1 has been at its first steps for 17 s and stands still; rank 0 waits for it"


class Child:
    """In the place of rank 0's child: fails with `error`, or answers."""

    error: VivaceError | None = None

    def __init__(self, *_, **__):
        self.alive = True

    def ask(self, command, timeout, **arguments):
        if self.error is not None:
            raise self.error
        return "an answer"

    def close(self):
        pass


@pytest.fixture
def company(monkeypatch):
    """Rank 0 of two, whose other rank has answered its first errands, and their store."""
    monkeypatch.setattr(crew, "Child", Child)
    monkeypatch.setattr(crew, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(crew, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(crew, "LAST_SECONDS", 0.0)
    store = dist.HashStore()
    found = Company(Source("job.py:job"), 0, 2, dist.PrefixStore("company", store), store)
    return found, store


def answers(company, *texts):
    """Rank 1's answers to the first errands."""
    for number, text in enumerate(texts):
        company._store.set(f"answer/{number}/1", text)


def begun(company):
    return company.child("a:B", {}, meeting=True)


def test_who_is_waited_for_is_told_where_time_runs_out(company, monkeypatch):
    company, store = company
    late = json.dumps(TimedOut("no answer to 'warm' within 20 s: it was stopped").to_dict())
    answers(company, "", late)
    started = begun(company)
    meeting = dist.PrefixStore(started._meeting, store)
    meeting.set("vivace/names", json.dumps(["one", "other"]))
    meeting.set(f"vivace/one/{AWAITED}", WAITS)
    monkeypatch.setattr(Child, "error", TimedOut("no answer to 'warm' within 20 s: it was stopped"))
    with pytest.raises(TimedOut, match=f"no answer to 'warm' within 20 s: {WAITS}"):
        started.ask("warm", 20.0)
    assert not started.alive


def test_who_has_never_come_is_told(company):
    _, store = company
    assert awaited(store, 2) == "rank 0 has not come to meet the others"
    store.set("vivace/names", json.dumps(["one", ""]))
    assert awaited(store, 2) == "rank 1 has not come to meet the others"
    store.set("vivace/names", json.dumps(["one", "other"]))
    assert awaited(store, 2) == ""


def test_another_error_than_late_is_its_own(company, monkeypatch):
    company, _ = company
    answers(company, "", json.dumps(ChildFailed("the process died from SIGABRT").to_dict()))
    started = begun(company)
    monkeypatch.setattr(Child, "error", RankLost("the exchange broke"))
    with pytest.raises(ChildFailed, match="on rank 1: the process died from SIGABRT"):
        started.ask("warm", 20.0)


def test_a_rank_that_answers_no_more_is_named_and_nothing_is_begun_without_it(company):
    company, _ = company
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            os.kill(process.pid, signal.SIGSTOP)
            place = {"pid": process.pid, "host": socket.gethostname()}
            company._store.set("here/1", json.dumps(place))
            with pytest.raises(RankLost, match=r"^rank 1 \(process \d+ on .*\) has given no answer for 0 s"):
                begun(company)
        finally:
            process.kill()
    assert company.lost.endswith("it is stopped (SIGSTOP)")
    with pytest.raises(RankLost, match="SIGSTOP"):
        begun(company)
    company.end(None)
    assert json.loads(company._store.get("errand/1"))["do"] == "end"


def test_ranks_that_answer_are_not_lost(company):
    company, _ = company
    answers(company, "", "")
    started = begun(company)
    assert isinstance(started, Crew)
    assert started.ask("warm", 20.0) == "an answer"
    assert started.alive
    assert company.lost == ""
