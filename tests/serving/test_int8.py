"""Each way to int8 acts, and its answers are near the model's."""

import dataclasses

import numpy
import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.job import load
from vivace.serving import int8
from vivace.serving.calls import Flat
from vivace.serving.effect import effect, multiplies
from vivace.serving.files import to_onnx
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
    serve, handle = opened(name, str(tmp_path / form.file), "int8", 1)
    assert near(material, serve)
    ran = effect(form, handle, tmp_path / form.file, lambda: serve(material.calls.inputs[0]))
    assert ran.get("int8", 0) >= 1
    assert not list(tmp_path.glob("*.prepared"))


def test_the_graph_of_torch(material):
    graph = int8.in_graph(material)
    names = {str(node.target) for node in graph.graph.nodes}
    assert any("quantize_per_tensor" in name for name in names)
    assert near(material, in_torch(graph)[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_linear_layers(material, dynamic):
    model = int8.by_weights(material, dynamic=dynamic)
    assert near(material, in_torch(model)[0])


def test_a_model_without_linear_layers_is_refused(material):
    bare = dataclasses.replace(material, flat=Flat(nn.Conv2d(1, 2, 3), ((torch.ones(1, 1, 6, 6),), {})))
    with pytest.raises(Refused, match="no linear layer"):
        int8.by_weights(bare, dynamic=True)


def test_bfloat16_answers_in_fp32(material):
    model = Bfloat16(material.flat, channels_last=True)
    (found,) = model(torch.from_numpy(material.calls.inputs[0][0]))
    assert found.dtype == torch.float32
    assert near(material, in_torch(model)[0])
    assert all(parameter.dtype == torch.float32 for parameter in material.flat.parameters())


@pytest.mark.parametrize(
    ("kind", "does"),
    [("Convolution", True), ("MatMul", True), ("Convert", False), ("ConvertLike", False), ("Softmax", False)],
)
def test_what_multiplies(kind, does):
    assert multiplies(kind) is does
