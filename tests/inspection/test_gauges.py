"""What the gauges read, and what they leave behind."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
import torch

from vivace.inspection import ceilings, gauges, host_gauges, limits
from vivace.inspection.all_reduce import all_reduce
from vivace.inspection.ceilings import Ceiling, Survey
from vivace.inspection.reading import Unmeasured
from vivace.inspection.table import ceiling_in_words, facts_of


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_flags_and_threads_are_set_back():
    def state():
        backends = torch.backends
        return (
            torch.get_num_threads(), backends.cudnn.benchmark,
            backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision,
        )  # fmt: skip

    torch.backends.cudnn.benchmark = False
    before = state()
    with gauges.open_device("cpu", {}):
        assert torch.backends.cudnn.benchmark
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert state() == before


@pytest.mark.parametrize(
    ("hip", "capability", "reason"),
    [
        (None, (9, 0), ""),
        (None, (7, 5), "this GPU is older than Ampere: no TF32"),
        ("7.0", (9, 0), "TF32 is NVIDIA's: most AMD GPUs do not have it"),
    ],
)
def test_tf32_is_measured_where_there_is_any(monkeypatch, hip, capability, reason):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    absent = {}
    found = [gauge.key for gauge in gauges._gauges(gauges._Bench(torch.device("cuda")), absent)]
    assert absent.get("matmul_tf32", "") == reason
    assert ("matmul_tf32" in found) == (not reason)
    assert any("tf32" in key for key in found) == (not reason)


def test_the_best_size_is_kept_and_a_slow_operator_is_not_repeated(monkeypatch):
    bench = gauges._Bench(torch.device("cpu"))
    speeds = {1: 1e3, 2: 4e3, 4: 3e3}
    seconds = {size: size / speed for size, speed in speeds.items()}
    calls = []

    def make(size):
        def run():
            calls.append(size)

        run.size = size
        return run

    monkeypatch.setattr(bench, "_seconds_of", lambda run, count: run() or count * seconds[run.size])
    assert bench._largest(make, float, 1, 4)() == pytest.approx(4e3)
    seconds[1] = 60.0
    calls.clear()
    bench._largest(make, float, 1, 4)
    assert len(calls) <= 4


def test_bytes_are_counted_both_ways(monkeypatch):
    monkeypatch.setattr(host_gauges, "beyond_the_caches", lambda: 2**24)
    bench = gauges._Bench(torch.device("cpu"))
    monkeypatch.setattr(bench, "_seconds_of", lambda run, count: float(count))
    assert bench.copy_device()() == 2.0 * 2**24


def test_buffers_are_larger_than_the_caches_of_all_our_cores(tmp_path, monkeypatch):
    """Two dies with two cores each; a fifth core is not ours."""
    for core in range(6):
        for index, size, shared in (("index2", "1024K", f"{core}"), ("index3", "384M", f"{core // 2}")):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache" / index
            folder.mkdir(parents=True)
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(host_gauges, "memory_limit", lambda: 2**40)
    assert host_gauges.beyond_the_caches(tmp_path) == 2 * 2 * 384 * 2**20
    assert host_gauges.beyond_the_caches(tmp_path / "none") == 256 * 2**20


def test_the_disk_gauge_leaves_no_file_and_refuses_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(host_gauges, "FILE_BYTES", 2**24)
    with ExitStack() as cleanup:
        assert host_gauges.disk_read(cleanup)() > 0
        assert os.listdir(tmp_path) == []
    monkeypatch.setattr(host_gauges, "FILE_BYTES", 2**60)
    with pytest.raises(Unmeasured, match="almost full"):
        host_gauges.disk_read(ExitStack())


def test_a_folder_that_cannot_be_written_is_a_reason(monkeypatch):
    def deny(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host_gauges.tempfile, "TemporaryFile", deny)
    with pytest.raises(Unmeasured, match="cannot be written: Permission denied"):
        host_gauges.disk_read(ExitStack())


def test_jpegs_have_a_photographs_size_and_need_pillow(monkeypatch):
    assert 60_000 < len(host_gauges._photograph()) < 130_000
    monkeypatch.setattr(host_gauges, "READING_SECONDS", 0.02)
    assert host_gauges.jpeg_decode_per_core()() > 1
    monkeypatch.setattr(host_gauges.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unmeasured, match="Pillow is not installed"):
        host_gauges.jpeg_decode_per_core()


def test_two_ranks_exchange_and_are_gone_afterwards(monkeypatch):
    monkeypatch.setitem(all_reduce.__globals__["BYTES"], "cpu", 2**20)
    started = []
    popen = all_reduce.__globals__["subprocess"].Popen
    monkeypatch.setattr(
        all_reduce.__globals__["subprocess"],
        "Popen",
        lambda *a, **k: started.append(popen(*a, **k)) or started[-1],
    )
    with ExitStack() as cleanup:
        read = all_reduce("cpu", 2, cleanup)
        assert read() > 0
        started[1].kill()
        with pytest.raises(Unmeasured):
            read()
    assert [rank.poll() is not None for rank in started] == [True, True]
    with ExitStack() as cleanup, pytest.raises(Unmeasured, match="one rank"):
        all_reduce("cpu", 1, cleanup)


def test_torch_missing_is_a_reason(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vivace.inspection.gauges", None)
    monkeypatch.delattr("vivace.inspection.gauges", raising=False)
    found = ceilings.survey("cpu", seconds=1.0)
    assert found.values == {}
    assert "Error" in found.absent["cpu"]


def test_ceilings_are_told_in_human_units_with_the_share_reached():
    assert ceiling_in_words("matmul_bf16", 7.68e14) == "768 TFLOP/s"
    assert ceiling_in_words("matmul_int8", 1.5e15) == "1.50 Pop/s"
    assert ceiling_in_words("copy_device", 4.3e12) == "4.30 TB/s"
    assert ceiling_in_words("launch_seconds", 1.7e-6) == "1.70 µs"
    assert ceiling_in_words("jpeg_decode_per_core", 930.4) == "930 images/s"
    survey = Survey({"matmul_bf16": Ceiling(8e14, 0.02, 9, "now"), "disk_read": Ceiling(1e9, 0.1, 9, "now")})
    found = facts_of(survey, {"matmul_bf16": 1e15})
    assert (found["matmul_bf16"]["share"], found["matmul_bf16"]["unit"]) == (0.8, "FLOP/s")
    assert found["disk_read"]["vendor"] is None
