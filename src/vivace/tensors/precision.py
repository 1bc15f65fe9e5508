"""How modules and backends round: sums in fp32, and products in fp32 or TF32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import MethodType
from typing import Any, Protocol

import numpy
import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function_unary,
    has_torch_function_variadic,
)

from vivace.tensors.modules import modules_of, placed
from vivace.tensors.settings import hold
from vivace.tensors.trees import cast

HALF = (torch.float16, torch.bfloat16)
SHORT = 16_384  # numbers of a head's keys: up to so many a processor's attention is faster in float32
# Who has something faster for attention in bfloat16: they say so of queries, keys, values and a mask.
FASTER: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], bool]] = []


class Workbench(Protocol):
    """What is set here until it closes; `vivace.technique.Build` is one."""

    device: torch.device
    models: list[nn.Module]

    def on_close(self, callback: Callable[[], None], /) -> None:
        """Call it when the session closes."""


@functools.cache
def autocasts_lstm() -> bool:
    """Can an LSTM be trained under autocast to bfloat16 on this processor? oneDNN's wants AVX-512."""
    layer = nn.LSTM(1, 1, device="meta").to_empty(device="cpu")  # draws no random numbers
    try:
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            layer(torch.zeros(1, 1, 1))[0].sum().backward()
    except RuntimeError:
        return False
    return True


def sum_in_float32(build: Workbench, *, under_autocast: bool = False) -> None:
    """Let sums of half-precision numbers be rounded when they are complete, until the build closes.

    On a CPU every LayerNorm computes in fp32, and so does `layer_norm`, between inputs and outputs as they
    were: torch's kernel adds up the gradients of weight and bias in the type of the inputs. A sum of
    thousands of rows stops growing in sixteen bits: over 8,192 of them nine tenths of a bias's gradient were
    lost.

    Everywhere a linear layer gets its inputs contiguous: ``at::linear`` multiplies others without the bias,
    such as the batch-first output of an LSTM, and adds it to what is rounded already. Where its weight has
    sixteen bits so have its inputs: the model may have made them in fp32 as it ran, as ``counts.float()``.

    A `log_softmax` in the model gives fp32: near log(number of classes) sixteen bits step by half a percent,
    so that before training all losses are off in the same direction.

    On a CPU attention over short sequences computes in fp32, too: torch's kernel is faster then, unless many
    heads are computed at once.

    With `under_autocast` these three functions do so only where autocast is on: what a script calls between
    its steps is torch's own.
    """

    summing = {nn.Linear: _of_contiguous} | (ON_CPUS if build.device.type == "cpu" else {})
    undo = contextlib.ExitStack()
    for kind, method in summing.items():
        found = [m for model in build.models for m in modules_of(model, kind)]
        # In its place may stand what another session has put there, and takes away earlier.
        found = [m for m in found if vars(m).get("forward") in (None, MethodType(method, m))]
        undo.callback(placed(found, "forward", [MethodType(method, module) for module in found]))
        states = [partial(_own_state, module) for module in found]
        undo.callback(placed(found, "__getstate__", states))  # of copies and pickles
    build.on_close(undo.close)
    within = build.device.type if under_autocast else ""
    replaced: dict[str, Callable[..., Any]] = {"log_softmax": _log_softmax(within)}
    if nn.LayerNorm in summing:  # on a CPU, and not as on a GPU
        replaced |= {"layer_norm": _layer_norm(within), "scaled_dot_product_attention": _attention(within)}
    for name, function in replaced.items():
        own, write = partial(getattr, nn.functional, name), partial(setattr, nn.functional, name)
        build.on_close(hold(name, own, write, function))


def _own_state(module: nn.Module) -> Any:
    """What there is of a module without what it has here for a while."""
    state: Any = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    here = ("forward", "__getstate__")
    return {k: v for k, v in state.items() if k not in here} if isinstance(state, dict) else state


