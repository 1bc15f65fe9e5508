"""What a step must do: floating-point operations, bytes and kernels by class of operator.

Nothing is timed. The count comes from the operators that reach the device, with their shapes, so it is the
same on meta and fake tensors, which need neither memory nor the card. Formulas are torch's own
(`torch.utils.flop_counter`: a multiply-add is two operations); recurrent layers and attention, which it
counts as zero on some devices, are counted here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vivace.profile.fusion import fused_bytes

# The first pattern that matches an operator's name names its class; what matches none is elementwise.
CLASSES = {
    "attention": r"attention",
    "recurrent": r"(^|_)(lstm|gru|rnn)(_|$)",
    "convolution": r"conv(?!ert)",
    "norm": r"(batch|layer|group|instance|rms)_norm",
    "matmul": r"(^|_)(mm|addmm|bmm|baddbmm|mv|addmv|dot|matmul)(_|$)|linear(?!_)|linear_backward",
    "memory": r"copy|clone|contiguous|(slice|select|diagonal|as_strided)_backward|(?<!masked)(^|_)(cat|stack"
    r"|zeros?|ones|full|fill|index|gather|scatter|roll|flip|pad|repeat|constant|arange|eye|tril|triu)(_|$)",
    "other": r"pool|embedding|sort|topk|upsample|interpolate|grid_sample|unique|nonzero|fft|cumsum|unfold"
    r"|im2col|col2im|linalg|cdist|random|bernoulli|uniform|normal_|multinomial|nms|roi",
}
_FREE = re.compile(r"^(new_)?empty|^detach|^alias$|^set_|^resize_|^is_|^_local_scalar|^item$|^_unsafe_view$")
_WRITES_ONLY = re.compile(r"^(copy|fill|zero|normal|uniform|bernoulli|random)_?$")
_READS_WHAT_IT_WRITES = re.compile(r"^(embedding|index_select|index|gather|_unsafe_index)$")
# Two passes over their input: the statistics first, then the values.
_PASSES = re.compile(r"(batch|group|instance)_norm")


@dataclasses.dataclass(frozen=True)
class Access:
    """One tensor that a kernel reads or writes: the value's number, its elements and their size in bytes."""

    value: int
    num_elements: int
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.num_elements * self.item_bytes


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One operator on the device: class, name, phase (forward, backward, update), operations, accesses.

    `passes` over the inputs; `groups` of a convolution and `width`, the channels that one of them reads.
    """

    operator: str
    name: str
    phase: str
    flops: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    passes: int = 1
    groups: int = 1
    width: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written, each pass over the inputs counted."""
        return self.passes * sum(a.bytes for a in self.reads) + sum(a.bytes for a in self.writes)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over a class; `bytes_fused` where neighbouring elementwise and norm kernels are one."""

    flops: int = 0
    bytes: int = 0
    bytes_fused: int = 0
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of what `count_work` ran: totals by operator class, every kernel, bytes saved for backward."""

    operators: dict[str, Totals]
    kernels: tuple[Kernel, ...]
    saved_bytes: int

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix operators; the others are bounded by their bytes."""
        return sum(totals.flops for totals in self.operators.values())

    @property
    def bytes(self) -> int:
        """Bytes that kernels read and write, one kernel an operator."""
        return sum(totals.bytes for totals in self.operators.values())

    @property
    def bytes_fused(self) -> int:
        """Bytes where elementwise and norm kernels that follow each other are fused."""
        return sum(totals.bytes_fused for totals in self.operators.values())

    @property
    def count(self) -> int:
        """Number of kernels."""
        return sum(totals.count for totals in self.operators.values())

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Totals by class, for JSON."""
        return {name: dataclasses.asdict(totals) for name, totals in self.operators.items()}


def count_work(function: Callable[[], Any]) -> Work:
    """Run `function` once, usually a whole training step, and count what its operators do.

    Raises whatever the function raises. On meta or fake tensors recurrent layers, scaled dot product
    attention and dropout count as the one kernel that a GPU runs; on real tensors as the kernels that ran.
    """
    with counting() as counter, counter.saving():
        function()
    return counter.work()


@contextlib.contextmanager
def counting(updating: Callable[[], bool] | None = None) -> Iterator[_Counter]:
    """Count what runs inside; ``work()`` of the result says what it was.

    `updating` says whether an optimizer is at work; left out, hooks of its own find out.
    """
    counter = _Counter(updating)
    fused = _FusedOnMeta(counter)
    phases = contextlib.nullcontext() if updating else counter.phases()
    with phases, fused.attention(), fused, counter:
        yield counter


