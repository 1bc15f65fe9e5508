"""The whole model in bfloat16 over fp32 master weights, which the optimizer keeps updating."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import ran_out_of_memory
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.mechanisms.half_precision import bfloat16_gain, require_bfloat16, share_in
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Bf16Weights(Technique):
    """Each forward pass runs on bfloat16 copies of the weights; the person's fp32 parameters are the masters.

    Unlike autocast, activations between the products stay in bfloat16 too. Outputs return to fp32; the loss,
    the tensors of BatchNorm and of a CPU's LayerNorm, its attention without dropout over up to 256
    positions of heads of 64, and the sums of the gradients of rows that are looked up stay in fp32.
    Weights *kept* in bfloat16 train another model: not offered.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PRECISION,
        numerics=Numerics.ROUNDING,
        summary="the model in bfloat16, fp32 master weights",
        source="https://arxiv.org/abs/1905.12322",
        slot="precision",
        unit_roundoff=UNIT_ROUNDOFF["bfloat16"],
        measured_on=("cpu", "cuda"),
        on_shards="it copies all weights before the forward pass, and a rank that holds a part of them has "
        "those of one block at a time: use bf16_autocast",
    )

    def apply(self, build: Build) -> None:
        """Run each model's forward on cast weights while the forward seam, or an own step, runs."""
        from torch import nn

        from vivace.mechanisms.blocks import without_transforms
        from vivace.tensors.modules import Lent, modules_of, patched
        from vivace.tensors.precision import sum_in_float32

        require_bfloat16(build)
        if build.device.type == "cuda":
            recurrent = any(modules_of(model, nn.RNNBase) for model in build.models)
            build.require(not recurrent, "cuDNN wants recurrent weights in one block: use bf16_autocast")
        bags = any(modules_of(model, nn.EmbeddingBag) for model in build.models)
        build.require(not bags, "an EmbeddingBag would add up its gradients in bfloat16: use bf16_autocast")
        sum_in_float32(build)
        halves = [_Half(model, build.device.type) for model in build.models]
        lent = [Lent(half.model, half.forward) for half in halves]

        def run(following: Callable[[Any], Any], batch: Batch) -> Any:
            for half in halves:
                half.refresh()
            with patched(build.models, "forward", lent), _once(build), without_transforms(self.name):
                result = following(batch)
            changed = [name for half in halves for name in half.changed()]
            build.require(not changed, f"the model writes to {changed} as it runs: use bf16_autocast")
            return result

        def backward(following: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
            with _once(build):
                following(loss)

        build.wrap(Seam.STEP if build.own_step else Seam.FORWARD, run)
        if not build.own_step:
            build.wrap(Seam.BACKWARD, backward)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The share of matrix and convolution inputs that were bfloat16."""
        return share_in("bfloat16", seen)

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Casts cost a part of what is not a product."""
        return bfloat16_gain(profile, machine, casts=0.2)


@contextlib.contextmanager
def _once(build: Build) -> Iterator[None]:
    """Raise Refused where the backward pass fails as it runs a part of the model again: on fp32 weights."""
    try:
        yield
    except RuntimeError as error:
        names = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
        behind = names[names.index("torch.autograd.graph") :] if "torch.autograd.graph" in names else []
        again = "torch.utils.checkpoint" in behind and not ran_out_of_memory(error)
        build.require(
            not again, "the model runs parts of itself again in the backward pass: use bf16_autocast"
        )
        raise


class _Half:
    """A model's forward on bfloat16 copies of its weights and constants; tied weights share one copy."""

    def __init__(self, model: nn.Module, device: str) -> None:
        from vivace.tensors.modules import Shell

        self.model, self.original, self.device = model, model.forward, device
        self.shell = Shell(model, self.call)
        self.compared: set[tuple[bool, ...]] = set()  # modes of the modules
        self.look()

    def look(self) -> None:
        """Find what is copied, in the modules that the model has now."""
        import torch
        from torch import nn

        from vivace.tensors.modules import CONVOLUTIONS, modules_of
        from vivace.tensors.precision import RowsInFloat32
        from vivace.torch_internals.modules import RunningNorm

        model, self.modules = self.model, list(self.model.modules())
        norms = modules_of(model, RunningNorm, *([nn.LayerNorm] if self.device == "cpu" else []))
        kept = {id(t) for norm in norms for t in (*norm.parameters(), *norm.buffers())}
        self.recurrent: list[Any] = modules_of(model, nn.RNNBase)
        tables = [m for m in modules_of(model, nn.Embedding) if type(m).forward is nn.Embedding.forward]
        self.embeddings = [table for table in tables if table.weight.dtype == torch.float32]
        self.rows, self.looks_up = RowsInFloat32(), True  # until a pass shows that it looks nothing else up
        self.products = modules_of(model, *CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase)

        # Of a module that has several names, one: functional_call would not give it its own tensors back.
        def places(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[nn.Module, str]]:
            found: dict[tuple[nn.Module, str], str] = {}
            for name, tensor in named:
                owner, _, own = name.rpartition(".")
                if tensor.dtype == torch.float32 and id(tensor) not in kept:
                    found.setdefault((model.get_submodule(owner), own), f"model.{name}")
            return {name: place for place, name in found.items()}

        self.weights = places(model.named_parameters(remove_duplicate=False))
        self.buffers = places(model.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        self.tied = {name: first.setdefault(id(getattr(*at)), name) for name, at in self.weights.items()}

    def refresh(self) -> None:
        if list(self.model.modules()) != self.modules:  # another head was put in place, for example
            self.look()
        self.written: list[str] = []
        self.own = {name: getattr(*place) for name, place in self.buffers.items()}
        self.constants = {name: buffer.bfloat16() for name, buffer in self.own.items()}
        # Kernels of batch normalisation do not raise a tensor's version, so values are compared; a GPU would
        # wait for that in every step.
        modes = tuple(module.training for module in self.modules)
        compares = self.device == "cpu" or modes not in self.compared
        self.before = {name: copy.clone() for name, copy in self.constants.items()} if compares else {}
        self.compared.add(modes)

    def changed(self) -> list[str]:
        """The weights and buffers whose copies the model wrote to, or put another tensor in the place of."""
        from vivace.mechanisms.blocks import is_fake
        from vivace.tensors.trees import same_numbers
        from vivace.torch_internals.tensors import version_of

        found = self.written + [name for name, copy in self.constants.items() if version_of(copy)]
        known = [(name, then) for name, then in self.before.items() if not is_fake(then)]
        found += [name for name, then in known if not same_numbers(self.constants[name], then)]
        self.before = {}
        return [name.removeprefix("model.") for name in dict.fromkeys(found)]

    def call(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        import torch

        from vivace.tensors.modules import patched
        from vivace.torch_internals.modules import FLAT_WEIGHTS, flat_names

        flat = [[getattr(module, name) for name in flat_names(module)] for module in self.recurrent]
        recurrent = patched(self.recurrent, FLAT_WEIGHTS, flat)
        # Compiled code is not asked: it would have to hand each module its forward back.
        asked = () if torch.compiler.is_compiling() else self.products
        products = [module for module in asked if "forward" not in module.__dict__]
        rounding = patched(products, "forward", [MethodType(_of_bfloat16, module) for module in products])
        rows = self.rows if self.looks_up else contextlib.nullcontext()
        with recurrent, rounding, patched(self.embeddings, "forward", self.lookups), rows:
            return self.original(*inputs[0], **inputs[1])

    def forward(self, *arguments: object, **keywords: object) -> Any:
        import torch

        from vivace.tensors.modules import lookup
        from vivace.tensors.trees import Written, cast, returned
        from vivace.torch_internals.modules import is_compiled

        # As they are now: the loss may call the model with other weights (torch.func.functional_call).
        self.lookups = [lookup(module, torch.bfloat16) for module in self.embeddings]
        copies: dict[str, torch.Tensor] = {}
        for name, place in self.weights.items():
            weight, first = getattr(*place), self.tied[name]
            again = first in copies and weight is getattr(*self.weights[first])
            copies[name] = copies[first] if again else weight.bfloat16()
        # Compiled code would be compiled anew where it meets another mode, and looking costs nothing in it.
        compiled = self.looks_up and (torch.compiler.is_compiling() or any(map(is_compiled, self.modules)))
        if self.looks_up and not compiled:
            self.rows.wide = {id(copies[n]): getattr(*at) for n, at in self.weights.items()}
        copies |= self.constants
        now = {name: getattr(*place) for name, place in self.buffers.items()}
        lent = {name: buffer for name, buffer in now.items() if buffer is not self.own[name]}
        copies |= {name: buffer.bfloat16() for name, buffer in lent.items()}
        inputs = cast((arguments, keywords), torch.float32, torch.bfloat16)
        # Compiled code is not asked: it would have to hand the copies out.
        asked = () if torch.compiler.is_compiling() else self.weights
        into = None if torch.compiler.is_compiling() else Written((arguments, keywords), inputs)
        before = {name: (copies[name], _memory_of(copies[name])) for name in asked}
        outputs = torch.func.functional_call(self.shell, copies, (inputs,), tie_weights=False)
        if self.looks_up and not compiled:
            self.rows.wide = {}
            self.looks_up = self.rows.found or not torch.is_grad_enabled()
        self.written += [n for n, own in self.constants.items() if n not in lent and copies[n] is not own]
        self.written += [
            n for n, (own, memory) in before.items() if copies[n] is not own or _memory_of(own) != memory
        ]
        if into is not None:
            into.hand_back(torch.bfloat16, torch.float32)
        return returned(outputs, torch.bfloat16, torch.float32)


def _of_bfloat16(self: nn.Module, *inputs: object, **named: object) -> Any:
    """With the tensors that the model has made in fp32 as it runs, such as first states or noise, rounded."""
    import torch

    from vivace.tensors.trees import cast

    inputs, named = cast((inputs, named), torch.float32, torch.bfloat16)
    return type(self).forward(self, *inputs, **named)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to, or given other memory by ``tensor.data = ...``."""
    from vivace.torch_internals.tensors import storage_id, version_of

    version = 0 if tensor.is_inference() else version_of(tensor)  # such a tensor does not count
    return version, storage_id(tensor.untyped_storage())
