import multiprocessing
import os
import signal
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vivace.errors import Refused
from vivace.mechanisms.shared_store import SharedStore

KEYS = [os.urandom(16) for _ in range(40)]
RECORD = bytes(range(250)) * 4


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    found = SharedStore(1 << 20, tmp_path / "store" if request.param == "disk" else None)
    yield found
    found.close()


def fill(store, keys):
    for number, key in enumerate(keys):
        store.put(key, RECORD[number:])


def in_child(function, *arguments):
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join(20)
    return child


def test_records_come_back_whole_and_unknown_keys_do_not(store):
    fill(store, KEYS)
    for number, key in enumerate(KEYS):
        assert bytes(store.get(key, len(RECORD) - number)) == RECORD[number:]
    assert store.get(os.urandom(16), 8) is None
    assert store.counts() | {"bytes": 0} == {
        "records": 40, "bytes": 0, "hits": 40, "misses": 1, "damaged": 0, "full": 0, "unknown": 0
    }  # fmt: skip


def test_other_processes_read_and_write_the_same_records(store):
    assert in_child(fill, store, KEYS[:20]).exitcode == 0
    again = SharedStore(1 << 20, store.path)
    fill(again, KEYS[20:])
    assert [bytes(store.get(key, 1000 - n)) for n, key in enumerate(KEYS[:20])] == [
        RECORD[n:] for n in range(20)
    ]
    assert store.counts()["records"] == 40
    again.close()


def test_threads_of_one_process_count_every_record(store):
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            list(threads.map(lambda _: [store.count("hits") for _ in range(40)], range(8)))
    assert store.counts()["hits"] == 50 * 8 * 40


def test_the_budget_holds(store):
    big = bytes(300_000)
    assert [store.put(key, big) for key in KEYS[:4]] == [True, True, True, False]
    assert store.counts()["bytes"] <= store.budget_bytes
    assert store.counts()["full"] == 1
    assert store.get(KEYS[3], 300_000) is None


def test_a_changed_byte_is_noticed_and_the_record_can_be_put_again(store):
    fill(store, KEYS[:2])
    store._map[store.records_at + 123] ^= 1
    assert store.get(KEYS[0], 1000) is None
    assert store.counts()["damaged"] == 1
    store.put(KEYS[0], RECORD)
    assert bytes(store.get(KEYS[0], 1000)) == RECORD
    assert store.counts()["records"] == 2


def test_a_damaged_index_leads_nowhere(store):
    fill(store, KEYS[:1])
    (slot, *_) = store._slot(KEYS[0])
    for offset, length in ((2**60, 1000), (store.records_at, 2**60), (0, 1000)):
        struct.pack_into("<QQ", store._map, 4096 + slot * 40 + 16, offset, length)
        assert store.get(KEYS[0], 1000) is None


def test_a_store_on_disk_outlives_its_process_and_one_of_another_budget_is_replaced(tmp_path):
    path = tmp_path / "folder" / "store"
    first = SharedStore(1 << 20, path)
    fill(first, KEYS[:1])
    first.close()
    second = SharedStore(1 << 20, path)
    assert bytes(second.get(KEYS[0], 1000)) == RECORD
    other = SharedStore(1 << 21, path)
    assert other.get(KEYS[0], 1000) is None
    assert bytes(second.get(KEYS[0], 1000)) == RECORD  # who holds the old file keeps it
    second.close()
    other.close()


def test_a_file_of_somebody_else_is_refused_and_stays(tmp_path):
    path = tmp_path / "pictures.zip"
    for content in (b"PK" * 1000, bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(Refused, match="is a file of another kind, which it would replace"):
            SharedStore(1 << 20, path)
        assert path.read_bytes() == content


def test_a_path_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "store", "/proc/self/fd/999999"):  # of a rank that has ended, say
        with pytest.raises(Refused, match="cannot be used: "):
            SharedStore(1 << 20, path)


def test_a_path_may_begin_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    SharedStore(1 << 20, "~/cache/store").close()
    assert (tmp_path / "cache" / "store").exists()


def write_for_ever(store, ready):
    while True:
        store.put(os.urandom(16), RECORD * 100)
        ready.set()


def test_a_killed_writer_leaves_no_lock_and_no_shared_memory():
    before = set(Path("/dev/shm").iterdir())
    store = SharedStore(1 << 30)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=write_for_ever, args=(store, ready))
    child.start()
    assert ready.wait(20)
    time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.join(20)
    assert store.put(KEYS[0], RECORD)
    assert bytes(store.get(KEYS[0], 1000)) == RECORD
    store.close()
    del ready
    new = set(Path("/dev/shm").iterdir()) - before  # some may be of other processes, for a while
    end = time.monotonic() + 60
    while any(path.exists() for path in new):
        assert time.monotonic() < end, new
        time.sleep(0.05)


def test_room_that_was_not_used_is_free_again_and_empty(store):
    fill(store, KEYS[:1])
    before = store.counts()
    room = store.reserve(KEYS[1], 1000)
    room.view[:] = RECORD
    assert store.get(KEYS[1], 1000) is None
    store.give_back(room)
    assert store.counts() == before | {"misses": 1}
    again = store.reserve(KEYS[1], 1000)
    assert (again.offset, bytes(again.view)) == (room.offset, bytes(1000))
    assert store.publish(KEYS[1], again)
    assert bytes(store.get(KEYS[1], 1000)) == bytes(1000)


def test_a_full_disk_leaves_no_file_open_that_others_wait_for(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match="No space left on device"):
        SharedStore(1 << 20, tmp_path / "store")
    assert set(os.listdir("/proc/self/fd")) == before
