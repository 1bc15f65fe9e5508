"""Private names of tensors, storages, operators, dispatch modes, autograd and the profiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from vivace.torch_internals import attribute, named

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    Operator: TypeAlias = OpOverload[..., Any]
else:
    Operator = type(torch.ops.aten.mm.default)  # what a dispatch mode sees
    TorchDispatchMode = named(
        "torch.utils._python_dispatch.TorchDispatchMode",
        lost="no operator is seen: nothing is counted, predicted or verified",
    )
    FakeTensorMode = named(
        "torch._subclasses.fake_tensor.FakeTensorMode", lost="no memory or work can be predicted"
    )
    FakeTensor = named(
        "torch._subclasses.fake_tensor.FakeTensor", lost="a prediction may leave its tensors in caches"
    )
    FakeCopyMode = named(
        "torch._subclasses.fake_tensor.FakeCopyMode",
        lost="the work of models that are built on real tensors cannot be predicted",
    )
    DataDependentOutputException = named(
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        lost="the memory of a step under loss scaling cannot be predicted",
    )


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `run_operator` is called in the place of each operator.

    Operators that it calls itself go to the mode around it, and at last to torch.
    """

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What torch calls in the place of each operator while the mode is entered."""
        return self.run_operator(func, args, kwargs or {})

    def run_operator(self, function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What comes of the operator."""
        raise NotImplementedError


outside_modes: Callable[[], AbstractContextManager[Any]] = named(
    "torch.utils._python_dispatch._disable_current_modes",
    lost="what tries its own code out cannot do so where memory is predicted",
)
"""Inside, operators compute real numbers, whatever modes have been entered, such as one of fake tensors."""


class FakeBuildMode(TorchFunctionMode):
    """While it is entered, inside of a FakeTensorMode, a deep copy of a tensor is a clone of it.

    torch copies the storage, which a fake tensor has not: the copy fails, and the process may end with
    signal 11 later (seen with torch 2.15). Buffers of a network that is copied, as for an average of its
    weights, meet it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What torch calls in the place of each function while the mode is entered."""
        if func is not torch.Tensor.__deepcopy__ or not args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


version_of: Callable[[torch.Tensor], int] = attribute(
    torch.Tensor, "_version", lost="it is not seen that a tensor was changed in place"
)
"""How often the numbers of a tensor, or of another one with its memory, were changed in place."""

_gradient_hooks = [
    attribute(torch.Tensor, name, lost="it is not seen that a hook changes the gradient of a weight")
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
]

storage_id: Callable[[torch.UntypedStorage], int] = attribute(
    torch.UntypedStorage, "_cdata", lost="two tensors with one memory cannot be told from two with their own"
)
"""Identifies a storage as long as it lives; on fake and meta tensors too, where no address does."""

_coo_parts = [
    attribute(torch.Tensor, name, lost="the memory of sparse tensors is not known")
    for name in ("_indices", "_values")
]

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attribute(
    torch.Tensor, "_base", lost="views of weights count as activations"
)
"""The tensor of which autograd knows this one to be a view, or None."""

schema_of: Callable[[Operator], torch.FunctionSchema] = attribute(
    Operator, "_schema", lost="the arguments of an operator have no names"
)
"""The schema of an operator that reaches a dispatch mode: its name, arguments, returns and what it writes."""

in_transform: Callable[[], bool] = named(
    "torch._C._are_functorch_transforms_active",
    lost="operators of one's own do not give way to transforms of torch.func",
)
"""Is a transform of torch.func entered, such as vmap or jacrev?"""

named(
    "torch.autograd.forward_ad._current_level",
    lost="operators of one's own do not give way to differentiation forwards",
)

is_batched: Callable[[torch.Tensor], bool] = named(
    "torch._C._functorch.is_legacy_batchedtensor",
    lost="operators of one's own do not give way to gradients that are asked for many at once",
)
"""Does a tensor stand for many, as in a backward pass with `is_grads_batched`? It has no memory."""

_graph_task: Callable[[], int] = named(
    "torch._C._current_graph_task_id", lost="forward and backward cannot be told apart"
)

current_dispatch_mode: Callable[[], Any] = named(
    "torch.utils._python_dispatch._get_current_dispatch_mode", lost="a step of a script cannot be counted"
)
"""The innermost dispatch mode that is entered, or None."""

tree_leaves: Callable[[Any], list[Any]] = named(
    "torch.utils._pytree.tree_leaves", lost="tensors inside of results are not found"
)
"""What stands in a tree of containers, also of those that a library made known to torch."""

