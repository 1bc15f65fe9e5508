"""Processes that meet through one store, in which those of earlier attempts have left their names."""

import json
import os
import socket
import threading

import pytest
import torch.distributed as dist

from vivace.errors import RankLost, is_broken_exchange
from vivace.training import ranks
from vivace.training.meeting import agreed_name, open_sockets
from vivace.training.ranks import Ranks


def meet(store, world_size=3):
    """The names on which so many threads, in the place of ranks, agree."""
    names = {}

    def arrive(rank):
        names[rank] = agreed_name(store, rank, world_size)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in range(world_size)]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sorted(names) == list(range(world_size))
    return set(names.values())


def test_each_attempt_agrees_on_a_name_of_its_own():
    store = dist.HashStore()
    found = [meet(store), meet(store), meet(store, 2), meet(store, 4)]
    assert [len(names) for names in found] == [1, 1, 1, 1]
    assert len(set.union(*found)) == 4


def test_what_a_dead_rank_0_has_published_is_not_believed():
    store = dist.HashStore()
    meet(store, 2)
    before = json.loads(store.get("vivace/names"))
    with pytest.raises(RankLost, match="rank 1 has waited 0 s for rank 0"):
        agreed_name(store, 1, 2, 0.2)
    assert json.loads(store.get("vivace/names")) == before


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(RankLost, match="ranks 1, 2 of 3 did not come within 0 s") as lost:
        agreed_name(dist.HashStore(), 0, 3, 0.2)
    assert lost.value.exit_code == 1
    assert RankLost("x", interrupted_by="SIGTERM").exit_code == 143


def test_a_broken_exchange_is_told_from_other_errors():
    text = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    )
    assert is_broken_exchange(RuntimeError(text))
    assert is_broken_exchange(dist.DistBackendError("x"))
    assert not is_broken_exchange(RuntimeError("shapes differ"))
    assert not is_broken_exchange(ValueError(text))


def test_only_an_earlier_process_of_the_launch_counts_as_begun(monkeypatch):
    store = dist.HashStore()
    first = Ranks(store=store)
    assert not first.began_before("run")
    first.begin("run")
    assert not Ranks(store=store).began_before("run")  # the same process, a second time
    monkeypatch.setattr(ranks, "_PROCESS", "another")
    assert Ranks(store=store).began_before("run")
    assert not Ranks(store=store).began_before("other run")
    assert not Ranks(store=dist.HashStore()).began_before("run")


def test_connections_end_whoever_holds_them_and_listeners_stay():
    before = open_sockets()
    here, there = socket.socketpair()
    with here, there, socket.create_server(("127.0.0.1", 0)) as listener:
        ranks._break(open_sockets() - before)
        assert there.recv(1) == b""
        with socket.create_connection(listener.getsockname(), timeout=60):
            listener.accept()[0].close()


def test_those_that_reach_the_store_of_this_rank_stay(monkeypatch):
    """Another rank may open one while this rank counts those of its process group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    before = open_sockets()
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("said", "before")  # answered: the store has accepted it
    accepted = {one for one in open_sockets() - before if local_port(one[0]) == store.port}
    assert len(accepted) == 1
    ranks._break(accepted)
    other.set("said", "after")
    assert store.get("said") == b"after"


def local_port(descriptor):
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getsockname()[1]
