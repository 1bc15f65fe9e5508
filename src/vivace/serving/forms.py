"""The forms that a trained model can be served in: runtime, number format, what it takes, in words."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util

EXTRA = "pip install 'vivace[compress]'"
REFERENCE = "eager_fp32"
COMPILED, TRAINED_PLAN = "compiled_default", "trained_plan"  # compared with, and never deployed
PRUNED, RETRAINED = "pruned_", "retrained_"
FURTHER = {PRUNED: "fewer channels", RETRAINED: "trained further with int8's rounding"}  # by prefix
SUFFIXES = {"onnx": "onnx", "openvino": "xml", "aoti": "pt2", "torch": "pt2"}


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to serve a model.

    Args:
        runtime: ``torch``, ``inductor`` (torch.compile), ``onnx``, ``openvino`` or ``aoti``.
        numbers: ``fp32``, ``bf16`` or ``int8``: what products and convolutions compute in.
        needs: packages that it is made or run with, beside torch.
        weights_only: are weights alone stored in these numbers, and products computed in fp32?
        folded: is each BatchNorm folded into the convolution before it? torch's compilers do that unasked.
        further: the name's prefix where the model was trained further, so that the metric alone decides.
    """

    name: str
    runtime: str
    numbers: str
    does: str
    needs: tuple[str, ...] = ()
    weights_only: bool = False
    folded: bool = False
    further: str = ""

    @property
    def kind(self) -> str:
        """The name of the same form of the run's own model."""
        return self.name.removeprefix(self.further)

    @property
    def in_process(self) -> bool:
        """Does it run in torch, from the person's own model? The others run from a file alone."""
        return self.runtime in ("torch", "inductor")

    @property
    def opener(self) -> str:
        """The runtime that opens its file."""
        return "torch" if self.in_process else self.runtime

    @property
    def exact(self) -> bool:
        """Does it compute in the reference's numbers, so that rounding alone may part them?"""
        return self.numbers == "fp32" and not self.further

    @property
    def file(self) -> str:
        """What its file is called."""
        return f"{self.name}.{SUFFIXES.get(self.runtime, 'pt2')}"

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        needs = (*self.needs, "torch_pruning") if self.further == PRUNED else self.needs
        return [name for name in needs if not _is_installed(name)]


def versions_of(form: Form) -> dict[str, str]:
    """Of the packages that it is made or run with, beside torch."""
    found = {}
    for name in form.needs:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


ONNX = ("onnx", "onnxscript", "onnxruntime")
TORCHAO = ("torchao",)
OPENVINO = ("onnx", "onnxscript", "openvino")

# In the order in which they are tried: first the same numbers on another runtime.
FORMS = (
    Form("eager_fp32", "torch", "fp32", "your model as it is, in PyTorch"),
    Form("openvino_fp32", "openvino", "fp32", "the same numbers in OpenVINO", OPENVINO),
    Form("onnx_fp32", "onnx", "fp32", "the same numbers in ONNX Runtime", ONNX),
    Form("folded_fp32", "torch", "fp32", "PyTorch, BatchNorm folded into convolutions", folded=True),
    Form("compiled_fp32", "inductor", "fp32", "the same numbers through torch.compile, weights frozen"),
    Form("aoti_fp32", "aoti", "fp32", "the same numbers, compiled ahead of time (AOTInductor)"),
    Form("openvino_bf16", "openvino", "bf16", "OpenVINO, computing in bfloat16", OPENVINO),
    Form("eager_bf16", "torch", "bf16", "weights and activations in bfloat16, images channels last"),
    Form("folded_bf16", "torch", "bf16", "the same, with BatchNorm folded into convolutions", folded=True),
    Form("compiled_bf16", "inductor", "bf16", "bfloat16 through torch.compile, weights frozen"),
    Form("aoti_bf16", "aoti", "bf16", "bfloat16, compiled ahead of time (AOTInductor)"),
    Form("openvino_int8", "openvino", "int8", "int8 by NNCF in OpenVINO", (*OPENVINO, "nncf")),
    Form("onnx_int8", "onnx", "int8", "int8 in ONNX Runtime, ranges from your samples", ONNX),
    Form("compiled_int8", "inductor", "int8", "int8 in PyTorch's graph (PT2E), compiled", TORCHAO),
    Form("torchao_int8", "inductor", "int8", "linear layers in int8, ranges in each call, compiled", TORCHAO),
    Form(
        "torchao_int8_weights",
        "inductor",
        "int8",
        "weights of linear layers in int8, compiled",
        TORCHAO,
        True,
    ),
)
BESIDE = (
    Form(COMPILED, "inductor", "fp32", "torch.compile as it comes"),
    Form(TRAINED_PLAN, "torch", "fp32", "PyTorch under the plan of its training"),
)
BY_NAME = {form.name: form for form in (*FORMS, *BESIDE)}


def form_named(name: str) -> Form:
    """A form by its name, one of a model that was trained further too. Raises KeyError."""
    for further, does in FURTHER.items():
        if name.startswith(further):
            form = BY_NAME[name.removeprefix(further)]
            return dataclasses.replace(form, name=name, does=f"{does}: {form.does}", further=further)
    return BY_NAME[name]
