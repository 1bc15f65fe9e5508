"""What a trace says, on traces of a few events."""

import json
import subprocess
import sys

import pytest

from vivace.profiling.trace import read_trace


def event(name, start, end, category="cpu_op", thread=1):
    return {
        "ph": "X",
        "name": name,
        "ts": start,
        "dur": end - start,
        "tid": thread,
        "cat": category,
        "args": {},
    }


def test_collectives_of_another_thread_count_where_no_operator_runs(tmp_path):
    events = [
        event("vivace:step", 0, 1000, "user_annotation"),
        event("vivace:backward", 100, 900, "user_annotation"),
        event("aten::mm", 100, 400),
        event("gloo:all_reduce", 300, 800, "user_annotation", thread=2),
        event("aten::add_", 900, 1000),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(path)
    assert found["collective_seconds"] == pytest.approx(500e-6)
    assert found["communication_seconds"] == pytest.approx(400e-6)
    assert found["operators"] == {"matmul": pytest.approx(300e-6), "elementwise": pytest.approx(100e-6)}


def test_what_a_data_set_computes_is_no_operator_of_the_step(tmp_path):
    events = [
        event("vivace:step", 0, 1000, "user_annotation"),
        event("vivace:data", 0, 600, "user_annotation"),
        event("aten::mm", 100, 500),
        event("aten::mm", 300, 500, thread=2),
        event("aten::add_", 700, 1000),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    operators = read_trace(path)["operators"]
    assert operators == {"matmul": pytest.approx(200e-6), "elementwise": pytest.approx(300e-6)}


@pytest.mark.parametrize(("usual", "chosen"), [((), 400), ((False, True, False), 1000), ((False,) * 3, 400)])
def test_a_step_unlike_the_others_is_not_the_one_that_is_shown(tmp_path, usual, chosen):
    spans = ((0, 400), (400, 1400), (1400, 1800))
    path = tmp_path / "trace.json"
    steps = [event("vivace:step", begin, end, "user_annotation") for begin, end in spans]
    path.write_text(json.dumps({"traceEvents": steps}))
    assert read_trace(path, usual_steps=usual)["step_seconds"] == pytest.approx(chosen * 1e-6)


def test_a_gpu_whose_kernels_are_not_shown_gets_no_times_of_the_host(tmp_path):
    events = [event("vivace:step", 0, 1000, "user_annotation"), event("aten::mm", 100, 400)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(path, "cuda")
    assert (found["operators"], found["slowest"], found["busy_seconds"]) == ({}, [], None)
    assert found["counts"] == {"matmul": 1}
    assert read_trace(path, "cpu")["busy_seconds"] == pytest.approx(300e-6)


def test_kernels_count_for_the_step_that_launched_them_whenever_they_ran(tmp_path):
    """The GPU is one step behind: the last step's products run when its host has gone on."""

    def launched(name, begin, end, category, number):
        return {
            **event(name, begin, end, category, 7 if category == "kernel" else 1),
            "args": {"External id": number},
        }

    events = [event("vivace:step", begin, begin + 100, "user_annotation") for begin in (0, 100)]
    for number in (0, 1):
        events.append(launched("aten::mm", 100 * number + 10, 100 * number + 20, "cpu_op", number))
        events.append(launched("gemm", 100 * number + 110, 100 * number + 170, "kernel", number))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(path, "cuda")
    assert found["operators"] == {"matmul": pytest.approx(60e-6)}
    assert found["num_kernels"] == 1
    assert found["busy_seconds"] == pytest.approx(60e-6)  # of the step before, in the time of this one


def test_the_timeline_holds_every_whole_step(tmp_path):
    path = tmp_path / "trace.json"
    parts = (("data", 0, 100), ("backward", 400, 900))
    steps = [event("vivace:step", begin, begin + 1000, "user_annotation") for begin in (0, 1000, 2000)]
    steps[2]["dur"] = 200  # cut off
    phases = [
        event(f"vivace:{name}", begin + start, begin + end, "user_annotation")
        for begin in (0, 1000)
        for name, start, end in parts
    ]
    path.write_text(json.dumps({"traceEvents": [*steps, *phases]}))
    found = read_trace(path)
    assert found["step_starts"] == [0.0, 1e-3]
    assert found["timeline_seconds"] == pytest.approx(2e-3)
    assert [name for name, _, _ in found["phases"]] == ["data", "backward"] * 2
    assert found["phases"][3][1:] == pytest.approx([1.4e-3, 1.9e-3])


def test_a_step_with_a_validation_in_it_is_not_the_one_that_is_read(tmp_path):
    path = tmp_path / "trace.json"
    begins = ((0, 100), (100, 200), (200, 1200))
    steps = [event("vivace:step", begin, end, "user_annotation") for begin, end in begins]
    work = [event("aten::mm", begin + 10, end - 10) for begin, end in begins]
    path.write_text(json.dumps({"traceEvents": [*steps, *work]}))
    found = read_trace(path)
    assert found["step_seconds"] == pytest.approx(100e-6)
    assert found["operators"] == {"matmul": pytest.approx(80e-6)}
    assert found["timeline_seconds"] == pytest.approx(1200e-6)


def test_a_trace_is_read_and_judged_without_torch():
    code = "import sys, vivace.profiling.judge, vivace.profiling.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