def work_class(name: str) -> str:
    """The class of an operator by its bare name, such as ``matmul`` for ``addmm``."""
    short = name.rpartition("::")[2].partition(".")[0].removesuffix("_")
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, short)), "elementwise")


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, updating: Callable[[], bool] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self._is_updating = updating or (lambda: bool(self._updating))
        self.saved_bytes = 0
        self._updating = 0
        self._values: dict[int, int] = {}
        self._next_value = 0

    def work(self) -> Work:
        """What was counted until now."""
        kernels = tuple(self.kernels)
        return Work(_totals(kernels), kernels, self.saved_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_view(func):
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.rpartition("::")[2]
        outputs = list(_tensors(result)) or [a for a in args[:1] if isinstance(a, torch.Tensor)]
        if _FREE.match(name) or not outputs:
            return
        inputs = list(_tensors((args, kwargs)))
        if _WRITES_ONLY.match(name):
            inputs = inputs[1:]
        elif _READS_WHAT_IT_WRITES.match(name):
            inputs = [*outputs[:1], *inputs[1:]]
        formula = flop_registry.get(func._overloadpacket)
        kind = work_class(name)
        if name == "convolution_backward":
            flops = _convolution_backward(args)
        elif formula is not None:
            flops = int(formula(*args, **kwargs, out_val=result))
        else:
            flops = _own_formula(kind, name, inputs, outputs)
        self.add(kind, name, flops, inputs, outputs, 2 if _PASSES.search(name) else 1)
        if kind == "convolution":
            weight = args[2 if name == "convolution_backward" else 1]
            shape = {"groups": _groups(args), "width": int(weight.shape[1])}
            self.kernels[-1] = dataclasses.replace(self.kernels[-1], **shape)

    def add(
        self,
        kind: str,
        name: str,
        flops: int,
        inputs: Iterable[torch.Tensor],
        outputs: Iterable[torch.Tensor],
        passes: int = 1,
    ) -> None:
        """Note one kernel; reads take their values' numbers before the writes make new ones."""
        reads = tuple(self._access(tensor, written=False) for tensor in inputs)
        writes = tuple(self._access(tensor, written=True) for tensor in outputs)
        self.kernels.append(Kernel(kind, name, self.phase, flops, reads, writes, passes))

    @property
    def phase(self) -> str:
        """Where the step is: the optimizer's update, autograd's backward, or forward."""
        if self._is_updating():
            return "update"
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def _access(self, tensor: torch.Tensor, *, written: bool) -> Access:
        """A tensor's value number: new at each write, so that an address used again is another value."""
        key = tensor.untyped_storage()._cdata
        if written or key not in self._values:
            self._values[key] = self._next_value
            self._next_value += 1
        touched = math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0)
        return Access(self._values[key], touched, tensor.element_size())

    @contextlib.contextmanager
    def phases(self) -> Iterator[None]:
        """Notice optimizers at work."""

        def begin(*_: Any) -> None:
            self._updating += 1

        def end(*_: Any) -> None:
            self._updating -= 1

        hooks = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Sum the distinct storages that autograd keeps for the backward pass, parameters apart."""
        seen: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if not isinstance(tensor, torch.nn.Parameter) and storage._cdata not in seen:
                seen.add(storage._cdata)
                self.saved_bytes += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


class _FusedOnMeta(TorchFunctionMode):
    """Recurrent layers and attention as one kernel where there is no device to run (or refuse) one."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention" and _imagined(args[:3]):
            return _Fused.apply(self._counter, "attention", *args[:3])
        if func is functional.dropout and _imagined(args[:1]):
            return _dropout(*args, **kwargs)
        recurrent = name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        if recurrent and isinstance(args[2], (list, tuple)) and _imagined(args[:1]):
            return self._recurrent(name, *args)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Catch attention inside of functions that a mode sees only whole, such as multi-head attention."""
        original = functional.scaled_dot_product_attention

        def attend(*args: Any, **kwargs: Any) -> Any:
            if len(args) >= 3 and _imagined(args[:3]):
                return _Fused.apply(self._counter, "attention", *args[:3])
            return original(*args, **kwargs)

        functional.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = original

    def _recurrent(self, name: str, inputs: Any, states: Any, weights: Any, *settings: Any) -> Any:
        """The padded form of torch._VF.lstm and its kin: settings are bias, layers, dropout, training,
        bidirectional, batch_first."""
        states = tuple(states) if isinstance(states, (list, tuple)) else (states,)
        output = _Fused.apply(self._counter, name, inputs, settings[4], settings[5], *states, *weights)
        last = tuple(state + output.sum() * 0 for state in states)
        return (output, *last)


class _Fused(torch.autograd.Function):
    """One kernel forward and one backward, of which only the shapes exist."""

    @staticmethod
    def forward(ctx: Any, counter: _Counter, name: str, first: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Count the kernel and make its output; see `_FusedOnMeta` for the arguments."""
        others = [other for other in rest if isinstance(other, torch.Tensor)]
        if name == "attention":
            key, value = others[0], others[1]
            output = first.new_empty(*first.shape[:-1], value.shape[-1])
            flops = 2 * first.shape[:-1].numel() * key.shape[-2] * (first.shape[-1] + value.shape[-1])
        else:
            flops = 2 * first.shape[:-1].numel() * sum(w.numel() for w in others if w.dim() == 2)
            width = others[0].shape[-1] * (2 if rest[0] else 1)
            output = first.new_empty(*first.shape[:-1], width)
        kind = name if name == "attention" else "recurrent"
        counter.add(kind, name, flops, [first, *others], [output])
        ctx.counter, ctx.kind, ctx.name, ctx.flops = counter, kind, name, flops
        ctx.save_for_backward(first, *others, output)
        ctx.places = [isinstance(other, torch.Tensor) for other in rest]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Twice the forward's operations; attention two and a half times, as it computes the scores anew."""
        *inputs, output = ctx.saved_tensors
        results = [torch.empty_like(tensor) for tensor in inputs]
        flops = int(ctx.flops * (2.5 if ctx.kind == "attention" else 2))
        ctx.counter.add(ctx.kind, f"{ctx.name}_backward", flops, [*inputs, output, *gradients], results)
        rest = iter(results[1:])
        return (None, None, results[0], *(next(rest) if place else None for place in ctx.places))


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Dropout as the one kernel that a GPU runs."""
    return torch.native_dropout(tensor, p, True)[0] if training and p > 0 else tensor


def _imagined(tensors: Iterable[Any]) -> bool:
    """Has a tensor a shape only: on the meta device, or fake?"""
    return any(isinstance(t, torch.Tensor) and (t.is_meta or hasattr(t, "fake_mode")) for t in tensors)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _is_view(func: Any) -> bool:
    """Does an operator return an alias of an argument that it does not write?"""
    arguments = func._schema.arguments
    if any(a.alias_info is not None and a.alias_info.is_write for a in arguments):
        return False
    return any(a.alias_info is not None for a in arguments)


def _convolution_backward(args: Any) -> int:
    """Each gradient as many operations as forward; torch's formula takes groups for one in the weight's."""
    output, inputs, weight = args[:3]
    transposed, mask = args[7], args[10]
    return int(2 * (inputs if transposed else output).numel() * weight[0].numel() * sum(mask[:2]))


def _groups(args: Any) -> int:
    """The last whole number among a convolution's arguments."""
    return next((int(a) for a in reversed(args) if isinstance(a, int) and not isinstance(a, bool)), 1)


