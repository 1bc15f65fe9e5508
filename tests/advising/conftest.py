from __future__ import annotations

import json

import pytest

from vivace.advising.source import Subject, counted_model


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    """Else advice also says how this machine does, once other tests have measured it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing-measured"))


@pytest.fixture
def resnet() -> Subject:
    subject = counted_model("torchvision:resnet50@224", batch_size=64)
    assert subject is not None
    return subject


@pytest.fixture
def profile(tmp_path):
    """Writes a profile of the contract's format, with keys replaced, and returns its path."""

    def write(**changes):
        work = {
            "format": 1,
            "precision": "fp32",
            "batch_size": 32,
            "steps_per_epoch": 100,
            "epochs": 10,
            "step_seconds": None,
            "operators": {
                "convolution": {"flops": 8e11, "bytes": 8e9, "count": 106, "seconds": 0.2},
                "norm": {"flops": 0, "bytes": 1.2e10, "count": 106, "seconds": 0.1},
                "elementwise": {"flops": 0, "bytes": 1.2e10, "count": 350, "seconds": 0.1},
            },
            "num_parameters": 25_000_000,
            "parameter_bytes": 100_000_000,
            "optimizer_bytes": 100_000_000,
            "activation_bytes": 3e9,
            "peak_bytes": 4e9,
            "host_seconds_per_sample": 1e-5,
            "device": None,
        }
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({"work": {**work, **changes}, "shares": {}}))
        return str(path)

    return write
