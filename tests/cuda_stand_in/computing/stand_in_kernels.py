"""torch's CPU kernels in place of the GPU's, over the memory of the stand-in: what it computes is right.

Each operator that torch would launch on a GPU runs at once on a CPU tensor that shares the memory. While a
stream is capturing, it is noted and runs when the graph is replayed. Everything above a kernel stays torch's
own for CUDA: memory, streams, capture, autograd, the optimizers' choices. Vivace's own operators run what
they run on CPUs. Not computed: what torch's compiler makes with Triton, and operators that CPUs have not;
cuDNN and the fused kernels of attention are switched off.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import warnings

import torch

# Not work of a kernel: they make or describe memory, or copy one number by CUDA's own copy.
KEPT = {
    "aten::_local_scalar_dense",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
}
# Chosen by device inside torch, below what could be replaced.
ADDED = ("aten::copy_", "aten::convolution", "aten::convolution_backward")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_addmm_activation"}
CONVOLUTIONS = {"convolution", "convolution_backward"}
TF32_BITS_CUT = 13

_runtime = ctypes.CDLL(None)  # libstandin.so is preloaded
_runtime.stand_in_note.restype = ctypes.c_ulonglong
_graphs: dict[int, list] = {}
_kept_alive: list = []


def install() -> None:
    """Put the kernels in place, for this process and those that it forks."""
    torch.backends.cudnn.enabled = False
    for fused in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)
    torch.library.Library.impl = functools.partialmethod(_implement, torch.library.Library.impl)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        copy = torch.library.get_kernel("aten::copy_", "CUDA")
        for name in {*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), *ADDED} - KEPT:
            if not name.startswith("aten::"):
                continue
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            on_cpus = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
            if on_cpus and not _is_view(operator):
                library.impl(operator, functools.partial(_launch, operator), "CUDA")
        library.impl("copy_", functools.partial(_copy, copy), "CUDA", allow_override=True)
        library.impl("_thnn_fused_lstm_cell", _lstm_cell, "CUDA")
        library.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, "CUDA")
    replay = ctypes.CFUNCTYPE(None, ctypes.c_ulonglong)(_replay)
    forget = ctypes.CFUNCTYPE(None, ctypes.c_ulonglong)(lambda number: _graphs.pop(number, None))
    _runtime.stand_in_replays(replay, forget)
    _kept_alive.extend((library, replay, forget))


def _implement(library, put, name, function, dispatch_key="", **more):
    """Vivace's own operators, whose kernels for GPUs are Triton's, launch what they are on CPUs."""
    if library.ns == "vivace" and dispatch_key == "CUDA":
        function = functools.partial(_launch, getattr(torch.ops.vivace, name).default)
    return put(library, name, function, dispatch_key, **more)


def _is_view(operator) -> bool:
    returned = [value.alias_info for value in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _launch(operator, *args, **kwargs):
    """What stands where the operator's kernel for GPUs stood."""
    device = _device(args, kwargs)
    capturing = _capture()
    inputs, named = _on_cpu(args), _on_cpu(kwargs)
    outs = {name: kwargs[name] for name in _outs(operator) if kwargs.get(name) is not None}
    for name, there in outs.items():
        named[name] = _mapped(there, lambda one: torch.empty_like(one, device="cpu"))
    tried = (inputs, named) if capturing is None else _mapped((inputs, named), _copy_of)
    results = _run(operator, *tried, device if capturing is None else None)  # in a capture for the shapes
    returned, made = _returned(operator, args, kwargs, results, device)
    for name, there in outs.items():
        for out, one in zip(_flat(there), _flat(tried[1][name]), strict=True):
            if out.shape != one.shape:
                out.resize_(one.shape)
    makes = [_alias(one) for one in [*made, *_flat(list(outs.values()))]]
    # A graph keeps this, and shall not keep autograd's nodes, which hang on the tensors that torch got.
    is_new, names = bool(made), list(outs)

    def deliver(results):
        fresh = [one for one in _flat(results) if isinstance(one, torch.Tensor)] if is_new else []
        for into, one in zip(makes, [*fresh, *_flat([named[name] for name in names])], strict=True):
            into.copy_(one)

    if capturing is None:
        deliver(results)
    else:
        _graphs.setdefault(capturing, []).append(lambda: deliver(_run(operator, inputs, named, device)))
    return returned


def _run(operator, args, kwargs, device):
    """The operator on CPUs; random numbers come from the GPU's stream, and move it on (not for None)."""
    if _is_tf32(operator):
        args = _rounded(args)
    if not _draws(operator):
        return _quietly(operator, args, kwargs)
    own = torch.default_generator.get_state()
    try:
        if device is not None:
            given = [one for one in _flat((args, kwargs)) if isinstance(one, torch.Generator)]
            stream = given[0] if given else torch.cuda.default_generators[device.index or 0]
            place = stream.get_offset()
            torch.default_generator.manual_seed(hash((stream.initial_seed(), place)) % 2**63)
            stream.set_offset(place + 4)
        kwargs = {name: None if isinstance(one, torch.Generator) else one for name, one in kwargs.items()}
        args = [None if isinstance(one, torch.Generator) else one for one in args]
        return _quietly(operator, args, kwargs)
    finally:
        torch.default_generator.set_state(own)


