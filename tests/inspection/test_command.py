"""`vivace inspect --measure` as a person runs it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from vivace.words import percent

VIVACE = """
import signal
import vivace.inspection.measuring
vivace.inspection.measuring.TOLERATED_SHARE = 2.0  # what runs beside the tests is not to be seen
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command ignores it
from vivace.command.cli import main
main()
"""


def test_an_interrupted_measurement_keeps_and_shows_what_it_has(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", VIVACE, "inspect", "--measure", "--json"],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    told = []
    for line in process.stderr:
        told.append(line)
        if len(told) > 1 and "measuring matmul" in told[-2]:
            break  # what is measured after a matrix rate: that rate has been read
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 130, "".join(told) + errors
    assert "Traceback" not in errors
    assert "what was measured until then is kept" in errors
    document = json.loads(output)
    assert all(value > 0 for value in document["ceilings"].values())
    ((kind, facts),) = document["ceiling_facts"].items()
    assert document["ceilings"] == {key: fact["value"] for key, fact in facts.items()}
    assert "interrupted" in document["unmeasured"][kind].values()
    assert facts["matmul_fp32"]["unit"] == "FLOP/s"
    stored = json.loads((tmp_path / "cache/vivace/ceilings" / f"{document['fingerprint']}.json").read_text())
    read = {key: entry["value"] for key, entry in stored["devices"][kind]["ceilings"].items()}
    assert {key: fact["value"] for key, fact in facts.items()} == read


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch):
    from vivace.inspection import inspect, measuring
    from vivace.inspection.ceilings import Ceiling, Survey

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    survey = Survey({"matmul_fp32": Ceiling(2e11, 0.01, 5, "now")})
    monkeypatch.setattr(measuring, "TOLERATED_SHARE", 2.0)
    monkeypatch.setattr(measuring, "survey", lambda *_, **__: survey)
    machine = inspect()
    found = measuring.measure(machine)["cpu"]
    assert measuring.known(machine, {"cpu": found}) == {"matmul_fp32": 2e11}  # it is shown all the same
    assert found.values == {"matmul_fp32": 2e11}
    assert "Not a directory" in found.absent["store"]


@pytest.mark.parametrize(
    ("used", "spread", "reason"),
    [
        (0.5, 0.01, f"other processes used {percent(0.5)} of the processor meanwhile"),
        (0.0, 0.45, f"readings of matmul fp32 lie {percent(0.45)} apart"),
        (0.02, 0.05, ""),
    ],
)
def test_what_a_busy_machine_reaches_is_shown_and_not_stored(tmp_path, monkeypatch, used, spread, reason):
    from vivace.inspection import inspect, measuring, table
    from vivace.inspection.ceilings import Ceiling, Survey

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    readings = {"matmul_fp32": Ceiling(2e11, spread, 5, "now"), "disk_read": Ceiling(1e9, 0.9, 5, "now")}
    monkeypatch.setattr(measuring, "survey", lambda *_, **__: Survey(dict(readings)))
    monkeypatch.setattr(measuring.ForeignLoad, "disturb", lambda self: setattr(self, "largest", used))
    machine = inspect()
    found = measuring.measure(machine)["cpu"]
    assert found.values == {"matmul_fp32": 2e11, "disk_read": 1e9}
    why = found.absent.get("steady", "")
    assert why == (f"{reason}; measure again when the machine is idle" if reason else "")
    assert bool(measuring.stored(machine)) is not bool(reason)
    console = Console(width=200, record=True, file=io.StringIO())
    table.draw_ceilings("cpu", found, {}, console)
    assert (f"not stored: {why}" in console.export_text()) is bool(reason)


def test_a_ceiling_that_moved_since_it_was_stored_says_so():
    from vivace.inspection.ceilings import Ceiling, Survey
    from vivace.inspection.measuring import with_spread_since

    before = Survey(
        {"disk_read": Ceiling(3e9, 0.02, 9, "then"), "copy_device": Ceiling(1e10, 0.02, 9, "then")}
    )
    now = Survey({"disk_read": Ceiling(2e9, 0.1, 9, "now"), "copy_device": Ceiling(1e10, 0.03, 9, "now")})
    spreads = {key: ceiling.spread for key, ceiling in with_spread_since(before, now).ceilings.items()}
    assert spreads == {"disk_read": 0.5, "copy_device": 0.03}


@pytest.mark.parametrize("ended", [KeyboardInterrupt, RuntimeError])
def test_a_measurement_that_reads_nothing_leaves_what_is_stored(tmp_path, monkeypatch, ended):
    """Ctrl-C while torch is imported, or a device that does not open."""
    from vivace.inspection import gauges, inspect, measuring, store
    from vivace.inspection.ceilings import Ceiling, Survey

    def opening(*_):
        raise ended("it does not open")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring.ForeignLoad, "disturb", lambda self: setattr(self, "largest", 0.0))
    monkeypatch.setattr(gauges, "open_device", opening)
    machine = inspect()
    store.save(machine.measured_as, "cpu", Survey({"matmul_fp32": Ceiling(2e11, 0.01, 5, "then")}))
    found = measuring.survey_and_keep(machine, "cpu", 1.0)
    assert found.values == {}
    assert found.interrupted is (ended is KeyboardInterrupt)
    assert store.cached_ceilings(machine.measured_as, "cpu") == {"matmul_fp32": 2e11}
