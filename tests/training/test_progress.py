"""The log of a run."""

import errno
import json

from vivace.training.progress import Progress


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
