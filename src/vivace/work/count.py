"""What a step must do: floating-point operations, bytes and kernels by class of operator.

Nothing is timed. The count comes from the operators that reach the device, with their shapes, so it is the
same on meta and fake tensors, which need neither memory nor the card. Formulas are torch's own
(`torch.utils.flop_counter`: a multiply-add is two operations) where it has right ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from vivace.operators import CLASSES, class_of
from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import (
    Operator,
    OperatorMode,
    dense_parts,
    in_backward,
    schema_of,
    storage_id,
)
from vivace.work.as_one import AsOneKernel
from vivace.work.formulas import complete, convolution_shape, named, operations
from vivace.work.fusion import fused_bytes
from vivace.work.kept import Kept
from vivace.work.kernel import Access, Kernel

Asked = ParamSpec("Asked")
Told = TypeVar("Told")

# Memory without values in it, who uses it, and one value read back.
_FREE = re.compile(r"^(new_)?empty|^(set|resize)_|^_local_scalar|^record_stream")
_WRITES_ONLY = re.compile(r"^(_foreach_)?(copy|fill|zero|normal|uniform|bernoulli|random)_?$")
_READS_WHAT_IT_WRITES = re.compile(r"^(embedding|index_select|index|gather|_unsafe_index)$")
_LOOKS_UP = re.compile(r"^_embedding_bag(_forward_only|_per_sample_weights_backward)?$")
# Two passes over their input: the statistics first, then the values; one where an operator does one of them.
_PASSES = re.compile(r"(batch|group|instance)_norm(?!_moments|_apply)")


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over a class; `bytes_fused` where neighbouring elementwise and norm kernels are one."""

    flops: int = 0
    bytes: int = 0
    bytes_fused: int = 0
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of what `count_work` ran: totals by operator class, every kernel, and the most bytes that were
    kept for backward passes at one time.
    """

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
        """How many kernels run, where each operator is one."""
        return sum(totals.count for totals in self.operators.values())

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Totals by class, for JSON."""
        return {name: dataclasses.asdict(totals) for name, totals in self.operators.items()}


def count_work(function: Callable[[], Any]) -> Work:
    """Run `function` once, usually a whole training step, and count what its operators do.

    Raises whatever the function raises. On meta or fake tensors recurrent layers, scaled dot product
    attention and dropout count as the one kernel that a GPU runs; on real tensors as the kernels that ran.
    """
    counter = KernelCounter()
    fused = AsOneKernel(counter.add)
    with counter.phases(), fused.attention(), fused, counter, counter.kept.watched():
        function()
    return counter.work()


