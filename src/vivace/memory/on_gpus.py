"""Operators in the form that a GPU runs, where a step for one is followed on the operators of a CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vivace.job import Job, load
from vivace.tensors import precision
from vivace.tensors.precision import ON_CPUS
from vivace.tensors.trees import map_tensors
from vivace.torch_internals.modules import cast_for, is_acting, let_act
from vivace.torch_internals.tensors import Operator, kernels_for, schema_of, scoped_library

_attend_here = functional.scaled_dot_product_attention
_drop_here = functional.dropout


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Inside, attention with dropout keeps no scores, dropout a byte for each number, RMSNorm little else,
    and an LSTM can be under autocast.

    Autocast computes in float32 what it does on a GPU, and LayerNorm nothing for the sake of a CPU's sums.
    Functions are replaced in `torch.nn.functional`, of whose own a mode sees no inside, and where they are
    called by another name.
    """
    own: tuple[Any, Any, Any] = (_attend, _drop, lambda: True)
    before: tuple[Any, Any, Any] = (
        functional.scaled_dot_product_attention,
        functional.dropout,
        precision.autocasts_lstm,
    )
    functional.scaled_dot_product_attention, functional.dropout, precision.autocasts_lstm = own
    on_cpus = dict(ON_CPUS)
    ON_CPUS.clear()
    try:
        library: Any
        with autocast_here(), _OnGpus(), scoped_library("aten", "IMPL") as library:
            for name, operator in _float32_on_gpus():
                library.impl(name, partial(_in_float32, operator), "AutocastCPU")
            library.impl("rms_norm", _rms_norm, "AutogradCPU")
            yield
    finally:
        ON_CPUS.update(on_cpus)
        functional.scaled_dot_product_attention, functional.dropout, precision.autocasts_lstm = before


@contextlib.contextmanager
def autocast_here(halves: torch.dtype | None = None) -> Iterator[None]:
    """Inside, autocast regions for GPUs act on a CPU's tensors, which stand for a GPU's, in the type that
    they ask for, or in `halves`. Where there is no GPU torch switches them off as they are made: those that
    were made outside stay so.
    """
    own: Any = torch.autocast
    made, entered, left = own.__init__, own.__enter__, own.__exit__
    beside: list[torch.autocast] = []  # those for the CPU, by those that are entered

    @functools.wraps(made)
    def make(
        region: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        made(region, device_type, dtype, enabled and device_type != "cuda", cache_enabled)
        if device_type == "cuda":
            let_act(region, enabled)

    def enter(region: torch.autocast) -> Any:
        if region.device == "cuda":
            acts = is_acting(region) and region.fast_dtype in _HALVES
            beside.append(torch.autocast("cpu", (halves or region.fast_dtype) if acts else None, acts))
            entered(beside[-1])
        return entered(region)

    def leave(region: torch.autocast, *error: Any) -> Any:
        result = left(region, *error)
        if region.device == "cuda":
            left(beside.pop(), *error)
        return result

    own.__init__, own.__enter__, own.__exit__ = make, enter, leave
    try:
        with cast_for("cuda", "cpu"):
            yield
    finally:
        own.__init__, own.__enter__, own.__exit__ = made, entered, left


def load_as_on_gpus(reference: str, halves: torch.dtype | None = None) -> Job:
    """Load a job as `vivace.job.load` does; its file may make autocast regions for GPUs (`autocast_here`)."""
    with autocast_here(halves):
        return load(reference)


class _OnGpus(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _OWN.get(func, func)(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor:
    """Without dropout, for which a GPU's fused kernels keep a seed and a CPU has none.

    The kernel for float32 puts heads beside each other, whatever the order of its inputs is in memory.
    """
    attended: torch.Tensor = _attend_here(query, key, value, attn_mask, 0.0, is_causal, **more)
    by_head = query.dtype == torch.float32 and query.dim() == 4
    return attended.transpose(1, 2).contiguous().transpose(1, 2) if by_head else attended


def _drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """A GPU's own form, which is chosen by the device inside of torch."""
    if inplace or not training or not 0.0 < p < 1.0:
        return _drop_here(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


# For these, too, autocast has kernels on GPUs and not on CPUs, though not to compute in float32
# (aten/src/ATen/autocast_mode.h): products, and what takes the widest type of its inputs.
_OTHERS = (
    *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"),
    *("addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv"),
    *("_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
    *("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell", "addcdiv", "addcmul", "atan2", "bilinear"),
    *("cross", "dot", "index_put", "scatter_add", "tensordot", "vdot"),
)
_HALVES = (torch.float16, torch.bfloat16)


def _float32_on_gpus() -> Iterator[tuple[str, Operator]]:
    """The operators that autocast computes in float32 on GPUs, and leaves alone on CPUs."""
    others = {*kernels_for("AutocastCPU"), *(f"aten::{name}" for name in _OTHERS)}
    for full in kernels_for("AutocastCUDA"):
        namespace, _, name = full.partition("::")
        if namespace == "aten" and full not in others:
            packet, _, overload = name.partition(".")
            yield name, getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_float32(operator: Operator, *arguments: Any, **keywords: Any) -> Any:
    """Ask for a result in float32 where one can, as a GPU's autocast does; else widen the inputs."""
    names = [argument.name for argument in schema_of(operator).arguments]
    given = dict(zip(names, arguments, strict=False)) | keywords
    if "dtype" not in names:
        arguments, keywords = map_tensors((arguments, keywords), _widened)
    elif arguments[0].dtype in _HALVES and given.get("dtype") is None:
        if operator in (torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int):
            multiplies = operator is torch.ops.aten.softmax.int
            return _SoftmaxOfHalves.apply(arguments[0], multiplies)  # type: ignore[no-untyped-call]
        keywords["dtype"] = torch.float32
    with torch.autocast("cpu", enabled=False):
        return operator(*arguments, **keywords)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _rms_norm(
    input: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Of one type a GPU has a kernel; where input and weight differ it is written out, as here."""
    if weight is not None and weight.dtype == input.dtype:
        result: torch.Tensor = _RmsNorm.apply(input, weight, len(shape))  # type: ignore[no-untyped-call]
        return result
    wide = _widened(input)
    normed = wide * (wide.pow(2).mean(tuple(range(-len(shape), 0)), True) + (eps or 1e-6)).rsqrt()
    return (normed if weight is None else normed * weight).type_as(input)


class _RmsNorm(torch.autograd.Function):
    """A GPU's kernel, which keeps its input and a number for each row. On fake tensors."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, num_dims: int) -> torch.Tensor:
        """Keep the input, the weight and a number for each row."""
        rows = input.shape[: input.dim() - num_dims]
        ctx.save_for_backward(input, weight, torch.empty(rows, dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """The gradients of input and weight."""
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), torch.empty_like(weight), None


class _SoftmaxOfHalves(torch.autograd.Function):
    """A GPU's kernel takes sixteen bits and gives float32, of which a CPU's needs a copy. On fake tensors."""

    @staticmethod
    def forward(ctx: Any, halves: torch.Tensor, multiplies: bool) -> torch.Tensor:
        """Keep the result, by which the gradient is multiplied first where the logarithm is not taken."""
        result = torch.empty_like(halves, dtype=torch.float32)
        ctx.save_for_backward(result)
        ctx.dtype, ctx.multiplies = halves.dtype, multiplies
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of the input, in its type."""
        found = torch.empty_like(gradient, dtype=ctx.dtype)
        if ctx.multiplies:
            torch.empty_like(gradient)
        return found, None


_OWN: dict[Callable[..., Any], Callable[..., Any]] = {_attend_here: _attend, torch.dropout: _drop}