_torch_log_softmax = nn.functional.log_softmax
_torch_layer_norm = nn.functional.layer_norm
_torch_attention: Callable[..., Any] = nn.functional.scaled_dot_product_attention


def _acts(within: str) -> bool:
    return not within or torch.is_autocast_enabled(within)


@functools.cache  # compiled code is for one function, which plans that take turns put in place anew
def _log_softmax(within: str) -> Callable[..., Any]:
    """Within autocast on a kind of device, or everywhere."""

    @functools.wraps(_torch_log_softmax)
    def log_softmax(input: torch.Tensor, *others: Any, **named: Any) -> Any:
        if has_torch_function_unary(input):  # a tracer notes this function, and not what it does
            return handle_torch_function(log_softmax, (input,), input, *others, **named)
        half = input.dtype in HALF and _acts(within)
        return _torch_log_softmax(input.float() if half else input, *others, **named)

    return log_softmax


@functools.cache
def _layer_norm(within: str) -> Callable[..., Any]:
    @functools.wraps(_torch_layer_norm)
    def layer_norm(
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        tensors, others = (input, weight, bias), (normalized_shape, weight, bias, eps)
        if has_torch_function_variadic(*tensors):
            return handle_torch_function(layer_norm, tensors, input, *others)
        if input.dtype not in HALF or not _acts(within):
            return _torch_layer_norm(input, *others)
        weight, bias = (None if one is None else one.float() for one in (weight, bias))
        return _torch_layer_norm(input.float(), normalized_shape, weight, bias, eps).to(input.dtype)

    return layer_norm


@functools.cache
def _attention(within: str) -> Callable[..., Any]:
    @functools.wraps(_torch_attention)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *others: Any,
        **named: Any,
    ) -> Any:
        tensors = (query, key, value)
        if has_torch_function_variadic(*tensors):
            return handle_torch_function(attention, tensors, *tensors, attn_mask, dropout_p, *others, **named)
        kind = query.dtype
        if kind == torch.float32 and torch.is_autocast_enabled("cpu"):
            kind = torch.get_autocast_dtype("cpu")
        short = query.device.type == "cpu" and not key.is_nested and key.shape[-2] * key.shape[-1] <= SHORT
        if kind == torch.bfloat16 and any(takes(*tensors, attn_mask) for takes in FASTER):
            short = False
        # With dropout torch has another kernel.
        if kind not in HALF or not short or dropout_p or not _acts(within):
            return _torch_attention(*tensors, attn_mask, dropout_p, *others, **named)
        mask = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        with torch.autocast("cpu", enabled=False):
            found = _torch_attention(*(one.float() for one in tensors), mask, dropout_p, *others, **named)
        return found.to(kind)

    return attention


def _of_float32(self: nn.Module, *inputs: Any, **named: Any) -> Any:
    """A subclass may call its input by another name, take more than that, and return more than one tensor."""
    first, *others = inputs or [next((x for x in named.values() if isinstance(x, torch.Tensor)), None)]
    if not isinstance(first, torch.Tensor) or first.dtype not in HALF:  # float64 stays as it is
        return type(self).forward(self, *inputs, **named)
    if inputs:
        found = type(self).forward(self, first.float(), *others, **named)
    else:
        found = type(self).forward(self, **{k: x.float() if x is first else x for k, x in named.items()})
    return cast(found, torch.float32, first.dtype)