class KernelCounter(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes each kernel that runs while it is entered; ``work()`` says what it was.

    `updating` says whether an optimizer is at work; left out, `phases` has to find out.
    """

    def __init__(self, updating: Callable[[], bool] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self._is_updating = updating or (lambda: bool(self._updating))
        self.kept = Kept()
        self._updating = 0
        self._in_closure = False
        self._values: dict[int, int] = {}
        self._next_value = 0

    def work(self) -> Work:
        """The kernels counted so far."""
        kernels = tuple(self.kernels)
        return Work(_totals(kernels), kernels, self.kept.most_bytes)

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, then note its kernel."""
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result)
        return result

    def note(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Note the kernel of an operator that ran."""
        if _moves_nothing(func, (args, kwargs), result):
            return
        name = schema_of(func).name.rpartition("::")[2]
        outputs = _dense(result) or _dense(_written(schema_of(func), args, kwargs)) or _dense(args[:1])
        if _FREE.match(name) or not outputs:
            return
        inputs = _dense((args, kwargs))
        if _WRITES_ONLY.match(name):
            inputs = inputs[len(outputs) :]
        elif _READS_WHAT_IT_WRITES.match(name):
            inputs = [*outputs[:1], *inputs[1:]]
        kind = class_of(name)
        args, kwargs = complete(schema_of(func), args, kwargs)
        flops = operations(func, kind, args, kwargs, result)
        given = named(schema_of(func), args)
        known = given.get("training") is False or name.endswith("no_training")  # statistics of evaluation
        self.add(kind, name, flops, inputs, outputs, 2 if _PASSES.search(name) and not known else 1)
        if kind == "convolution":
            shape = convolution_shape(name, given)
            self.kernels[-1] = dataclasses.replace(self.kernels[-1], **shape)
        if _LOOKS_UP.match(name):  # of the table the rows that are looked up
            rows = {given["weight"].shape: given["indices"].numel() * given["weight"].shape[1]}
            reads = _at_most(self.kernels[-1].reads, inputs, rows)
            self.kernels[-1] = dataclasses.replace(self.kernels[-1], reads=reads)
        sparse = {t.shape: t for t in tensors((args, kwargs)) if t.layout == torch.sparse_coo}
        if sparse:  # of a whole table beside it, the rows that it has
            numbers = {shape: dense_parts(one)[1].numel() for shape, one in sparse.items()}
            reads = _at_most(self.kernels[-1].reads, inputs, numbers)
            writes = _at_most(self.kernels[-1].writes, outputs, numbers)
            self.kernels[-1] = dataclasses.replace(self.kernels[-1], reads=reads, writes=writes)

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
        if self._is_updating() and not self._in_closure:
            return "update"
        return "backward" if in_backward() else "forward"

    def _access(self, tensor: torch.Tensor, *, written: bool) -> Access:
        """A tensor's value number: new at each write, so that an address used again is another value."""
        key = storage_id(tensor.untyped_storage())
        if written or key not in self._values:
            self._values[key] = self._next_value
            self._next_value += 1
        touched = math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0)
        parts = 2 if tensor.is_complex() else 1
        return Access(self._values[key], touched, tensor.element_size(), parts)

    @contextlib.contextmanager
    def phases(self) -> Iterator[None]:
        """Mark what runs inside of an optimizer's step as the update phase, less its closure (`closures`)."""

        def begin(*_: object) -> None:
            self._updating += 1

        def end(*_: object) -> None:
            self._updating -= 1

        hooks = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
        try:
            with self.closures():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def closures(self) -> Iterator[None]:
        """Mark what an optimizer's step calls as its closure as no update: a forward and a backward pass."""

        def begin(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kept = {name: self._apart(v) if name == "closure" else v for name, v in kwargs.items()}
            return (*args[:1], *map(self._apart, args[1:2]), *args[2:]), kept

        hook = register_optimizer_step_pre_hook(begin)
        try:
            yield
        finally:
            hook.remove()

    def _apart(self, given: Callable[Asked, Told]) -> Callable[Asked, Told]:
        """What an optimizer's step is given first: a closure, of which no work is the update's, or None."""
        if not callable(given):
            return given

        @functools.wraps(given)
        def closure(*args: Asked.args, **kwargs: Asked.kwargs) -> Told:
            before, self._in_closure = self._in_closure, True
            try:
                return given(*args, **kwargs)
            finally:
                self._in_closure = before

        return closure


def _moves_nothing(func: Operator, given: object, result: object) -> bool:
    """Does an operator only describe its tensors (an attribute: device, size), or return views of them?"""
    schema = schema_of(func)
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    results = _dense(result)
    if not results:
        return torch.Tag.data_dependent_output not in func.tags
    storages = {storage_id(tensor.untyped_storage()) for tensor in _dense(given)}
    return all(storage_id(tensor.untyped_storage()) in storages for tensor in results)


def _written(schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What an operator writes of its arguments, as those on many tensors do that return nothing; a fused
    optimizer writes gradients only where it unscales them.
    """
    given = named(schema, args) | kwargs
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    kept = {"grads"} if given.get("grad_scale") is None else set()
    return [value for name, value in given.items() if name in written - kept]


def _dense(value: object) -> list[torch.Tensor]:
    """The tensors in `value`; in the place of a sparse one its numbers, then its places."""
    return [part for tensor in tensors(value) for part in reversed(dense_parts(tensor))]


def _at_most(
    accesses: Iterable[Access], tensors: Iterable[torch.Tensor], numbers: Mapping[torch.Size, int]
) -> tuple[Access, ...]:
    """The accesses, with at most so many numbers of each tensor of such a shape."""
    return tuple(
        dataclasses.replace(
            access, num_elements=min(access.num_elements, numbers.get(tensor.shape, access.num_elements))
        )
        for access, tensor in zip(accesses, tensors, strict=True)
    )


def _totals(kernels: tuple[Kernel, ...]) -> dict[str, Totals]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for kernel, fused in zip(kernels, fused_bytes(kernels), strict=True):
        row = sums[kernel.operator]
        for place, value in enumerate((kernel.flops, kernel.bytes, fused, 1)):
            row[place] += value
    return {name: Totals(*sums[name]) for name in CLASSES if name in sums}
