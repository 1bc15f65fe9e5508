"""A fresh process that cannot tell is an error of its own, and never a traceback."""

import subprocess
import sys
from importlib.util import find_spec

import numpy
import pytest
import torch

from vivace.errors import ChildFailed, Code, TimedOut
from vivace.serving import proof
from vivace.serving.effect import effect, told
from vivace.serving.forms import BY_NAME
from vivace.torch_internals.compiler import know_int8

ASKED = [[numpy.ones((1, 3), numpy.float32)]]


def test_a_process_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    def run(command, **_):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(proof.subprocess, "run", run)
    with pytest.raises(TimedOut, match=r"cannot serve 'model.onnx' \(onnx\): no answer within 1200 s"):
        proof.answers("onnx", tmp_path / "model.onnx", "fp32", 1, ASKED, tmp_path)


def test_a_process_that_is_killed_says_so(tmp_path, monkeypatch):
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(proof.subprocess, "run", lambda command, **_: killed)
    with pytest.raises(ChildFailed, match="out of memory") as caught:
        proof.answers("onnx", tmp_path / "model.onnx", "fp32", 1, ASKED, tmp_path)
    assert caught.value.code is Code.KILLED


class Quantizing(torch.nn.Module):
    def forward(self, images):
        ops = torch.ops.quantized_decomposed
        found = ops.quantize_per_tensor.default(images, 0.5, 0, 0, 255, torch.uint8)
        return (ops.dequantize_per_tensor.default(found, 0.5, 0, 0, 255, torch.uint8),)


def test_a_program_that_quantizes_is_opened_in_a_fresh_process(tmp_path):
    """Its operators are torch's own, and unknown until they are asked for."""
    know_int8()
    program = torch.export.export(
        Quantizing(), (torch.ones(4, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(program, tmp_path / "model.pt2")
    found, _ = proof.answers("torch", tmp_path / "model.pt2", "int8", 1, ASKED, tmp_path)
    assert numpy.array_equal(found[0][0], ASKED[0][0])


def test_operators_of_compiled_code_are_told_by_the_numbers_that_they_are_given(tmp_path):
    half, whole = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4)

    def run():
        torch.mm(half, half)
        torch.mm(half, half)
        torch.addmm(whole, whole, whole)

    form = BY_NAME["compiled_bf16"]
    found = told(form, effect(form, None, tmp_path, run))
    assert found["effect"] == {"bf16": 2, "fp32": 1}
    assert [(one["name"], one["numbers"]) for one in found["stayed"]] == [
        ("aten::addmm of 4x4 by 4x4", "fp32")
    ]
    assert "your model's own code" in found["stayed"][0]["why"]


@pytest.mark.skipif(not find_spec("openvino"), reason="OpenVINO is not installed")
@pytest.mark.parametrize(
    "call", ["opened('openvino', 'no.xml', 'fp32', 1)", "names_in('openvino', 'no.xml')"]
)
def test_openvino_sends_nothing_home_when_a_file_is_opened(tmp_path, call):
    """It does so when it is imported, where it finds the package for that."""
    script = f"""
import sys
from vivace.serving.serve import names_in, opened
try:
    {call}
except RuntimeError:
    pass
assert "openvino" in sys.modules
assert sys.modules["openvino_telemetry"] is None
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=300)
