"""Energy: which counters count, what happens where they begin anew or cannot be read, and what keeps it."""

from __future__ import annotations

import json
import runpy
import types
from pathlib import Path

import pytest

from vivace.inspection import energy
from vivace.inspection.energy import Meter
from vivace.measuring.paired import Timed
from vivace.reporting import phrases
from vivace.training.training import train

TINY = Path(__file__).parents[1] / "training" / "scenes" / "tiny.py"
ZONES = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "core",
    "intel-rapl:0:1": "dram",
    "intel-rapl:1": "package-1",
    "intel-rapl:2": "psys",
}


class Powercap:
    """A folder as Linux shows it; each zone begins at 90 J of the 100 J after which it begins anew."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.joules = folder, dict.fromkeys(ZONES, 90.0)
        for zone, name in ZONES.items():
            (folder / zone).mkdir(parents=True)
            (folder / zone / "name").write_text(f"{name}\n")
            (folder / zone / "max_energy_range_uj").write_text("100000000\n")
        self.spend(0)

    def spend(self, joules: float) -> None:
        """Count so much more in every zone."""
        for zone in ZONES:
            self.joules[zone] = (self.joules[zone] + joules) % 100
            (self.folder / zone / "energy_uj").write_text(f"{round(self.joules[zone] * 1e6)}\n")


@pytest.fixture
def powercap(tmp_path, monkeypatch):
    made = Powercap(tmp_path / "powercap")
    monkeypatch.setattr(energy, "POWERCAP", made.folder)
    return made


def test_packages_and_their_memory_count_once_each(powercap):
    meter = Meter(gpus=0)
    powercap.spend(4)
    assert meter.joules() == pytest.approx(3 * 4)  # neither the cores, nor the whole board once more
    assert meter.told(6) == {
        "joules": pytest.approx(12.0),
        "joules_per_sample": pytest.approx(2.0),
        "counters": ["package-0", "dram", "package-1"],
    }


def test_a_counter_that_begins_anew_goes_on(powercap):
    meter = Meter(gpus=0)
    for _ in range(5):
        powercap.spend(30)
        found = meter.joules()
    assert found == pytest.approx(3 * 150)


def test_without_a_counter_it_says_why(tmp_path, powercap, monkeypatch):
    nothing = Meter(gpus=0, powercap=tmp_path)
    assert (nothing.joules(), nothing.told(6)) == (None, {"reason": energy.NO_COUNTER})
    plain = Path.read_text

    def read(path, *arguments, **named):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return plain(path, *arguments, **named)

    meter = Meter(gpus=0)
    monkeypatch.setattr(Path, "read_text", read)
    assert "administrators only" in Meter(gpus=0).sources["reason"]
    assert meter.joules() is None  # one that is taken away meanwhile
    assert "ceased to answer" in meter.told(6)["reason"]


def test_the_first_gpus_that_are_shown_count(tmp_path, monkeypatch):
    millijoules = {0: 5_000, 1: 7_000, 2: 0}

    def spent(handle):
        if handle == 2:
            raise RuntimeError("Not Supported")
        return millijoules[handle]

    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.95.05",
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: "NVIDIA A40",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetCudaComputeCapability=lambda handle: (8, 6),
        nvmlDeviceGetTotalEnergyConsumption=spent,
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,0")
    meter = Meter(gpus=2, powercap=tmp_path, nvml=nvml)  # the third is no rank's
    millijoules.update({0: 9_000, 1: 10_500})
    assert meter.joules() == pytest.approx(3.5)
    assert meter.sources == {"counters": ["NVIDIA A40 (1)"]}
    assert Meter(gpus=0, powercap=tmp_path, nvml=nvml).joules() is None


def test_a_training_keeps_what_it_took(powercap, tmp_path):
    job = runpy.run_path(str(TINY))["make"]()
    run = train(job, out=tmp_path / "run", on_event=lambda event: powercap.spend(20))
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["energy"]
    assert kept == run.energy
    assert kept["joules"] > 3 * 100  # several times around
    assert kept["joules_per_sample"] < kept["joules"]
    assert phrases.energy(kept).endswith("a sample, counted by package-0, dram, package-1")


def test_blocks_are_counted_apart_from_what_runs_between_them(powercap):
    class Process:
        alive, pid = False, 0

        def ask(self, command, timeout, **arguments):
            powercap.spend(2)
            return {"seconds": 1.0, "samples": 4, "waited": 0.0}

    meter = Meter(gpus=0)
    one, other = (Timed(Process(), 1.0, meter) for _ in range(2))
    for _ in range(2):
        one.block(1)
        powercap.spend(7)
    other.block(1, cached=True)
    assert one.joules_per_sample == pytest.approx(3 * 2 / 4)
    assert other.joules_per_sample is None