tree_map_only: Callable[..., Any] = named(
    "torch.utils._pytree.tree_map_only", lost="batches cannot be copied to fake tensors"
)
"""``(class, function, tree)``: the tree with the function applied to what is of the class."""

tree_unflatten: Callable[[Any, Any], Any] = named(
    "torch.utils._pytree.tree_unflatten", lost="forward functions that take lists cannot be traced"
)
"""``(leaves, form)``: a tree of that form."""

read_number: Operator = named(
    "torch.ops.aten._local_scalar_dense.default", lost="a number of a part is taken for one of the whole"
)
"""The operator by which one number of a tensor becomes one of Python's."""

kernels_for: Callable[[str], list[str]] = named(
    "torch._C._dispatch_get_registrations_for_dispatch_key",
    lost="what autocast computes in float32 on a GPU cannot be predicted without one",
)
"""The operators, with their overloads, that have a kernel of their own for a dispatch key."""

scoped_library: Callable[..., AbstractContextManager[torch.library.Library]] = named(
    "torch.library._scoped_library",
    lost="what autocast computes in float32 on a GPU cannot be predicted without one",
)
"""``("aten", "IMPL")``: kernels of one's own for torch's operators, as long as it is entered."""

_excluding: Callable[[Any, bool], Any] = named(
    "torch._C._SetExcludeDispatchKeyGuard", lost="checkpoint cannot keep the results of products"
)
_IN_PLACE_OR_VIEW: Any = named(
    "torch._C.DispatchKey.ADInplaceOrView", lost="checkpoint cannot keep the results of products"
)

foreach_copy: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any] = named(
    "torch._foreach_copy_", lost="a step cannot be taken again after it ran out of memory"
)
"""``(into, from)``: copies many tensors with few kernels."""

int8_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = named(
    "torch._int_mm", lost="the speed of int8 products is not measured"
)
"""The matrix product of int8 tensors with int32 sums."""

_saved_tensors_hooks: Callable[[bool], Any] = named(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    lost="the contract does not see hooks of saved tensors that stay",
)
_function_modes: Callable[[], int] = named(
    "torch._C._len_torch_function_stack", lost="the contract does not see function modes that stay"
)
_dispatch_modes: Callable[[], int] = named(
    "torch._C._len_torch_dispatch_stack", lost="the contract does not see dispatch modes that stay"
)

PRIVATE_MODULES = ("torch._tensor", "torch.utils.data._utils.collate", "torch.utils.data._utils.fetch")
"""Modules of Python with functions that a training step calls; one that is replaced and stays is noticed."""

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_raw = attribute(
    torch.autograd.profiler.profile, "kineto_results", lost="what a step really does cannot be observed"
)


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor consists of in memory: itself, or the places and numbers of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        return [read(tensor)() for read in _coo_parts]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def storage_ids(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Those of the tensors' storages; a sparse tensor has none."""
    return {storage_id(one.untyped_storage()) for one in tensors if one.layout == torch.strided}


def gradient_hooks(weight: torch.Tensor) -> list[Callable[..., Any]]:
    """What runs in a backward pass when a weight's gradient is there."""
    return [hook for read in _gradient_hooks for hook in (read(weight) or {}).values()]


def is_transformed() -> bool:
    """Is a transform of torch.func entered, or differentiation forwards? Gradients that are written out by an
    autograd.Function know neither.
    """
    return in_transform() or forward_ad._current_level >= 0


def in_backward() -> bool:
    """Does the backward pass run what calls this?"""
    return _graph_task() != -1


def sharing_versions() -> Any:
    """A context in which a detached tensor counts changes in place together with its original."""
    return _excluding(_IN_PLACE_OR_VIEW, False)


def attention_operators() -> list[Any]:
    """The kernels of scaled dot product attention; one that a release lacks is never seen to run."""
    found = (getattr(torch.ops.aten, name, None) for name in _ATTENTION)
    return [operator.default for operator in found if operator is not None]


def entered() -> dict[str, Any]:
    """What is entered in this thread and sees operators: by what it is."""
    return {
        "hooks of saved tensors": _saved_tensors_hooks(True),
        "function modes": _function_modes(),
        "dispatch modes": _dispatch_modes(),
    }


def raw_events(profiler: torch.profiler.profile) -> list[Any]:
    """A profile's events as they were recorded: names, times, bytes and the dtypes of inputs.

    The public ones have no dtypes, and building their tree takes long.
    """
    events: list[Any] = _raw(profiler.profiler).events()
    return events
