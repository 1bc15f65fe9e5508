"""What compute APIs reach: measured in a child process with checked results; what is missing, and the way."""

import json
import subprocess
import sys

import numpy
import pytest
from rich.console import Console

from vivace.inspection import apis, compute_apis, inspect
from vivace.inspection.ceilings import Ceiling, Survey
from vivace.inspection.table import draw_apis
from vivace.machine import Backend

KEYS = {"copy_device", "matmul_fp32", "matmul_fp16", "matmul_int8"}


def machine(*backends):
    import dataclasses

    return dataclasses.replace(inspect(), backends=backends)


@pytest.fixture
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def runs_programs():
    """Does this machine's OpenCL driver build and run any program at all?"""
    text = """
import pyopencl
devices = [device for platform in pyopencl.get_platforms() for device in platform.get_devices()]
context = pyopencl.Context(devices[:1])
program = pyopencl.Program(context, "__kernel void one(__global int *a) { *a = 1; }").build()
queue = pyopencl.CommandQueue(context)
program.one(queue, (1,), None, pyopencl.Buffer(context, pyopencl.mem_flags.READ_WRITE, 4))
queue.finish()
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    return not done.returncode


def test_opencl_is_measured_on_whatever_device_it_names(own_store):
    pytest.importorskip("pyopencl")
    here = machine(Backend("opencl", ("a device",)), Backend("cuda"))
    apis.measure_and_keep(here, seconds=0.2)
    found = apis.stored(here)
    assert found
    if not runs_programs():
        reasons = [survey.absent.get("matmul_fp32", survey.absent.get("opencl")) for survey in found.values()]
        assert all(reasons)
        pytest.skip(f"the driver runs no program on this processor: {reasons}")
    for name, survey in found.items():
        assert name.startswith("opencl: "), survey.absent
        assert set(survey.ceilings) | set(survey.absent) == KEYS
        assert {"copy_device", "matmul_fp32"} <= set(survey.ceilings), survey.absent
        assert all(ceiling.num_readings > 1 for ceiling in survey.ceilings.values())
    document = apis.document(found, {})
    assert all(fact["value"] > 0 for facts in document["apis"].values() for fact in facts.values())
    json.dumps(document)


def test_vulkan_is_measured_where_a_driver_is():
    wgpu = pytest.importorskip("wgpu")
    if not any(a.info["backend_type"] == "Vulkan" for a in wgpu.gpu.enumerate_adapters_sync()):
        pytest.skip("no Vulkan driver")
    found = apis.measure_apis(machine(Backend("vulkan", ("a device",))), seconds=0.2)
    for name, survey in found.items():
        assert name.startswith("vulkan: "), survey.absent
        assert {"copy_device", "matmul_fp32"} <= set(survey.ceilings), survey.absent
        assert "matmul_int8" in survey.absent


def test_sycl_is_measured_where_its_runtime_names_a_device():
    dpctl = pytest.importorskip("dpctl")
    pytest.importorskip("dpnp")
    if not dpctl.get_devices():
        pytest.skip("no SYCL driver")
    found = apis.measure_apis(machine(Backend("sycl", ("a device",))), seconds=0.2)
    for name, survey in found.items():
        assert name.startswith("sycl: "), survey.absent
        assert set(survey.ceilings) == {"copy_device", "matmul_fp32"}, survey.absent


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "a driver crashed (Aborted)"),
        ("raise SystemExit(3)", "a driver crashed (exit code 3)"),
        ("import time; time.sleep(60)", "it did not end within 1 s"),
        (
            "import os\nfor number in (1, 2): os.write(number, b'gro\\xdfe Karte\\n')\n"
            'print(\'{"devices": [], "reason": "its drivers name no device"}\')',
            "its drivers name no device",
        ),
    ],
)
def test_a_broken_driver_takes_nothing_else_with_it(code, reason, tmp_path, monkeypatch):
    script = tmp_path / "broken.py"
    script.write_text(code)
    monkeypatch.setattr(apis, "SCRIPT", script)
    monkeypatch.setattr(apis, "LONGEST_SECONDS", 0.5 if "sleep" in code else 60.0)
    found = apis.measure_apis(machine(Backend("opencl", ("a device",))), seconds=0.5)
    assert found["opencl"].absent == {"opencl": reason}


RATES = Survey({"copy_device": Ceiling(1e9, 0.0, 3, "2026-01-01")})
BROKEN = Survey(absent={"opencl": "a driver crashed (Aborted)"})
TWO = (Backend("opencl", ("card",)), Backend("vulkan", ("card",)))


def finds(monkeypatch, **answers):
    def surveys(backend, seconds):
        found = answers[backend.name]
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(apis, "_surveys", surveys)


def test_what_is_measured_afresh_takes_the_place_of_what_was_known(own_store, monkeypatch):
    finds(monkeypatch, opencl={"opencl": BROKEN}, vulkan={"vulkan: card": RATES})
    apis.measure_and_keep(machine(*TWO))
    assert set(apis.stored(machine())) == {"opencl", "vulkan: card"}
    finds(monkeypatch, opencl={"opencl: card": RATES})
    apis.measure_and_keep(machine(TWO[0], Backend("vulkan", reason="its loader is installed, and no driver")))
    assert apis.stored(machine()) == {"opencl: card": RATES}


def test_an_interruption_keeps_the_apis_before_it(own_store, monkeypatch):
    finds(monkeypatch, opencl={"opencl: card": RATES}, vulkan=KeyboardInterrupt())
    assert apis.measure_and_keep(machine(*TWO)) == ({"opencl: card": RATES}, False)
    assert apis.stored(machine()) == {"opencl: card": RATES}


def test_what_cannot_be_stored_is_shown_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    finds(monkeypatch, opencl={"opencl: card": RATES})
    assert apis.measure_and_keep(machine(TWO[0])) == ({"opencl: card": RATES}, True)


def test_a_wrong_result_is_named_and_its_rate_does_not_count():
    def wrong():
        compute_apis.require_equal(numpy.array([1.0, 2.0]), numpy.array([1.0, 3.0]))

    def right():
        return (lambda: None), 1.0

    found = compute_apis.measured({"matmul_fp32": wrong, "copy_device": right}, seconds=0.0)
    assert found["absent"] == {"matmul_fp32": "wrong results: 0.5 of the numbers"}
    assert set(found["readings"]) == {"copy_device"}


def test_a_shape_with_wrong_results_is_never_chosen():
    def made(shape, size):
        if shape == compute_apis.SHAPES[2]:
            compute_apis.require_equal(numpy.zeros(2), numpy.ones(2))
        return lambda: None

    with pytest.raises(compute_apis.Wrong, match="wrong results: 1 of the numbers"):
        compute_apis.fastest(made, compute_apis.SHAPES)


NO_OPENCL = Backend("opencl", reason="no loader (libOpenCL) is installed")
NO_VULKAN = Backend("vulkan", reason="its loader is installed, and no driver")


def test_what_reaches_nothing_has_a_next_step_or_needs_another_machine():
    found = apis.next_steps(
        machine(
            Backend("cuda", reason="no NVIDIA GPU"),
            Backend("xpu", reason="no Intel GPU beside the processor's own"),
            NO_OPENCL,
            NO_VULKAN,
            Backend("sycl", reason="no runtime of oneAPI (dpnp) is installed"),
            Backend("directml", reason="only on Windows and its Linux subsystem"),
            Backend("mps", reason="only on Apple silicon"),
            Backend("cpu", ("a processor",)),
        )
    )
    assert found["opencl"] == (
        "no loader (libOpenCL) is installed; next: pip install 'vivace[opencl]', which brings a loader, and "
        "PoCL as a driver for the processor"
    )
    assert found["vulkan"].startswith(
        "its loader is installed, and no driver; next: pip install 'vivace[vulkan]', "
    )
    assert "mesa-vulkan-drivers" in found["vulkan"]
    assert found["sycl"].startswith(
        "no runtime of oneAPI (dpnp) is installed; next: pip install dpnp (3 GB), "
    )
    assert found["directml"] == "only on Windows and its Linux subsystem; it needs Windows"
    assert found["mps"].endswith("it needs a Mac with Apple silicon")
    assert found["cuda"] == "no NVIDIA GPU; it needs an NVIDIA GPU and its driver"
    assert found["xpu"].endswith("it needs an Intel GPU and its Level Zero driver")
    assert "cpu" not in found


@pytest.mark.parametrize(
    ("maker", "opencl", "vulkan"),
    [
        ("cuda", "NVIDIA_DRIVER_CAPABILITIES=compute", "NVIDIA_DRIVER_CAPABILITIES=all"),
        ("rocm", "rocm-opencl-runtime", "mesa-vulkan-drivers"),
        ("xpu", "intel-opencl-icd", "mesa-vulkan-drivers"),
    ],
)
def test_the_driver_to_install_is_that_of_the_card(maker, opencl, vulkan):
    found = apis.next_steps(machine(Backend(maker, ("a card",)), NO_OPENCL, NO_VULKAN))
    assert opencl in found["opencl"]
    assert vulkan in found["vulkan"]
    assert maker not in found


def test_a_device_without_the_package_names_the_package(monkeypatch):
    monkeypatch.setattr(apis, "PACKAGES", {"opencl": "no_such_package"})
    found = apis.next_steps(machine(Backend("opencl", ("a device",))))
    assert found["opencl"].startswith("the package no_such_package is not installed; next: pip install")


def test_rates_stand_beside_those_of_torch():
    def survey(value):
        return Survey({"matmul_fp32": Ceiling(value, 0.0, 3, "2026-01-01")})

    console = Console(record=True, width=100)
    draw_apis({"opencl: card": survey(1e9)}, {"cpu": survey(5e10)}, {"vulkan": "no driver"}, console)
    text = console.export_text()
    assert "torch: cpu" in text
    assert "50.0 GFLOP/s" in text
    assert "1.00 GFLOP/s" in text
    assert "through vulkan nothing: no driver" in text
