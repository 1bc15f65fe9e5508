"""Private names of torch's compiler, and of its allocators. Nothing is imported before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vivace.torch_internals import later

DYNAMO = "torch._dynamo"
"""The package that traces; a process that has not imported it has compiled nothing."""

_UNCOMPILED = "torch.compile cannot be used as a technique"
_config = later("torch._dynamo.config", lost=_UNCOMPILED)
for _flag in ("suppress_errors", "fail_on_recompile_limit_hit", "recompile_limit"):
    later(f"torch._dynamo.config.{_flag}", lost=_UNCOMPILED)
_error = later("torch._dynamo.exc.TorchDynamoException", lost=_UNCOMPILED)
_options = later("torch._inductor.list_mode_options", lost=_UNCOMPILED)
_patch = later(
    "torch._inductor.config.patch", lost="compiled code cannot draw the random numbers that eager code draws"
)
later(
    "torch._inductor.config.fallback_random",
    lost="compiled code cannot draw the random numbers that eager code draws",
)
_known_options = later("torch._inductor.list_options", lost="compiled code cannot round as eager code does")
later("torch._inductor.config.emulate_precision_casts", lost="compiled code cannot round as eager code does")
_cache = later(
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
    lost="`train` compiles again what `tune` has compiled",
)
for _name in (
    "counters",
    "get_compilation_metrics",
    "graph_break_reasons",
    "DEFAULT_COMPILATION_METRICS_LIMIT",
):
    later(f"torch._dynamo.utils.{_name}", lost="graphs and their breaks are not counted")

allocator_takes: Callable[[], Callable[[str], None]] = later(
    "torch._C._accelerator_setAllocatorSettings", lost="settings of the CUDA allocator cannot be changed"
)
"""What hands settings to the allocator of a GPU, which read them from the environment when it started.

There is nothing public for it; what torch.cuda names deprecated says to call this one.
"""
_snapshot = later(
    "torch.cuda.memory._snapshot", lost="settings of the CUDA allocator could not be put back as they were"
)


def is_imported() -> bool:
    """May something in this process be compiled?"""
    return DYNAMO in sys.modules


def counts() -> Any:
    """torch's module with the counters of graphs and their breaks; None where nothing can be compiled yet."""
    return sys.modules.get(f"{DYNAMO}.utils")


def dynamo_config() -> Any:
    """The switches of the tracer: whether it raises errors, and how often it may compile again."""
    return _config()


def compiler_error() -> type[Exception]:
    """The base of what the compiler raises."""
    found: type[Exception] = _error()
    return found


def eager_numerics() -> dict[str, Any]:
    """Inductor's options with which kernels round as eager ones do; older torch knows only the first."""
    numerics = {"numerics": "strict"} if "numerics" in _known_options()() else {}
    return {"emulate_precision_casts": True, **numerics}


def options_of(mode: str) -> dict[str, Any]:
    """The compiler's options that a mode of `torch.compile` stands for."""
    return dict(_options()(mode))


def equal_random_numbers() -> AbstractContextManager[Any]:
    """Let what is compiled inside draw the random numbers that eager code draws."""
    patched: AbstractContextManager[Any] = _patch()(fallback_random=True)
    return patched


def cache_folder() -> str:
    """Where the compiler keeps its results, where the environment names no other folder."""
    return str(_cache()())


def allocator_settings() -> str:
    """The settings that the CUDA allocator was started with."""
    return str(_snapshot()()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])


_inductor_config = later("torch._inductor.config", lost="compiled models cannot keep their weights packed")
later("torch._inductor.config.freezing", lost="compiled models cannot keep their weights packed")
_load_package = later(
    "torch._inductor.aoti_load_package", lost="packages compiled ahead of time cannot be opened"
)
_package = later("torch._inductor.aoti_compile_and_package", lost="models cannot be compiled ahead of time")
_int8 = later("torch.ao.quantization.fx._decomposed", lost="programs in int8 cannot be opened")


def know_int8() -> None:
    """Let programs be opened that quantize: torch registers those operators when this module is imported."""
    _int8()


def freeze_weights() -> None:
    """Let everything that this process compiles from now on fold and pack its weights.

    A setting of the whole process: as an option of one `torch.compile` it crashes (2.15).
    """
    _inductor_config().freezing = True


def load_package(path: str) -> Any:
    """The model of a package that was compiled ahead of time."""
    return _load_package()(path)


def compile_package(program: object, path: str) -> None:
    """Compile an exported program ahead of time into a package, a file that ends in ``.pt2``."""
    _package()(program, package_path=path)
