"""A wrong constant in one layer of a file is found there, and named as the person names the layer."""

import numpy
import pytest
import torch

import vivace
from vivace.exporting import proving
from vivace.exporting.answering import answer
from vivace.serving.envelope import Check

FACTOR = 1.01


def in_onnx(path, name):
    import onnx

    model = onnx.load(path)
    (constant,) = (one for one in model.graph.initializer if one.name.endswith(name))
    wrong = FACTOR * onnx.numpy_helper.to_array(constant)
    constant.CopyFrom(onnx.numpy_helper.from_array(wrong.astype(numpy.float32), constant.name))
    onnx.save(model, path)


def in_torch(path, name):
    program = torch.export.load(path)
    (constant,) = (tensor for key, tensor in program.state_dict.items() if key.endswith(name))
    with torch.no_grad():
        constant.mul_(FACTOR)
    torch.export.save(program, path)


def in_openvino(path, name, weights):
    constants = path.with_suffix(".bin")
    right = weights[name].numpy().tobytes()
    wrong = (FACTOR * weights[name]).numpy().tobytes()
    assert constants.read_bytes().count(right) == 1
    constants.write_bytes(constants.read_bytes().replace(right, wrong))


@pytest.fixture
def planted(monkeypatch):
    """A function: from now on a constant of a layer is one per cent too large in the file that is proven."""

    def plant(name, run):
        real = proving._file

        def file(*arguments):
            path = real(*arguments)
            if path.suffix == ".xml":
                in_openvino(path, name, torch.load(run / "model.pt", weights_only=True))
            else:
                (in_onnx if path.suffix == ".onnx" else in_torch)(path, name)
            return path

        monkeypatch.setattr(proving, "_file", file)

    return plant


@pytest.mark.parametrize(
    ("to", "layer"), [("onnx", "second"), ("onnx", "label"), ("openvino", "second"), ("torch", "label")]
)
def test_a_wrong_constant_is_found_in_its_layer(trained, tmp_path, planted, to, layer):
    """Both layers in one runtime, and each runtime with one: the layers are compared alike in all."""
    _, run = trained("wide")
    planted(f"{layer}.weight", run)
    found = vivace.export(run, to=to, out=tmp_path)
    assert not found.kept
    assert found.reason.startswith("'output['label']' differs")
    assert found.reason.endswith(f"the first layer that differs is '{layer}'")
    kept = {check["output"]: check["kept"] for check in found.layers["checks"]}
    assert kept["norm"]
    assert not kept[layer]
    assert layer in (tmp_path / "model_card.html").read_text()


@pytest.mark.parametrize("to", ["onnx", "openvino", "torch"])
def test_every_layer_of_a_right_file_agrees(trained, tmp_path, to):
    found = vivace.export(trained("wide")[1], to=to, out=tmp_path)
    assert found.kept, found.reason
    compared = [check["output"] for check in found.layers["checks"]]
    assert compared == [*(["first"] if to == "torch" else []), "norm", "second", "label", "size"]
    assert found.layers["of"] == 5
    assert f"{len(compared)} of 5 stand in the file" in str(answer(found).parts)


def test_what_is_compiled_ahead_of_time_says_that_its_layers_are_not_compared(trained, tmp_path):
    found = vivace.export(trained("wide")[1], to="aoti", out=tmp_path)
    assert found.kept, found.reason
    assert found.layers["checks"] == []
    assert "keeps no layer's output" in dict(answer(found).parts)["its layers"]
    assert "as AOTInductor runs it" in answer(found).sentence


def test_a_layer_that_no_output_shows():
    layers = [Check("first", 0.1).to_dict(), Check("second", 40.0).to_dict()]
    kept, reason = proving._answer([Check("output", 0.2)], layers, None)
    assert not kept
    assert reason.startswith("its layer 'second' differs")
    assert proving._answer([Check("output", 0.2)], layers[:1], None) == (True, "")
    _, reason = proving._answer([Check("output", 99.0)], layers[:1], None)
    assert reason.endswith("the layers up to 'first' do not")
