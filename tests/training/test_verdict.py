"""Whom the ranks wait for, judged from their beats on a clock of the test's own."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from vivace.training import rank_watch, stranded
from vivace.training.rank_watch import RankWatch
from vivace.training.ranks import Ranks
from vivace.training.stranded import leave
from vivace.training.verdict import Sight, Verdict, has_died, is_stopped, judge

PATIENCE = 300.0


def beat(number, at, what="step 41", work=0.0, asked="", pid=None, host="elsewhere"):
    fields = {"number": number, "at": at, "changes": sum(at), "what": what, "work": work, "asked": asked}
    return {**fields, "where": "job.py:12 in loss", "pid": pid or os.getpid(), "host": host}


def watched(seconds, *ranks, patience=PATIENCE):
    """The judgement after so many seconds in which each rank sent ``rank(second)``."""
    sights = [Sight(rank, 0.0) for rank in range(len(ranks))]
    for second in range(seconds + 1):
        last = [rank(second) for rank in ranks]
        seen = [sight.see(one, float(second)) for sight, one in zip(sights, last, strict=True)]
    return judge(seen, patience)


def waits(second):
    return beat(second, [41, 7, 90])


def test_nothing_is_said_while_any_rank_goes_on():
    assert watched(500, waits, lambda second: beat(second, [second, 7, 80])) == (None, False)
    assert watched(20, waits, lambda second: beat(second, [41, 7, 80])) == (None, False)


@pytest.mark.parametrize("seconds", [35, 299, 301])
def test_the_rank_behind_is_named_with_its_line_and_given_up_after_the_patience(seconds):
    verdict, ends = watched(seconds, waits, lambda second: beat(second, [41, 7, 89]))
    assert verdict.ranks == (1,)
    assert "has been at step 41" in verdict.sentence
    assert "stands still at job.py:12 in loss; rank 0 waits for it" in verdict.sentence
    assert ends == (seconds > PATIENCE)


def test_a_rank_that_works_gets_twelve_times_as_long():
    works = lambda second: beat(second, [41, 7, 89], work=0.5 * second)  # noqa: E731
    assert watched(200, waits, works) == (None, False)
    verdict, ends = watched(400, waits, works)
    assert "works at job.py:12" in verdict.sentence
    assert not ends
    assert watched(3700, waits, works)[1]


@pytest.mark.fault(13)
def test_a_silent_rank_is_lost_though_it_was_not_behind():
    verdict, ends = watched(40, lambda s: beat(s, [41, 7, 89]), lambda s: beat(0, [41, 7, 90]), patience=30)
    assert verdict.ranks == (1,)
    assert "no sign of life for 40" in verdict.sentence
    assert ends


def test_a_request_to_stop_is_heard_by_all_within_seconds():
    verdict, ends = watched(9, lambda s: {**waits(s), "asked": "SIGTERM"}, lambda s: beat(s, [41, 7, 89]))
    assert (verdict.ranks, verdict.signal, ends) == ((1,), "SIGTERM", True)


@pytest.mark.fault(13)
def test_data_that_end_on_one_rank_are_waited_for_in_vain():
    ended = "the end of its data in epoch 1 after step 40"
    verdict, ends = watched(9, waits, lambda second: beat(second, [40, 8, 88], ended))
    assert verdict.ranks == (1,)
    assert "give every rank data of one length" in verdict.sentence
    assert ends


@pytest.mark.fault(13)
def test_where_all_wait_alike_the_link_is_down():
    verdict, _ = watched(40, waits, waits)
    assert verdict.ranks == ()
    assert "all ranks have been at step 41 for 40 s, rank 0 at job.py:12 in loss" in verdict.sentence
    compiles = lambda second: beat(second, [1, 7, 9], work=0.5 * second)  # noqa: E731
    assert watched(200, compiles, compiles) == (None, False)


def test_what_the_kernel_says_of_a_process():
    here = socket.gethostname()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as child:
        of_child = beat(1, [0], pid=child.pid, host=here)
        assert not has_died(of_child)
        assert not has_died({**of_child, "host": "elsewhere", "pid": 2**22 + 1})
        child.send_signal(19)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(of_child)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_died(of_child)


def test_a_rank_that_died_of_a_verdict_is_not_told_as_the_cause():
    """What it died of was published before, and this rank's own watch may not have looked since."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    store = torch.distributed.HashStore()
    last = {"pid": ended.pid, "host": socket.gethostname()}
    store.set("beat/1", json.dumps(last))
    watch = RankWatch(store, rank=0, world_size=2, patience=60.0, cut=lambda: None)
    watch.activity.set("the end of its data", 6)
    assert watch.why(5.0).sentence.endswith("has died, while rank 0 was at the end of its data")
    judged = {"ranks": [0], "sentence": "rank 0 has come to the end of its data", "signal": ""}
    store.set("verdict", json.dumps(judged))
    assert watch.why(5.0) == Verdict((0,), judged["sentence"])
    store.set("farewell/1", "stopped")
    assert watch.why(5.0) == Verdict((0,), judged["sentence"])


