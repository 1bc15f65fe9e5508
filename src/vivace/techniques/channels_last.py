"""Keep feature maps channels-last, the layout in which convolution kernels read whole pixels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Plain, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class ChannelsLast(Technique):
    """Weights of 2-D convolutions and 4-D batch tensors in NHWC memory order; shapes stay NCHW.

    Without `weights` these stay as they are, for who holds on to their memory, and so do batches, for who
    views them in another shape: each convolution reorders what it reads, as it runs, and what follows keeps
    the order. What the models of an own step return is contiguous again, so that it can still be viewed.

    On a CPU a BatchNorm of many pixels in this order runs by C code of Vivace's own, compiled once for the
    machine: PyTorch adds the pixels of a channel one by one in float32, and over 400,000 of them the variance
    is off by 1e-4 of itself. During a step that holds for all that the process computes.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="feature maps in NHWC memory order",
        source="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        unit_roundoff=2.0**-24,
        measured_on=("cpu", "cuda"),
        lowers_peak=True,
    )

    weights: bool = True

    def apply(self, build: Build) -> None:
        """Reorder the weights in place and every 4-D floating-point tensor of a batch when it is placed."""
        import torch

        from vivace.tensors.modules import modules_of, patched
        from vivace.tensors.optimizers import align_state, aligned
        from vivace.tensors.trees import map_tensors

        every = [
            m for model in build.models for m in modules_of(model, torch.nn.Conv2d, torch.nn.ConvTranspose2d)
        ]
        build.require(every, "the model has no 2-D convolution")
        convolutions = [m for m in every if not any(weight.is_complex() for weight in m.parameters())]
        build.require(
            convolutions, "the model's 2-D convolutions are of complex numbers, which have one order"
        )
        build.notes["convolutions"] = len(convolutions)
        if build.device.type == "cpu":
            build.notes["sums"] = _sum_exactly(build)
        if build.own_step:
            _return_contiguous(build)
        if not self.weights:
            found: dict[nn.Module, Callable[..., Any]] = {}

            def run(following: Callable[[Any], Any], batch: Batch) -> Any:
                if not found:  # by now all techniques have put their forwards in place
                    found.update(_reordering_forwards(convolutions))
                # Not between steps: who evaluates parts of a model, or copies or scripts it, finds its own.
                with patched(list(found), "forward", list(found.values())):
                    return following(batch)

            build.wrap(Seam.STEP if build.own_step else Seam.FORWARD, run)
            return
        shared = _held_by_others(build.models, convolutions)
        build.require(
            not shared,
            f"the weight '{shared}' lies in memory that others hold, too, and would leave it: set "
            "weights = false",
        )
        undo = contextlib.ExitStack()
        build.on_close(undo.close)
        undo.enter_context(aligned(build.optimizers))
        for weight in (weight for module in convolutions for weight in module.parameters()):
            before = weight.stride()
            _lay(weight, _channels_last)
            if weight.stride() != before:
                undo.callback(_lay, weight, _as_usual)
        align_state(build.optimizers)

        def place(following: Callable[[Any], Any], batch: Batch) -> Any:
            return map_tensors(following(batch), _channels_last)

        try:
            build.wrap(Seam.PLACE, place)
        except Refused as refused:
            raise Refused(f"{refused}: set weights = false") from None

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The convolutions that run in this order, and the BatchNorms that Vivace's code sums."""
        norms = seen.operators.get("vivace::batch_norm_nhwc", 0)
        sums = f"; {norms} BatchNorms summed by C code" if norms else seen.notes.get("sums", "")
        return f"{seen.notes['convolutions']} convolutions in channels-last order{sums}"

    def plain(self) -> Plain:
        """The weights' order, which feature maps follow from the first convolution on."""
        return Plain(
            model=("model = model.to(memory_format=torch.channels_last)",),
            note="a parameter of five dimensions has no such order, and this line fails: then move the 2-D "
            "layers one by one; on a CPU PyTorch's BatchNorms sum many pixels less exactly then; there "
            "leave out 1x1 convolutions of fewer than 16 channels at a stride, whose gradients oneDNN writes "
            "past their memory",
        )

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Convolutions may become half as fast (grouped ones) or nearly twice as fast."""
        share = profile.operator_shares.get("convolution", 0.0) + profile.operator_shares.get("norm", 0.0)
        return (1 / (1 + 0.5 * share), 1 / (1 - 0.45 * share)) if share else (1.0, 1.0)


def _return_contiguous(build: Build) -> None:
    """While an own step runs, let its models return what can be viewed in another shape."""
    from vivace.tensors.modules import lent_forwards, patched
    from vivace.tensors.trees import map_tensors

    def wrapped(own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: object, **named: object) -> Any:
            return map_tensors(own(*arguments, **named), _contiguous)

        return forward

    forwards = lent_forwards(build.models, wrapped)

    def run(following: Callable[[Any], Any], batch: Batch) -> Any:
        with patched(build.models, "forward", forwards()):
            return following(batch)

    build.wrap(Seam.STEP, run)


def _sum_exactly(build: Build) -> str:
    """Let BatchNorms of many pixels sum as exactly as in the other order; else why they do not."""
    from torch import nn

    from vivace.mechanisms.nhwc_norm import exactly
    from vivace.tensors.modules import modules_of

    if not any(modules_of(model, nn.BatchNorm2d) for model in build.models):
        return ""
    try:
        with exactly():
            pass
    except OSError as error:
        return f"; BatchNorms are summed by PyTorch, inexactly over many pixels: {error}"

    def run(following: Callable[[Any], Any], batch: Batch) -> Any:
        with exactly():  # not between steps: who scripts or traces a model then finds torch's own function
            return following(batch)

    build.wrap(Seam.STEP if build.own_step else Seam.FORWARD, run)
    return ""


def _reordering_forwards(convolutions: Iterable[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """What runs in the place of convolutions whose forward is their class's own, or of another technique."""
    from vivace.mechanisms.graphs import InPlace, Replacement

    found: dict[nn.Module, Callable[..., Any]] = {}
    for module in convolutions:
        own = vars(module).get("forward")
        if own is None:
            found[module] = MethodType(_reordering, module)
        elif isinstance(own, Replacement):
            found[module] = InPlace(module, _reordered, ())
    return found