def _own_formula(kind: str, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Operations of the kernels that torch has no formula for; zero for everything bounded by its bytes."""
    backward = "backward" in name
    if kind == "recurrent" and inputs:
        sequence = max((t for t in inputs if t.dim() == 3), key=torch.Tensor.numel, default=inputs[0])
        steps = sequence.shape[:-1].numel()
        weights = sum(t.numel() for t in inputs if t.dim() == 2)
        return (4 if backward else 2) * steps * weights
    if kind == "attention" and len(inputs) >= 3:
        query, key, value = inputs[1:4] if backward else inputs[:3]
        if query.dim() < 3 or key.dim() < 3:
            return 0
        forward = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return int(forward * (2.5 if backward else 1))
    if kind == "matmul" and len(inputs) >= 2:  # matrix times vector, and the CPU's own linear kernels
        weight = max(inputs, key=torch.Tensor.numel)
        rows = outputs[0].numel() // weight.shape[0] if weight.dim() == 2 and weight.shape[0] else 1
        return 2 * weight.numel() * max(rows, 1) * (2 if backward else 1)
    return 0


def _totals(kernels: tuple[Kernel, ...]) -> dict[str, Totals]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for kernel, fused in zip(kernels, fused_bytes(kernels), strict=True):
        row = sums[kernel.operator]
        for place, value in enumerate((kernel.flops, kernel.bytes, fused, 1)):
            row[place] += value
    return {name: Totals(*sums[name]) for name in (*CLASSES, "elementwise") if name in sums}
