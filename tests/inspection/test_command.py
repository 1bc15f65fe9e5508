"""`vivace inspect --measure` as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

VIVACE = """
import signal
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
    monkeypatch.setattr(measuring, "survey", lambda *_, **__: survey)
    machine = inspect()
    found = measuring.measure(machine)["cpu"]
    assert measuring.known(machine, {"cpu": found}) == {"matmul_fp32": 2e11}  # it is shown all the same
    assert found.values == {"matmul_fp32": 2e11}
    assert "Not a directory" in found.absent["store"]


def test_a_ceiling_that_moved_since_it_was_stored_says_so():
    from vivace.inspection.ceilings import Ceiling, Survey
    from vivace.inspection.measuring import with_spread_since

    before = Survey(
        {"disk_read": Ceiling(3e9, 0.02, 9, "then"), "copy_device": Ceiling(1e10, 0.02, 9, "then")}
    )
    now = Survey({"disk_read": Ceiling(2e9, 0.1, 9, "now"), "copy_device": Ceiling(1e10, 0.03, 9, "now")})
    spreads = {key: ceiling.spread for key, ceiling in with_spread_since(before, now).ceilings.items()}
    assert spreads == {"disk_read": 0.5, "copy_device": 0.03}