def _reordering(self: nn.Module, *inputs: object, **named: object) -> Any:
    """A subclass may call its input by another name."""
    others = {name: _channels_last(value) for name, value in named.items()}
    return type(self).forward(self, *map(_channels_last, inputs), **others)


def _reordered(_: nn.Module, own: Callable[..., Any], *inputs: object, **named: object) -> Any:
    return own(*map(_channels_last, inputs), **{name: _channels_last(value) for name, value in named.items()})


def _held_by_others(models: Iterable[nn.Module], convolutions: Iterable[nn.Module]) -> str:
    """The name of a convolution's weight whose memory is another weight's or process's, too; or empty."""
    from vivace.mechanisms.blocks import is_fake
    from vivace.tensors.modules import named_parameters
    from vivace.torch_internals.tensors import storage_id

    named = {id(p): (name, p) for name, p in named_parameters(models) if _has_strides(p)}
    holders = Counter(storage_id(p.untyped_storage()) for _, p in named.values())
    laid = {id(weight) for module in convolutions for weight in module.parameters() if weight.dim() == 4}
    for name, weight in (found for key, found in named.items() if key in laid):
        storage = weight.untyped_storage()
        processes = not is_fake(weight) and weight.device.type == "cpu" and storage.is_shared()
        if processes or holders[storage_id(storage)] > 1:
            return name
    return ""


def _channels_last(tensor: Any) -> Any:
    """An image's or a kernel's values, in NHWC order by its strides as well; anything else as it is.

    One channel lies in either order, which `Tensor.contiguous` leaves as it is and torch takes for the other
    one: a batch normalisation behind it then mixes both, which is slow.
    """
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    if not _has_strides(tensor):
        return tensor
    return tensor.to(memory_format=torch.channels_last)


def _has_strides(tensor: torch.Tensor) -> bool:
    """Not a sparse or nested one, which has no memory order."""
    import torch

    return tensor.layout == torch.strided and not tensor.is_nested


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if not _has_strides(tensor) or tensor.is_contiguous() else tensor.contiguous()


def _as_usual(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def _lay(weight: torch.Tensor, order: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put a weight into another order, and its gradient, where a step of the person's own keeps that."""
    weight.data = order(weight.data)
    if weight.grad is not None:
        weight.grad = order(weight.grad)


# A bound method, and by this name: copies and pickles of a model then get methods of their own modules.
_reordering.__name__ = "forward"
