"""Measured ceilings and their store."""

from __future__ import annotations

import json
import time

import pytest

from vivace.inspection import ceilings, inspect, store
from vivace.inspection.ceilings import Ceiling, Survey, best_half
from vivace.inspection.reading import Gauge, Unmeasured


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def survey_of(**values: float) -> Survey:
    return Survey(
        {key: Ceiling(value, 0.01, 5, "2026-11-21T00:00:00+00:00") for key, value in values.items()}
    )


def fill(gauges, seconds=60.0):
    readings, absent = {}, {}
    ceilings._read_rounds(gauges, time.monotonic(), seconds, lambda share, what: None, readings, absent)
    return readings, absent


def test_the_better_half_decides_and_its_range_is_the_spread():
    assert best_half([10.0, 4.0, 9.0, 1.0]) == (9.5, pytest.approx(1 / 9.5))
    assert best_half([10.0, 4.0, 9.0], lower_is_better=True) == (6.5, pytest.approx(5 / 6.5))
    assert best_half([7.0]) == (7.0, 0.0)


def test_a_gauge_that_fails_is_named_and_the_others_go_on():
    def lacking():
        raise Unmeasured("this build lacks it")

    def breaking():
        return lambda: 1 / 0

    readings, absent = fill([Gauge("a", lacking), Gauge("b", breaking), Gauge("c", lambda: lambda: 2.0)])
    assert readings == {"c": [2.0] * ceilings.LARGEST_ROUNDS}
    assert absent == {"a": "this build lacks it", "b": "ZeroDivisionError: division by zero"}


def test_no_gauge_is_read_after_the_time_is_up():
    def slow():
        return lambda: time.sleep(0.05) or 1.0

    readings, _ = fill([Gauge("slow", slow), Gauge("late", slow)], seconds=0.04)
    assert readings == {"slow": [1.0], "late": []}


def test_the_cpu_is_measured_in_the_time_given():
    told = []
    found = ceilings.survey("cpu", seconds=5.0, progress=lambda share, what: told.append((share, what)))
    assert {"matmul_fp32", "matmul_bf16"} <= set(found.values)
    assert all(value > 0 for value in found.values.values())
    assert found.absent["host_to_device_pinned"] == "the device is the CPU: nothing is copied to it"
    assert told[0] == (0.0, "importing torch")
    assert all(0 <= share < 1 for share, _ in told)


def test_a_device_that_torch_does_not_know_is_a_reason():
    found = ceilings.survey("nonsense", seconds=1.0)
    assert found.values == {}
    assert "nonsense" in found.absent["nonsense"]


def test_an_interruption_keeps_what_was_read():
    def stop(share, what):
        if what == "matmul_bf16":
            raise KeyboardInterrupt

    found = ceilings.survey("cpu", seconds=30.0, progress=stop)
    assert found.interrupted
    assert set(found.values) == {"matmul_fp32"}
    assert found.absent["copy_device"] == "interrupted"


def test_ceilings_come_back_from_the_store_and_reach_the_machine():
    machine = inspect()
    assert machine.ceilings == {}
    store.save(machine.fingerprint, machine.device.kind, survey_of(matmul_fp32=2e11))
    assert inspect().ceilings == {"matmul_fp32": 2e11}
    assert inspect().fingerprint == machine.fingerprint
    assert store.load("0" * 12, "cpu").values == {}


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    """As in a container under a number that no user there has."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert store.cache_folder().is_absolute()
    assert inspect().device.name


def test_devices_are_kept_apart_and_unreached_keys_stay():
    store.save("abc", "cuda", survey_of(matmul_fp32=5e13))
    store.save("abc", "cpu", survey_of(matmul_fp32=2e11, copy_device=1e10, disk_read=1e9))
    later = survey_of(matmul_fp32=3e11)
    later.absent = {"copy_device": "interrupted", "disk_read": "the disk is almost full"}
    later.unreached = {"copy_device"}
    store.save("abc", "cpu", later)
    assert store.cached_ceilings("abc", "cpu") == {"matmul_fp32": 3e11, "copy_device": 1e10}
    assert store.load("abc", "cpu").absent == {"disk_read": "the disk is almost full"}
    assert store.cached_ceilings("abc", "cuda") == {"matmul_fp32": 5e13}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 1, "devices": 3}', '{"format": 99, "devices": {"cpu": {}}}',
     '{"format": 1, "devices": {"cpu": []}}', '{"format": 1, "devices": {"cpu": {"ceilings": {"a": 3}}}}',
     '{"format": 1, "devices": {"cpu": {"ceilings": [1], "absent": 3}}}', "\x00\xff"],
)  # fmt: skip
def test_a_store_that_is_torn_or_foreign_reads_as_empty_and_is_replaced(text):
    path = store.path_of("abc")
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert store.load("abc", "cpu").values == {}
    store.save("abc", "cpu", survey_of(matmul_fp32=2e11))
    assert store.cached_ceilings("abc", "cpu") == {"matmul_fp32": 2e11}
    assert [p.name for p in path.parent.iterdir()] == ["abc.json"]


def test_a_write_that_fails_leaves_the_old_file(monkeypatch):
    store.save("abc", "cpu", survey_of(matmul_fp32=2e11))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space left"):
        store.save("abc", "cpu", survey_of(matmul_fp32=9e11))
    assert store.cached_ceilings("abc", "cpu") == {"matmul_fp32": 2e11}
    assert [p.name for p in store.path_of("abc").parent.iterdir()] == ["abc.json"]
