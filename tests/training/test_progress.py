"""The log of a run."""

import errno
import json
import threading

import pytest

from vivace.training.progress import ListenerFailed, Progress


def test_a_log_that_a_full_disk_ended_is_not_cut_off_by_the_resumed_run(tmp_path, monkeypatch):
    log = tmp_path / "metrics.jsonl"
    progress = Progress(tmp_path, 0, 0, None, on_gpus=False)
    progress.log("step", {"step": 1})

    def full(*_):
        with log.open("a") as file:
            file.write('{"st')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(progress, "_append", full)
    progress.log("step", {"step": 2})
    progress.log("step", {"step": 3})
    assert len(progress.notices) == 1
    again = Progress(tmp_path, 3, progress.num_bytes, None, on_gpus=False)
    again.log("step", {"step": 4})
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 4]


def test_what_is_told_in_a_step_reaches_the_listener_after_it_and_what_another_thread_tells_at_once(tmp_path):
    heard = []

    def listener(event):
        heard.append(event.payload["text"])
        if event.payload["text"] == "mine":
            raise ConnectionError("the tracker is gone")

    progress, in_step = Progress(tmp_path, 0, 0, listener, on_gpus=False), []

    def step():
        with progress.held():
            progress.notice("mine")
            thread = threading.Thread(target=progress.notice, args=("rank 1 hangs",))
            thread.start()
            thread.join()
            in_step.extend(heard)

    with pytest.raises(ListenerFailed, match="the tracker is gone"):
        step()
    assert in_step == ["rank 1 hangs"]
    assert heard == ["rank 1 hangs", "mine"]
