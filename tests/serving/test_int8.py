"""Each way to int8 acts, and its answers are near the model's."""

import dataclasses
import shutil

import numpy
import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.job import load
from vivace.serving import int8
from vivace.serving.calls import Flat
from vivace.serving.effect import CONVERTED, effect, left_out_of, multiplies, told
from vivace.serving.files import exported, to_onnx
from vivace.serving.forms import BY_NAME
from vivace.serving.judge import Judge
from vivace.serving.making import BASE, Bfloat16
from vivace.serving.material import gather
from vivace.serving.serve import in_torch, opened


@pytest.fixture(scope="module")
def material(trained, tmp_path_factory):
    reference, run = trained("job")
    folder = tmp_path_factory.mktemp("calls")
    Judge(load(reference), str(run), str(folder)).record()
    return gather(load(reference), run, folder)


@pytest.fixture(scope="module")
def base(material, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / BASE
    to_onnx(material, path)
    return path


def near(material, serve):
    """Does it name the same kinds as the model, for batches of any size, without being bit-equal to it?"""
    plain, _ = in_torch(material.flat)
    agreeing, apart = [], 0.0
    for arrays in material.calls.inputs:
        expected, found = plain(arrays)[0], serve(arrays)[0]
        agreeing += list(expected.argmax(1) == found.argmax(1))
        apart = max(apart, float(numpy.abs(expected - found).max()))
    return numpy.mean(agreeing) > 0.9 and 0.0 < apart < 0.5


@pytest.mark.parametrize(("name", "make"), [("onnx", int8.for_onnx), ("openvino", int8.for_openvino)])
def test_files(material, base, tmp_path, name, make):
    form = BY_NAME[f"{name}_int8"]
    make(base, material, tmp_path / form.file)
    shutil.copy(base, tmp_path / BY_NAME[BASE].file)  # where operators have the names of the person's modules
    serve, handle = opened(name, str(tmp_path / form.file), "int8", 1)
    assert near(material, serve)
    ran = effect(form, handle, tmp_path / form.file, lambda: serve(material.calls.inputs[0]))
    assert any(one.numbers == "int8" for one in ran)
    assert {one.name.partition(" ")[0] for one in ran} == {"1", "5"}  # a BatchNorm with its convolution
    assert not list(tmp_path.glob("*.prepared"))


def test_the_graph_of_torch(material):
    graph = int8.in_graph(material)
    names = {str(node.target) for node in graph.graph.nodes}
    assert any("quantize_per_tensor" in name for name in names)
    assert near(material, in_torch(graph)[0])
    assert list(left_out_of(graph.graph)) == []
    plain = exported(material).module()
    assert list(left_out_of(plain.graph)) == ["0 (conv2d)", "5 (linear)"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_linear_layers(material, dynamic):
    model = int8.by_weights(material, dynamic=dynamic)
    assert near(material, in_torch(model)[0])


def test_a_model_without_linear_layers_is_refused(material):
    bare = dataclasses.replace(material, flat=Flat(nn.Conv2d(1, 2, 3), ((torch.ones(1, 1, 6, 6),), {})))
    with pytest.raises(Refused, match="no linear layer"):
        int8.by_weights(bare, dynamic=True)
    attention = nn.MultiheadAttention(8, 2)  # whose own linear layer torchao leaves as it is
    for dynamic in (False, True):
        with pytest.raises(Refused, match="no linear layer that torchao turns into int8"):
            int8.by_weights(dataclasses.replace(material, flat=Flat(attention, ((), {}))), dynamic=dynamic)


def test_bfloat16_answers_in_fp32(material):
    model = Bfloat16(material.flat, channels_last=True)
    (found,) = model(torch.from_numpy(material.calls.inputs[0][0]))
    assert found.dtype == torch.float32
    assert near(material, in_torch(model)[0])
    assert all(parameter.dtype == torch.float32 for parameter in material.flat.parameters())


def test_what_has_no_channels_last_order_is_in_bfloat16_all_the_same():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Unflatten(1, (1, 4)), nn.Conv3d(1, 2, 3))
    images = torch.randn(2, 3, 6, 6)
    model = Bfloat16(Flat(network, ((images,), {})).eval(), channels_last=True)
    (found,) = model(images)
    assert torch.allclose(found, network(images), atol=0.1)
    image, volume = (p for p in model.parameters() if p.dim() > 1)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert volume.is_contiguous()


class Converting(nn.Module):
    """Its last layer is called in fp32, whatever it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.parts = nn.Linear(36, 8), nn.ModuleList([nn.Linear(8, 3)])

    def forward(self, images):
        last = self.parts[0]
        rows = torch.relu(self.first(images.flatten(1))).float()
        return nn.functional.linear(rows, last.weight.float(), last.bias.float()) @ torch.eye(3)


def test_what_stays_in_fp32_is_named_with_its_reason(material):
    given = ((torch.ones(1, 1, 6, 6),), {})
    form = BY_NAME["eager_bf16"]
    serve, handle = in_torch(Bfloat16(Flat(Converting(), given).eval(), channels_last=True))
    ran = effect(form, handle, None, lambda: serve(material.calls.inputs[0]))
    found = told(form, ran)
    assert found["effect"] == {"bf16": 1, "fp32": 2}
    assert ran[0].name == "first (addmm)"
    assert [one["name"] for one in found["stayed"]] == ["addmm", "mm"]
    assert {one["why"] for one in found["stayed"]} == {CONVERTED}
    assert told(BY_NAME["eager_fp32"], ran)["stayed"] == []


def test_what_a_quantizer_leaves_out_is_told_from_what_a_runtime_has_no_kernel_for(material, base, tmp_path):
    """The last layer is left out of int8 here."""
    onnx, quantization = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime.quantization")
    names = [node.name for node in onnx.load(base).graph.node if node.op_type == "Gemm"]
    quantize = quantization.quantize_static

    def but_one(*given, **options):
        quantize(*given, **options, nodes_to_exclude=names)

    path = tmp_path / BY_NAME["onnx_int8"].file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "quantize_static", but_one)
        int8.for_onnx(base, material, path)
    found = told(BY_NAME["onnx_int8"], effect(BY_NAME["onnx_int8"], None, path, None))
    assert found["effect"] == {"int8": 1, "fp32": 1}
    (stayed,) = found["stayed"]
    assert stayed == {
        "name": "5 (linear)",
        "numbers": "fp32",
        "why": "left out of int8 by ONNX Runtime's quantizer",
    }


@pytest.mark.parametrize(
    ("kind", "does"),
    [("Convolution", True), ("MatMul", True), ("Convert", False), ("ConvertLike", False), ("Softmax", False)],
)
def test_what_multiplies(kind, does):
    assert multiplies(kind) is does
