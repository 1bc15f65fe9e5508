"""Compile the model: `torch.compile` traces it and generates fused kernels."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.operators import MATRIX_CLASSES
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Plain, Seam, Stage, Technique

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Compile(Technique):
    """The model (or, `regional`, each repeated block of it) compiled in place while a step runs.

    Evaluation between steps stays uncompiled, and so does the loss function, which is Python of any kind.
    A failure to compile is an error, never a silent return to eager. `strict`: between fused operators too,
    kernels round as PyTorch's own do.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.COMPILE,
        numerics=Numerics.ROUNDING,
        summary="the model compiled to fused kernels by torch.compile",
        source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu", "cuda"),
        on_shards="",
        compiles=True,
    )

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool | None = None
    regional: bool = False
    strict: bool = False

    @property
    def slot(self) -> str | None:
        """The modes that record CUDA graphs themselves exclude other captures."""
        return "capture" if self.mode in ("reduce-overhead", "max-autotune") else None

    def apply(self, build: Build) -> None:
        """Compile the modules in place for the length of each forward seam, or of an own step."""
        import torch

        from vivace.mechanisms.blocks import repeated_blocks
        from vivace.tensors.modules import patched
        from vivace.tensors.trees import map_tensors
        from vivace.torch_internals import compiler
        from vivace.torch_internals.modules import COMPILED_CALL, is_compiled, plain_call

        found = build.device.type != "cpu" or any(map(shutil.which, ("g++", "gcc", "clang")))
        build.require(found, "torch.compile needs a C++ compiler (g++ or clang) on a CPU")
        every = [m for model in build.models for m in model.modules()]
        done = any(map(is_compiled, every))
        build.require(not done, "the model is compiled already: leave torch.compile to Vivace")
        modules = list(build.models)
        if self.regional:
            blocks = [m for model in modules for block in repeated_blocks(model) for m in block.modules]
            modules = list({id(module): module for module in blocks}.values())
        build.require(modules, "no block of the model is repeated: compile the whole model")
        sharded = build.shards is not None
        build.require(
            self.regional or not sharded,
            "where ranks divide the weights, blocks are gathered and compiled singly: set regional = true",
        )
        config = compiler.dynamo_config()
        build.set_flag(config, "suppress_errors", False)
        build.set_flag(config, "fail_on_recompile_limit_hit", True)
        build.set_flag(config, "recompile_limit", 8 + 4 * len(modules))
        own = compiler.eager_numerics() if self.strict else {}
        how: Any = {"options": compiler.options_of(self.mode) | own} if own else {"mode": self.mode}
        # Hooks gather a block's weights around its forward, and are not to be traced.
        name = "forward" if sharded else COMPILED_CALL
        plain = [m.forward if sharded else _seen(m, plain_call(m)) for m in modules]
        compiled = [torch.compile(one, dynamic=self.dynamic, **how) for one in plain]

        def run(following: Callable[[Any], Any], batch: Batch) -> Any:
            try:
                with patched(modules, name, compiled):
                    if not self.slot:
                        return following(batch)
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                    return map_tensors(following(batch), torch.clone)  # the next replay writes over it
            except compiler.compiler_error() as error:
                raise RuntimeError(f"torch.compile failed: {str(error).strip()}") from error

        build.wrap(Seam.STEP if build.own_step else Seam.FORWARD, run)
        build.on_close(torch.compiler.reset)
        build.notes["compiled_modules"] = len(modules)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of graphs, and of places where Python breaks them."""
        if not seen.compiled_graphs:
            raise Refused("it changed nothing: no graph was compiled")
        graphs, breaks = seen.compiled_graphs, seen.graph_breaks
        return f"{graphs} compiled graph{'s'[: graphs != 1]}, {breaks} graph break{'s'[: breaks != 1]}"

    def stricter(self) -> Technique | None:
        """The same with the numbers of PyTorch's own kernels."""
        return None if self.strict else dataclasses.replace(self, strict=True)

    def plain(self) -> Plain | None:
        """`torch.compile` of the whole model. Its blocks alone, or PyTorch's own numbers: not in one line."""
        if self.regional or self.strict:
            return None
        named = {"mode": self.mode, "dynamic": self.dynamic}
        keywords = "".join(f", {k}={v!r}" for k, v in named.items() if v not in ("default", None))
        mode = {} if self.mode == "default" else {"torch_compile_mode": self.mode}
        return Plain(
            model=(f"model = torch.compile(model{keywords})",),
            transformers=None if self.dynamic is not None else {"torch_compile": True, **mode},
            note="save and load the weights of the model that you compiled: around it all names begin with "
            "_orig_mod.",
        )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Graphs against launch overhead on GPUs; shorter compilation where blocks repeat."""
        if machine.device.kind == "cpu":
            return [cls(), cls(regional=True)]
        tuned = cls(mode="max-autotune-no-cudagraphs")
        return [cls(), tuned, cls(mode="reduce-overhead"), cls(regional=True)]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Fusion spares most traffic of what is no product, pooling too; products hardly change."""
        shares = profile.operator_shares
        fusible = sum(share for name, share in shares.items() if name not in MATRIX_CLASSES)
        return (0.8, 1 / (1 - 0.7 * min(1.0, fusible) - 0.1 * (1 - min(1.0, fusible))))


def _seen(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """A module's call, of a class of torch's own from a function that is not torch's.

    torch 2.11 looks past frames of its own files, so that of an `nn.Sequential` nothing would be compiled.
    """
    if not (getattr(type(module).forward, "__module__", "") or "").startswith("torch."):
        return call

    def run(_: nn.Module, *inputs: object, **named: object) -> Any:
        return call(*inputs, **named)

    return MethodType(run, module)
