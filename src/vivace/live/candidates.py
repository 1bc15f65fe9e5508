"""What may be tried on a loop that Vivace does not run."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from vivace.live.own_update import OwnUpdate
from vivace.live.refusals import Seen, device_of
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.technique import Numerics, Technique
from vivace.technique.registry import find
from vivace.tensors.modules import DROPOUTS, is_slow_depthwise, is_wide_window

UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
FEWEST_FAULTS = 256  # a MiB
EACH_COSTS = 0.02  # so much faster must be what has one technique more
PRECISION_COSTS = 0.1  # so much faster must be what rounds more than fp32
EACH_COMPILES = "each of its processes would have to compile its model"
ONE_BY_ONE = {"WhereBackward0", "MaskedFillBackward0", "IndexBackward0", "PreluKernelBackward0"}
ONE_BY_ONE |= {"MaxPool2DWithIndicesBackward0"}  # what PyTorch computes one by one on a CPU
WRITTEN_OUT = "SafeSoftmaxBackward0"  # attention that drops weights
ATTENTION = {"ScaledDotProductFlashAttentionForCpuBackward0", WRITTEN_OUT}
LIBRARY_LSTM = "MkldnnRnnLayerBackward0"
# What acts on the call of a model.
OF_CALLS = (
    "channels_last",
    "depthwise_gradients",
    "winograd",
    "fused_recurrent",
    "batched_attention",
    "bf16_autocast",
    "compile",
)


def additions(
    root: nn.Module,
    machine: Machine,
    own: Collection[str] = (),
    differentiated: Collection[str] = (),
) -> list[list[Technique]]:
    """What may be added to the plan that acts, each only if the step is faster by it.

    Layout and precision also together: often neither helps alone. `own` names the techniques in whose place
    the script has its own settings, `differentiated` what its call's results come from.
    """
    device = next(p.device.type for p in root.parameters())
    layout = [find("channels_last")(weights=False)] if convolves(root) else []  # type: ignore[call-arg]
    on_processor = device == "cpu"
    processors = [one for one in machine.devices if one.kind == device]
    units = any(UNITS & set(one.features) for one in processors)
    precision = [find("bf16_autocast")()] if device == "cuda" or units else []
    gradients = [find("depthwise_gradients")()] if on_processor and has_slow_depthwise(root) else []
    layout, precision = ([t for t in group if t.name not in own] for group in (layout, precision))
    found = [[find("host_allocator")()]] if on_processor else []
    if on_processor and drops(root) and not any("Intel" in one.name for one in processors):
        found.append([find("vectorized_dropout")()])
    if on_processor and not ONE_BY_ONE.isdisjoint(differentiated):
        found.append([find("vectorized_operators")()])
    if on_processor and runs_step_by_step(root, differentiated):
        found.append([find("fused_recurrent")()])
    both = [*layout, *precision]
    found += [layout, precision, both if layout and precision else []]
    attention = (
        [find("batched_attention")()] if on_processor and not ATTENTION.isdisjoint(differentiated) else []
    )
    in_half = "bf16_autocast" in own or any(one.dtype == torch.bfloat16 for one in root.parameters())
    filtering = [find("winograd")()] if on_processor and has_wide_windows(root) else []
    if filtering and "bf16_autocast" not in own and not any("amx_bf16" in one.features for one in processors):
        found.append([*layout, *filtering])
    found += [gradients, attention if in_half or WRITTEN_OUT in differentiated else []]
    if gradients or attention:  # which in bfloat16 matter most
        groups = dict.fromkeys(map(tuple, (precision, both)))
        found += [[*group, *gradients, *attention] for group in groups if group]
    found.append([find("fused_optimizer")()])
    if torch.are_deterministic_algorithms_enabled():  # the person wants equal bits
        found = [group for group in found if all(t.card.numerics == Numerics.EXACT for t in group)]
    return [group for group in found if group and not any(t.name in own for t in group)]


def compiling(own: Collection[str]) -> Technique | None:
    """What compiles the model's call, where that may be tried, after everything else."""
    rounds = not torch.are_deterministic_algorithms_enabled()
    return find("compile")() if rounds and "compile" not in own else None