def _of_contiguous(self: nn.Module, *inputs: object, **named: object) -> torch.Tensor:
    """A subclass may call its input by another name."""
    weight = getattr(self, "weight", None)
    half = weight.dtype if isinstance(weight, torch.Tensor) and weight.dtype in HALF else None

    def fitting(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        return x.contiguous() if half is None or x.dtype != torch.float32 else x.to(half).contiguous()

    first, others = map(fitting, inputs), {key: fitting(x) for key, x in named.items()}
    result: torch.Tensor = type(self).forward(self, *first, **others)
    return result


_of_float32.__name__ = _of_contiguous.__name__ = "forward"  # which a model may read
ON_CPUS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {nn.LayerNorm: _of_float32}


class RowsInFloat32(TorchFunctionMode):
    """Inside, rows of sixteen bits are looked up in fp32, in which their gradients add up, and are rounded.

    In sixteen bits the sum of a row stops growing: of 8,192 tokens of two kinds nine tenths of a table's
    gradient were lost.

    `wide` holds, by the `id` of a table of sixteen bits, what it was rounded from and is read in its place.
    `found` says whether anything was looked up, unless by compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide: dict[int, torch.Tensor] = {}
        self.found = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What torch calls in the place of each function while the mode is entered."""
        keywords = kwargs or {}
        if func not in _TABLES:
            return func(*args, **keywords)
        place = _TABLES[func]
        if func is nn.functional.embedding and "weight" in keywords:  # named, as its indices may be
            keywords = {**keywords}
            args = (keywords.pop("input") if "input" in keywords else args[0], keywords.pop("weight"))
        table = args[place] if place < len(args) else None
        if not isinstance(table, torch.Tensor) or table.dtype not in HALF or not table.requires_grad:
            return func(*args, **keywords)
        if func is torch.Tensor.__getitem__ and not _names_rows(args[1]):
            return func(*args, **keywords)
        if not torch.compiler.is_compiling():  # which would compile anew where it is another
            self.found = True
        rows = self.wide.get(id(table)) if self.wide else None
        rows = table.float() if rows is None else rows
        return func(*args[:place], rows, *args[place + 1 :], **keywords).to(table.dtype)


_TABLES: dict[Callable[..., Any], int] = {  # which argument the rows are
    torch.Tensor.__getitem__: 0,
    torch.Tensor.gather: 0,
    torch.gather: 0,
    nn.functional.embedding: 1,
}


def _names_rows(index: Any) -> bool:
    """Has an index numbers of rows in it, which may come several times, and not a slice or a mask alone?"""
    parts = index if isinstance(index, tuple) else (index,)
    numbers = (part for part in parts if isinstance(part, torch.Tensor) and part.dtype not in _MASKS)
    return any(isinstance(part, (list, numpy.ndarray)) for part in parts) or any(True for _ in numbers)


_MASKS = (torch.bool, torch.uint8)


def without_tf32(device: torch.device) -> str:
    """Why a GPU has no TF32, empty where it has. ROCm counts its capabilities otherwise than CUDA."""
    if torch.version.hip is not None:
        return "TF32 is NVIDIA's: most AMD GPUs do not have it"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU is older than Ampere: no TF32"
    return ""


def set_fp32_precision(build: Workbench, owners: Sequence[Any], precision: str) -> None:
    """Set how `owners` (such as ``torch.backends.cudnn.conv``) round fp32 inputs, until `build` closes.

    torch's older switches ``allow_tf32`` follow: where they say something else, reading them raises, which
    ``torch.backends.cudnn.flags`` and parts of ``torch.compile`` do.
    """
    backends: Any = torch.backends
    older = (backends.cuda.matmul, backends.cudnn)
    allowed: list[bool] = []
    with contextlib.suppress(RuntimeError):  # the person mixed both kinds, and cannot read the older one
        allowed = [owner.allow_tf32 for owner in older]

    def keep(owner: Any, name: str, before: object, value: object) -> None:
        build.on_close(hold((id(owner), name), lambda: before, partial(setattr, owner, name), value))

    for owner, before in [(owner, owner.fp32_precision) for owner in owners]:
        keep(owner, "fp32_precision", before, precision)
    for owner, switch in zip(older, allowed, strict=False):
        keep(owner, "allow_tf32", switch, precision == "tf32")
    for owner in owners:  # which the older switches have set, too; on close those are written first
        owner.fp32_precision = precision