def test_stacks_of_all_ranks_are_kept_though_one_looks_late_and_has_judged_nothing(tmp_path, until):
    """It looks seldom, as on a crowded machine."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    first = RankWatch(store, rank=0, world_size=2, patience=2.0, cut=lambda: None)
    second = RankWatch(store, rank=1, world_size=2, patience=PATIENCE, cut=lambda: None)
    second._listen = lambda _: RankWatch._listen(second, 3.0)
    for watch in (second, first):
        watch.told_to(tmp_path, lambda _: None)
        watch.start()
    try:
        until(lambda: first.verdict is not None)
        told = (tmp_path / "stacks.txt").read_text()
        assert f"rank 0, process {os.getpid()}" in told
        assert told.count("test_verdict.py") == 2
    finally:
        for watch in (first, second):
            watch.close()


def test_a_watch_that_is_closed_leaves_no_file_open():
    store = torch.distributed.HashStore()
    before = set(os.listdir("/proc/self/fd"))
    watch = RankWatch(store, rank=0, world_size=1, patience=PATIENCE, cut=lambda: None)
    watch.start()
    watch.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_who_kept_what_was_trained_stays_until_the_others_have_heard_it(tmp_path, monkeypatch):
    """Else the store, which may be its own, ends before a rank on a crowded machine has read it."""
    store = torch.distributed.HashStore()
    ended = Verdict((), "rank 0 has come to the end of its data")
    left, texts = [], {}

    def leave_as(rank, seconds):
        watch = RankWatch(store, rank, 2, 60.0, cut=lambda: None)
        watch.verdict, read = ended, watch.read
        late = lambda key: time.sleep(seconds if key == "kept" else 0) or read(key)  # noqa: E731
        monkeypatch.setattr(watch, "read", late)
        ranks = SimpleNamespace(watch=watch, rank=rank, world_size=2)
        texts[rank] = str(leave(ranks, 6, "", lambda: tmp_path / "step_6"))
        left.append(rank)

    threads = [threading.Thread(target=leave_as, args=each) for each in ((0, 0.0), (1, 2.0))]
    for thread in threads:
        thread.start()
    threads[0].join(60)
    assert store.check(["heard/1"])
    threads[1].join(60)
    assert sorted(left) == [0, 1]
    assert all("step_6 in" in text and text.endswith("go on with --resume") for text in texts.values())


@pytest.fixture
def leave_late(tmp_path, monkeypatch):
    """``leave_late(verdict, {rank: seconds}, ...)``: each rank of two leaves so much later, on a machine so
    slow that a hundred seconds pass in one; ``(what each says, who saved)``.
    """

    def run(verdict, late, saving=0.0, lost=None):
        store, texts, saved = torch.distributed.HashStore(), {}, []
        passing = SimpleNamespace(monotonic=lambda: 100 * time.monotonic(), sleep=time.sleep)
        monkeypatch.setattr(stranded, "time", passing)
        watches = [RankWatch(store, rank, 2, 1e6, cut=lambda: None) for rank in range(2)]
        for watch in watches:
            watch._beat()
            watch.verdict = verdict

        def save(rank):
            saved.append(rank)
            time.sleep(saving)
            return tmp_path / "step_6"

        def leave_as(rank):
            time.sleep(late.get(rank, 0.0))
            ranks = SimpleNamespace(watch=watches[rank], rank=rank, world_size=2)
            texts[rank] = str(leave(ranks, 6, "half a step" * (rank == lost), lambda: save(rank)))

        threads = [threading.Thread(target=leave_as, args=[rank]) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(texts) == [0, 1]
        return texts, saved

    return run


@pytest.mark.parametrize("judged", [(), (0,)])
@pytest.mark.parametrize("late", [0, 1])
def test_however_late_a_rank_says_where_it_stands_one_keeps_what_was_trained_and_both_know(
    leave_late, judged, late
):
    """The one whose data have ended, and for which the others wait, has trained as far as they."""
    texts, saved = leave_late(Verdict(judged, "rank 0 has come to the end of its data"), {late: 1.0})
    assert len(saved) == 1
    assert all("step_6 in" in text and text.endswith("go on with --resume") for text in texts.values()), texts


def test_a_rank_that_can_keep_nothing_hears_of_one_that_was_given_up_and_comes_back(leave_late):
    texts, saved = leave_late(Verdict((0,), "rank 0 has come to the end of its data"), {0: 0.05}, lost=1)
    assert saved == [0]
    assert all("step_6 in" in text and text.endswith("go on with --resume") for text in texts.values()), texts


def test_a_checkpoint_that_takes_long_is_waited_for_while_its_writer_lives(leave_late):
    texts, saved = leave_late(Verdict((), "the link is down"), {}, saving=2.0)
    assert len(saved) == 1
    assert all("step_6 in" in text for text in texts.values()), texts


def test_a_verdict_is_believed_before_the_ranks_own_watch_has_seen_it():
    store = torch.distributed.HashStore()
    watch = RankWatch(store, rank=0, world_size=2, patience=60.0, cut=lambda: None)
    judged = {"ranks": [1], "sentence": "rank 1 has been at step 3 for 300 s", "signal": ""}
    store.set("verdict", json.dumps(judged))
    assert watch.why(0.5) == Verdict((1,), judged["sentence"])


def test_a_rank_that_was_given_up_ends_itself_when_the_others_have_heard_what_was_kept(tmp_path, monkeypatch):
    """Its end takes them with it: torchrun ends all ranks then, and its store may be theirs."""
    store, ended = torch.distributed.HashStore(), threading.Event()
    monkeypatch.setattr(rank_watch.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(rank_watch, "FAREWELL_SECONDS", 0.2)
    monkeypatch.setattr(rank_watch, "BEAT_SECONDS", 0.05)
    watches = [RankWatch(store, rank, 2, PATIENCE, cut=lambda: None) for rank in range(2)]
    watches[0].told_to(tmp_path, lambda _: None)
    watches[1]._beat()
    store.set("kept", "step_6 was kept")
    judged = Verdict((0,), "rank 0 has been at step 6 for 300 s")
    thread = threading.Thread(target=watches[0]._end, args=[judged], daemon=True)
    thread.start()
    assert not ended.wait(1.0)
    store.set("heard/1", "all")
    assert ended.wait(30)
    watches[0]._over = True
    thread.join(30)


def ends_at(watch, place):
    """What rank `watch.rank` of two answers where it ends there."""
    return Ranks.all_end_at(SimpleNamespace(watch=watch, rank=watch.rank, world_size=2, patience=60.0), place)


def test_ranks_that_fail_at_one_place_know_it_however_late_one_comes():
    store, answers = torch.distributed.HashStore(), {}
    watches = [RankWatch(store, rank, 2, 60.0, cut=lambda: None) for rank in range(2)]
    for watch in watches:
        watch._beat()

    def end(rank, late):
        time.sleep(late)
        answers[rank] = ends_at(watches[rank], "step 3")

    threads = [threading.Thread(target=end, args=each) for each in ((0, 0.0), (1, 3.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {0: True, 1: True}


@pytest.mark.parametrize("elsewhere", ["farewell", "other place", "dead", "waits in an exchange"])
def test_a_rank_is_not_waited_for_that_cannot_come_to_the_same_place(elsewhere):
    store = torch.distributed.HashStore()
    first, second = (RankWatch(store, rank, 2, 60.0, cut=lambda: None) for rank in range(2))
    second.activity.agreements = elsewhere == "waits in an exchange"
    if elsewhere != "dead":
        second._beat()
    if elsewhere == "farewell":
        second.farewell("the labels are from another set")
    if elsewhere == "other place":
        second.post("end/1", "step 4")
    assert not ends_at(first, "step 3")


class Posted:
    """What a TCPStore does: a value that is set is on its way until the same client asks for something."""

    def __init__(self, store):
        self.store, self.on_its_way = store, []

    def set(self, key, value):
        self.on_its_way.append((key, value))

    def check(self, keys):
        for key, value in self.on_its_way:
            self.store.set(key, value)
        return self.store.check(keys)


def test_that_a_rank_is_out_of_memory_has_come_to_the_others_before_it_breaks_the_exchange():
    store = torch.distributed.HashStore()
    crying, other = (
        SimpleNamespace(_store=one, _generation=0, rank=rank, watch=None)
        for rank, one in enumerate((Posted(store), store))
    )
    Ranks.cry(crying)
    assert Ranks.heard(other)
