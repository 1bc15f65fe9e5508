"""What a session may leave behind in its process: settings, the environment, patched functions, numbers.

Settings and functions are compared by name. What has no name shows in bits: of a few operators here, and of
the reference, which the contract runs again after the session.
"""

from __future__ import annotations

import dataclasses
import gc
import operator
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from vivace.torch_internals.modules import hooks_of_all
from vivace.torch_internals.tensors import PRIVATE_MODULES, entered

# What a training step calls. torch's compiler and its tables change while they work, so they are not here;
# every module more makes each check slower.
WATCHED = (
    "random",
    "numpy.random",
    "torch",
    "torch.amp.autocast_mode",
    "torch.autograd",
    "torch.autograd.function",
    "torch.autograd.graph",
    "torch.cuda",
    "torch.functional",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.parameter",
    "torch.nn.utils.clip_grad",
    "torch.random",
    "torch.utils.checkpoint",
    "torch.utils.data.dataloader",
    "torch.utils.data.dataset",
    "torch.utils.data.sampler",
    *PRIVATE_MODULES,
)
WITH_SUBMODULES = ("torch.nn.modules.", "torch.optim.")

_REDUCED = tuple(
    f"allow_{kind}_reduced_precision_reduction{part}"
    for kind in ("fp16", "bf16")
    for part in ("", "_split_k")
)
DEVICES = ("cpu", "cuda")
MISSING = "missing"
DENORMAL = 1e-40  # below the smallest normal float32


@dataclasses.dataclass(frozen=True)
class Process:
    """A process as it is at one moment. Holds the functions, so that none made later has their identity."""

    settings: dict[str, Any]
    environment: dict[str, str]
    functions: dict[str, dict[str, Any]]  # by module or class
    numbers: dict[str, bytes]  # the results of a few operators, to the bit


def process() -> Process:
    """This process, now. Takes some milliseconds, and nothing from the random streams."""
    return Process(process_flags(), dict(os.environ), _functions(), _numbers())


def left_behind(before: Process, after: Process) -> list[str]:
    """One phrase for each thing that is not as it was, with its name, what it was, and what it is."""
    environment = _differences(before.environment, after.environment)
    numbers = [name for name, bits in before.numbers.items() if after.numbers[name] != bits]
    return [
        *_differences(before.settings, after.settings),
        *[f"the environment variable {phrase}" for phrase in environment],
        *_patched(before.functions, after.functions),
        *[f"{name} gives other bits" for name in numbers],
    ]


def random_streams() -> dict[str, Any]:
    """Where the process's random streams stand, by whose they are."""
    state: Any = numpy.random.get_state()
    name, keys, *rest = state
    cuda = {"CUDA's": torch.cuda.get_rng_state().numpy().tobytes()} if torch.cuda.is_available() else {}
    return {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "NumPy's": (name, keys.tobytes(), *rest),
        "Python's": random.getstate(),
        **cuda,
    }


def process_flags() -> dict[str, Any]:
    """The process-wide settings that a session must leave as it found them, by name."""
    autocast = {
        f"autocast on {device}": (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in DEVICES
    }
    deterministic: Any = torch.utils.deterministic
    return {
        **_backend_flags(),
        **autocast,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "num_threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "default_device": str(torch.get_default_device()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.get_deterministic_debug_mode(),
        "fill_uninitialized_memory": deterministic.fill_uninitialized_memory,
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "sharing of tensors": torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        **entered(),
        "hooks of every module": hooks_of_all(modules),
        "hooks of every optimizer": hooks_of_all(optimizers),
        **_python_flags(),
    }


def _backend_flags() -> dict[str, Any]:
    backends: Any = torch.backends
    owners = {
        "cuda.matmul": (backends.cuda.matmul, ("allow_fp16_accumulation", *_REDUCED)),
        "cudnn": (backends.cudnn, ("enabled", "benchmark", "benchmark_limit", "deterministic")),
        "mkldnn": (backends.mkldnn, ("enabled", "deterministic")),
    }
    flags = {
        f"{name}.{flag}": getattr(owner, flag, MISSING)
        for name, (owner, names) in owners.items()
        for flag in names
    }
    for name, owner in (("cuda", backends.cuda), ("cudnn", backends.cudnn), ("mkldnn", backends.mkldnn)):
        for kind in ("matmul", "conv", "rnn"):
            part = getattr(owner, kind, None)
            if part is not None:
                flags[f"{name}.{kind}"] = getattr(part, "fp32_precision", None)
    kernels = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
    return {**flags, **{kernel: getattr(backends.cuda, f"{kernel}_enabled")() for kernel in kernels}}


def _python_flags() -> dict[str, Any]:
    # torch's DataLoader puts its own handler there when it first starts a worker, and leaves it.
    handlers = {s: signal.getsignal(s) for s in signal.Signals if s != signal.SIGCHLD}
    return {
        **{f"the handler of {name.name}": handler for name, handler in handlers.items()},
        "gc.isenabled": gc.isenabled(),
        "gc.get_threshold": gc.get_threshold(),
        "sys.getswitchinterval": sys.getswitchinterval(),
        "os.getcwd": os.getcwd(),
        "os.sched_getaffinity": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else MISSING,
    }


def _numbers() -> dict[str, bytes]:
    """Operators on fixed numbers, in the process's default dtype, and on denormal ones."""
    generator = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(8, 8, generator=generator, device="cpu").requires_grad_()
    small = DENORMAL * values.detach().float()
    images = values.reshape(1, 1, 8, 8)
    results = {
        "a sum of denormal numbers": small.sum(),
        "a product of denormal numbers": 0.5 * small,
        "a matrix product": values @ values,
        "an exponential": values.exp(),
        "a convolution": functional.conv2d(images, images[:, :, :3, :3]),
        "a softmax": values.softmax(1),
    }
    (gradient,) = torch.autograd.grad(results["a matrix product"].sum(), values)
    results["a gradient"] = gradient
    return {name: result.detach().numpy().tobytes() for name, result in results.items()}


def _functions() -> dict[str, dict[str, Any]]:
    """What stands under every name in the watched modules, and in the classes that these modules define."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        if name not in WATCHED and not name.startswith(WITH_SUBMODULES):
            continue
        found[name] = names = vars(module).copy()
        for key, value in names.items():
            if isinstance(value, type) and value.__module__ == name:
                found[f"{name}.{key}"] = vars(value).copy()
    return found


def _patched(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Functions that were replaced or taken away, and those of a class that now hide inherited ones."""
    for owner, names in before.items():
        now = after.get(owner, {})
        if len(now) == len(names) and all(map(operator.is_, names.values(), now.values())):
            continue
        for name, value in names.items():
            other = now.get(name, MISSING)
            if other is not value and (_acts(value) or _acts(other)):
                yield f"{owner}.{name} is another function"
        new = now.keys() - names.keys() if owner not in sys.modules else ()  # a module gains names by imports
        for name in new:
            if _acts(now[name]):
                yield f"{owner}.{name} hides what was inherited"


def _acts(value: object) -> bool:
    return callable(value) or isinstance(value, property | staticmethod | classmethod)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    pairs = {name: (before.get(name, MISSING), after.get(name, MISSING)) for name in {**before, **after}}
    return [f"{name} was {one}, is {other}" for name, (one, other) in pairs.items() if one != other]
