"""`vivace inspect --measure` as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest


def test_an_interrupted_measurement_keeps_and_shows_what_it_has(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "vivace", "inspect", "--measure", "--json"],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "importing torch" in process.stderr.readline()
    try:
        process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the signal came too late, or the parent ignores it")
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "what was measured until then is kept" in errors
    document = json.loads(output)
    if not document["ceilings"]:
        pytest.skip("a slow machine: interrupted before the first ceiling was measured")
    assert all(value > 0 for value in document["ceilings"].values())
    assert "interrupted" in document["unmeasured"]["cpu"].values()
    fact = document["ceiling_facts"]["cpu"]["matmul_fp32"]
    assert fact["unit"] == "FLOP/s"
    assert fact["value"] == document["ceilings"]["matmul_fp32"]
    stored = json.loads((tmp_path / "cache/vivace/ceilings" / f"{document['fingerprint']}.json").read_text())
    assert set(stored["devices"]["cpu"]["ceilings"]) == set(document["ceilings"])


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch):
    from vivace.inspect import inspect, measuring
    from vivace.inspect.ceilings import Ceiling, Survey

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    survey = Survey({"matmul_fp32": Ceiling(2e11, 0.01, 5, "now")})
    monkeypatch.setattr(measuring, "survey", lambda *_, **__: survey)
    found = measuring.measure(inspect())["cpu"]
    assert found.values == {"matmul_fp32": 2e11}
    assert "Not a directory" in found.absent["store"]