def _quietly(operator, args, kwargs):
    """A kernel is no operator of its own to torch's profiler."""
    torch.autograd._enable_record_function(False)
    try:
        return operator(*args, **kwargs)
    finally:
        torch.autograd._enable_record_function(True)


def _copy(kernel, target, source, non_blocking=False):
    """A copy; from memory that is not page-locked CUDA's own, which a capture refuses."""
    capturing = _capture()
    plain = capturing is None or all(one.is_cuda or one.is_pinned() for one in (target, source))
    if not plain:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        return kernel.call_boxed(keys, target, source, non_blocking)
    into, out = _on_cpu(target), _on_cpu(source)
    if capturing is None:
        into.copy_(out)
    else:
        _graphs.setdefault(capturing, []).append(lambda: into.copy_(out))
    return target


def _capture() -> int | None:
    """The number of the capture under way on the current stream; a node is added to its graph."""
    if not torch.cuda.is_current_stream_capturing():
        return None
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return _runtime.stand_in_note(stream)


def _replay(number: int) -> None:
    with torch.no_grad():
        for again in _graphs.get(number, ()):
            again()


def _device(args, kwargs) -> torch.device:
    for one in _flat((args, kwargs)):
        if isinstance(one, torch.Tensor) and one.is_cuda:
            return one.device
        if isinstance(one, torch.device) and one.type == "cuda":
            return one
    return torch.device("cuda", torch.cuda.current_device())


def _flat(value):
    if isinstance(value, (list, tuple)):
        return list(itertools.chain.from_iterable(map(_flat, value)))
    return _flat(list(value.values())) if isinstance(value, dict) else [value]


def _mapped(value, change):
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, change) for one in value)
    if isinstance(value, dict):
        return {name: _mapped(one, change) for name, one in value.items()}
    return change(value)


def _on_cpu(value):
    def change(one):
        if isinstance(one, torch.Tensor):
            return _alias(one) if one.is_cuda else one
        return torch.device("cpu") if isinstance(one, torch.device) else one

    return _mapped(value, change)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory; it keeps nothing alive."""
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * ((last + 1) * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)


def _copy_of(one):
    """Of every tensor: batch normalization writes running means, and its schema does not say so."""
    return one.clone() if isinstance(one, torch.Tensor) else one


def _rounded(args):
    """As TF32 reads its inputs: ten bits of a float32's fraction, rounded to nearest."""

    def cut(one):
        if not isinstance(one, torch.Tensor) or one.dtype != torch.float32:
            return one
        half = 1 << (TF32_BITS_CUT - 1)
        return ((one.contiguous().view(torch.int32) + half) & -(1 << TF32_BITS_CUT)).view(torch.float32)

    return _mapped(list(args), cut)


def _is_tf32(operator) -> bool:
    name = operator._schema.name.removeprefix("aten::")
    flags = torch.backends.cuda.matmul if name in PRODUCTS else torch.backends.cudnn.conv
    return name in PRODUCTS | CONVOLUTIONS and flags.fp32_precision == "tf32"


@functools.cache
def _draws(operator) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


@functools.cache
def _outs(operator) -> list[str]:
    """The names of the arguments in which results are put, whatever their size was."""
    return [
        argument.name
        for argument in operator._schema.arguments
        if argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write
    ]


@functools.cache
def _writes(operator) -> list[tuple[int, str]]:
    """Place and name of each argument that the operator writes."""
    return [
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@functools.cache
def _gives_back(operator) -> list[bool]:
    """Of each result: is it an argument that was written?"""
    return [value.alias_info is not None for value in operator._schema.returns]


def _returned(operator, args, kwargs, results, device):
    """What torch gets back: the arguments that were written, and new tensors on the GPU; and the new ones."""
    given = _gives_back(operator)
    made: list[torch.Tensor] = []

    def fresh(one):
        if not isinstance(one, torch.Tensor):
            return one
        there = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)
        made.append(there)
        return there

    if not given:
        return None, made
    several = results if len(given) > 1 else (results,)
    written = (args[place] if place < len(args) else kwargs.get(name) for place, name in _writes(operator))
    found = [next(written) if back else _mapped(one, fresh) for one, back in zip(several, given, strict=True)]
    return (tuple(found) if len(given) > 1 else found[0]), made


def _lstm_cell(of_input, of_hidden, cell, input_bias=None, hidden_bias=None):
    """Made of other operators: CPUs have none that is one cell."""
    gates = of_input + of_hidden
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    let_in, keep, new, let_out = gates.chunk(4, 1)
    let_in, keep, new, let_out = let_in.sigmoid(), keep.sigmoid(), new.tanh(), let_out.sigmoid()
    cell = keep * cell + let_in * new
    return let_out * cell.tanh(), cell, torch.cat([let_in, keep, new, let_out], 1)


def _lstm_cell_backward(of_hidden, of_cell, before, cell, gates, has_bias):
    if of_hidden is None and of_cell is None:
        return None, None, None
    let_in, keep, new, let_out = gates.chunk(4, 1)
    squashed = cell.tanh()
    of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    change = of_hidden * let_out * (1 - squashed * squashed)
    change = change if of_cell is None else change + of_cell
    parts = [
        change * new * let_in * (1 - let_in),
        change * before * keep * (1 - keep),
        change * let_in * (1 - new * new),
        of_hidden * squashed * let_out * (1 - let_out),
    ]
    of_gates = torch.cat(parts, 1)
    return of_gates, change * keep, of_gates.sum(0) if has_bias else None