def later(root: nn.Module) -> Technique | None:
    """What helps only once a model has been trained for a while, if it may act on this one's device."""
    rounds = not torch.are_deterministic_algorithms_enabled()
    on_processor = all(parameter.device.type == "cpu" for parameter in root.parameters())
    return find("flush_denormals")() if rounds and on_processor else None


def adding(base: Plan, group: list[Technique]) -> Plan:
    """The plan with the techniques of a group that it does not hold."""
    for technique in group:
        if technique.name not in base.names:
            base = base.adding(technique)
    return base


def has_slow_depthwise(root: nn.Module) -> bool:
    """Has it depthwise convolutions of PyTorch's own whose gradients libraries for CPUs are slow at?"""
    return any(type(one) is nn.Conv2d and is_slow_depthwise(one) for one in root.modules())


def has_wide_windows(root: nn.Module) -> bool:
    """Has it 3x3 convolutions of PyTorch's own with many channels, which can be had by fewer products?"""
    found = [one for one in root.modules() if type(one) is nn.Conv2d and is_wide_window(one)]
    return any(one.weight.dtype == torch.float32 for one in found)


def of_memory_alone(plan: Plan) -> bool:
    """Does a plan keep memory, and nothing else? What that brings no copy of a step can tell."""
    return plan.names == ("host_allocator",)


def drops(root: nn.Module) -> bool:
    """Does a layer of it leave numbers out at random?"""
    shares = [one.p for one in root.modules() if isinstance(one, DROPOUTS)]
    shares += [one.dropout for one in root.modules() if isinstance(one, (nn.MultiheadAttention, nn.RNNBase))]
    return any(share > 0 for share in shares)


def runs_step_by_step(root: nn.Module, differentiated: Collection[str]) -> bool:
    """Has it recurrent layers whose steps PyTorch runs one by one, as those of LSTMs on packed batches?"""
    lstm = bool(differentiated) and LIBRARY_LSTM not in differentiated
    kinds = (nn.GRU, nn.RNN, nn.LSTM) if lstm else (nn.GRU, nn.RNN)
    return any(isinstance(one, kinds) for one in root.modules())


def convolves(root: nn.Module) -> bool:
    """Has it two-dimensional convolutions?"""
    return any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in root.modules())


def own_settings(
    seen: Seen, root: nn.Module, page_faults: float, rest: str, *, together: bool
) -> dict[str, str]:
    """What is the script's own and stays so, or has nothing to act on: by technique, why that is not tried.

    `page_faults`: of a step. `rest`: why nothing may act on the model's calls. `together`: with other
    processes.
    """
    found = {"compile": EACH_COMPILES} if together else {}
    if rest:
        found |= dict.fromkeys(OF_CALLS, rest)
    elif seen.autocasts or seen.scalers:
        chosen = " and ".join(["autocast"] * seen.autocasts + ["GradScaler"] * bool(seen.scalers))
        found["bf16_autocast"] = f"its precision is its own ({chosen})"
    if not rest and any(map(_is_channels_last, root.parameters())):
        found["channels_last"] = "its memory order is its own (channels_last)"
    if page_faults < FEWEST_FAULTS and device_of(root).type == "cpu":
        found["host_allocator"] = "its steps take hardly any memory anew from the system"
    if len(seen.optimizers) > 1:
        found["fused_optimizer"] = "several optimizers update its weights"
    elif any(isinstance(one, OwnUpdate) for one in seen.optimizers.values()):
        found["fused_optimizer"] = "no optimizer of torch's updates its weights"
    return found


def _is_channels_last(weight: torch.Tensor) -> bool:
    ordered = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return ordered and not weight.is_contiguous()
