"""A step of the script's, kept so that it can be run again on copies: the call, and what came back to it; or
the update alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from vivace.errors import ran_out_of_memory
from vivace.inspection.limits import free_memory, peak_memory
from vivace.live.following import copied
from vivace.live.refusals import NO_ROOM, device_of, why_of_model
from vivace.profiling.record.signals import raised_by_handler
from vivace.technique import UNIT_ROUNDOFF
from vivace.tensors import randomness
from vivace.tensors.outside import Outside
from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import entered, version_of

PROOF_WEIGHTS = (
    4  # times the weights' bytes: weights before and after a step, its gradients, and the script's
)
ROUNDING = 1e-5  # of a gradient: what is left of it after a subtraction is nothing
_MOST: dict[torch.device, int] = {}  # see `_reserved_by_script`
MOST_NODES = 20_000  # of autograd, that are looked at


class CannotKeep(Exception):
    """This step cannot be run again; the message says why, in words for a person."""


def failed(what: str, error: Exception) -> CannotKeep:
    """That `what` is so by an error, or that there was no memory for it."""
    return CannotKeep(NO_ROOM if ran_out_of_memory(error) else f"{what}: {error}")


class Weights(nn.Module):
    """What an optimizer updates, as a module: for loops whose model cannot be led."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        for number, group in enumerate(optimizer.param_groups):
            for index, weight in enumerate(group["params"]):
                self.register_parameter(f"{number}_{index}", weight)


class Kept:
    """A step, kept to be run again: copies of root and optimizer, and what the call and the loss gave.

    `things` are copies of root, optimizers, arguments and keywords, from before the step; `of_weights` the
    gradients of the parameters by name, as the script got them; `scale` is by how much a GradScaler made them
    larger. A step that `overflowed` is none. `outside` is what their code reaches in Python, from before.
    """

    whole = True  # with the call of the root
    lacking: CannotKeep | None = None  # why something of the step could not be kept
    method = "__call__"  # by which it is called
    parts: tuple[str, ...] = ("",)  # that this method calls, see `Hosted`
    others_draw: frozenset[str] = frozenset()  # random streams from which the step draws nothing
    differentiated: frozenset[str] = frozenset()  # what the call's results come from, as autograd names it

    def __init__(self, root: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *call: Any) -> None:
        self.device = device_of(root)
        around = entered()
        if around["dispatch modes"] or around["hooks of saved tensors"] is not None:
            raise CannotKeep(
                "it trains inside of a mode, or of hooks, that would see copies of its steps, too"
            )
        if not _has_room(self.device, root, optimizers, call):  # else it is the script that runs out of it
            raise CannotKeep(NO_ROOM)
        self.random = randomness.capture(self.device)
        self.of_weights: dict[str, torch.Tensor] = {}
        self.scale = 1.0
        kind = self.device.type
        self.autocasts = torch.is_autocast_enabled(kind)
        self.autocast_dtype = torch.get_autocast_dtype(kind)
        try:
            self.things = copied((root, optimizers, *call), root)
        except Exception as error:
            if raised_by_handler(error):
                raise
            raise failed("its model cannot be copied", error) from None
        own = {id(tensor) for tensor in _changing(root)}
        if any(id(tensor) in own for tensor in _changing(self.things[0])):
            raise CannotKeep("a copy of its model shares weights or buffers with it")
        self.outside = outside_of(root, optimizers)

    def copies(self) -> tuple[Any, ...]:
        """Of `things`, to be used up. Raises CannotKeep where there is no memory for them."""
        try:
            return copied(self.things, self.things[0])
        except RuntimeError as error:
            if ran_out_of_memory(error):
                raise CannotKeep(NO_ROOM) from None
            raise

    def precision(self) -> AbstractContextManager[Any]:
        """The script's own, around the call."""
        if not self.autocasts:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    @property
    def unit_roundoff(self) -> float:
        """Of the script's own precision; 0 where that is the weights'."""
        return UNIT_ROUNDOFF[str(self.autocast_dtype).removeprefix("torch.")] if self.autocasts else 0.0

    @property
    def overflowed(self) -> bool:
        """Is a scaled gradient no finite number, so that the scaler leaves the step out?"""
        return self.scale != 1.0 and not all(bool(g.isfinite().all()) for g in self.of_weights.values())

    @property
    def is_step(self) -> bool:
        """Did a loss come back to what was kept, so that it was of the step?"""
        return True

    def end(self) -> None:
        """No longer listen."""


def differentiated_in(outputs: Iterable[torch.Tensor]) -> frozenset[str]:
    """The names that autograd has for what made these tensors, such as ``WhereBackward0``."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting and len(seen) < MOST_NODES:
        new = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= new
        waiting += new
    return frozenset(node.name() for node in seen)


class KeptCall(Kept):
    """Made just before a call of the root; `returned` after it.

    `gradients` are the loss's with respect to the outputs, in the order of `trees.tensors`, None where it
    does not depend on one.
    """

    def __init__(
        self,
        root: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        if any(t.requires_grad for t in tensors([list(arguments), keywords])):
            raise CannotKeep("its model is called with tensors that are differentiated")
        if reason := why_of_model(root):  # by now
            raise CannotKeep(reason)
        super().__init__(root, optimizers, arguments, keywords)
        self._places_in_files = _places(self.outside)
        try:
            self._places = {n: torch.empty_like(p) for n, p in root.named_parameters() if p.requires_grad}
        except RuntimeError as error:
            raise failed("its gradients cannot be kept", error) from None
        self.gradients: list[torch.Tensor | None] = []
        self.names = {id(p): name for name, p in root.named_parameters()}
        self._handles: list[Any] = []
        self._expects = [p for p in root.parameters() if p.requires_grad]

    def returned(self, outputs: object) -> None:
        """Wait for the gradients of what the call returned."""
        if _places(self.outside) != self._places_in_files:
            self.lacking = CannotKeep(
                "its model uses an open file or writes a large tensor that is no part of it, as a copy would"
            )
        found = list(tensors(outputs))
        self.differentiated = differentiated_in(found)
        self.gradients = [None] * len(found)
        heard = set()
        for index, tensor in enumerate(found):
            if tensor.requires_grad and id(tensor) not in heard:
                heard.add(id(tensor))
                self._listen(tensor, self._output_hook(index))
        for parameter in self._expects:
            self._listen(parameter, self._weight_hook(self.names[id(parameter)]))

    @property
    def is_step(self) -> bool:
        """False where the call failed, or was an evaluation in training mode."""
        return self.lacking is not None or any(gradient is not None for gradient in self.gradients)

    def end(self) -> None:
        """No longer listen."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._expects = []

    def _listen(self, tensor: torch.Tensor, hook: Callable[..., object]) -> None:
        quiet: Any = cast("Any", unserializable_hook)(hook)  # who saves the tensor is not told of it
        self._handles.append(tensor.register_hook(quiet))  # type: ignore[no-untyped-call]

    def _output_hook(self, index: int) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            if self.gradients[index] is not None:
                return
            try:
                self.gradients[index] = gradient.detach().clone()
            except RuntimeError as error:  # within the script's own backward pass, which goes on
                self.lacking = failed("a gradient cannot be kept", error)

        return hook

    def _weight_hook(self, name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            place, given = self._places.pop(name, None), gradient.detach()
            if place is not None:
                self.of_weights[name] = place.copy_(given) if given.layout == place.layout else given.clone()

        return hook


def outside_of(root: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Outside:
    """What the code of a model and of its optimizers reaches in Python, as it is now."""
    return Outside([type(optimizer) for optimizer in optimizers], [root])


def _places(outside: Outside) -> list[int | None]:
    """How far the files are written, or read, that the code of a model reaches, and how often large tensors
    that cannot be put back were written.
    """
    found: list[int | None] = []
    for file in outside.files:
        try:
            found.append(file.tell())
        except (OSError, ValueError):  # a pipe, or closed
            found.append(None)
    return found + [version_of(tensor) for tensor in outside.large]


def _changing(root: nn.Module) -> Iterator[torch.Tensor]:
    """What a step of a model changes."""
    yield from (parameter for parameter in root.parameters() if parameter.requires_grad)
    yield from root.buffers()


def gradients_of(root: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of those that are there, by the names of the weights."""
    return {name: p.grad.detach().clone() for name, p in root.named_parameters() if p.grad is not None}


class KeptUpdate(Kept):
    """Made just before an optimizer steps, of a loop whose model cannot be led: the update alone."""

    whole = False

    def __init__(self, weights: Weights, optimizer: torch.optim.Optimizer) -> None:
        if any(p.grad is not None and p.grad.layout != torch.strided for p in weights.parameters()):
            raise CannotKeep("its weights have sparse gradients")
        super().__init__(weights, [optimizer], (), {})
        self.of_weights = gradients_of(weights)
        self.after: dict[str, torch.Tensor] = {}

    def stepped(self, weights: Weights) -> None:
        """What became of the weights."""
        self.after = {name: p.detach().clone() for name, p in weights.named_parameters()}


def _has_room(
    device: torch.device, root: nn.Module, optimizers: Sequence[torch.optim.Optimizer], call: object
) -> bool:
    """Does the memory hold a copy of the step's things, and what a proof keeps, beside the script's own
    steps, which go on? On a CPU as much must be free as the process took at most.
    """
    if device.type == "cpu":
        return free_memory() >= peak_memory()
    if device.type != "cuda":
        return True  # torch does not tell
    states = [dict(state) for optimizer in optimizers for state in optimizer.state.values()]
    weights = sum(p.nbytes for p in root.parameters())
    beside = (*root.buffers(), *tensors([states, call]))
    others = sum(t.nbytes for t in beside if t.layout == torch.strided)  # of others torch does not tell
    most = _reserved_by_script(device)
    apart_on(device)
    unused = torch.cuda.memory_reserved(device) - most
    return torch.cuda.mem_get_info(device)[0] + unused >= (1 + PROOF_WEIGHTS) * weights + others


def _reserved_by_script(device: torch.device) -> int:
    """The most bytes that torch has had of a GPU without ours: all until the first look at a step, and what
    it has at each later one, as a look gives back what it took (`Proof.end`).
    """
    had = torch.cuda.memory_reserved(device) if device in _MOST else torch.cuda.max_memory_reserved(device)
    _MOST[device] = max(had, _MOST.get(device, 0))
    return _MOST[device]


def apart_on(device: torch.device) -> None:
    """Let what is kept from here on get memory of its own on a GPU: cut out of a large block that is free
    between two steps, it would leave the script without that block, and without memory for another.
    """
    if device.type == "cuda":
        gc.collect()  # of an earlier look that failed, whose error held on to its copies
        torch.cuda.empty_cache()


def kept_in_closure(
    arguments: tuple[Any, ...], keywords: dict[str, Any], keep: Callable[[], object]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """`keep` before an optimizer's step, or in it where it has its gradients computed by a closure.

    Returns the arguments of such a step, else None.
    """
    if all(given is None for given in (*arguments[1:], *keywords.values())):  # after itself
        keep()
        return None
    waiting = [keep]

    def followed(given: Any) -> Any:
        def called() -> Any:
            loss = given()
            if waiting:
                waiting.pop()()
            return loss

        return called if callable(given) else given

    named = {name: followed(given) for name, given in keywords.items()}
    return (arguments[0], *map(followed, arguments[1:])), named


def weights_behind(outputs: list[torch.Tensor]) -> Iterator[nn.Parameter]:
    """The weights that a backward pass from these would give gradients."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    visited: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node not in visited:
            visited.add(node)
            if type(node).__name__ == "AccumulateGrad" and isinstance(node.variable, nn.Parameter):
                yield node.variable
            waiting += [following for following, _ in node.next_functions if following is not None]


def from_outside(outputs: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> list[Any]:
    """Of each output's gradient what does not come through another one, as that of logits beside a loss does.

    The graph of `outputs` stays.
    """
    sources = _sources(outputs)
    order = [index for index, gradient in enumerate(gradients) if gradient is not None]
    order.sort(key=lambda index: len(sources[index]), reverse=True)  # what is made of others comes first
    found: list[Any] = [None] * len(outputs)
    for index in order:
        total = gradients[index]
        assert total is not None
        later = [i for i in order if found[i] is not None and index in sources[i]]
        inside = None
        if later:
            (inside,) = torch.autograd.grad(
                [outputs[i] for i in later],
                [outputs[index]],
                [found[i] for i in later],
                retain_graph=True,
                allow_unused=True,
            )
        found[index] = total if inside is None else total - inside
        if inside is not None and float(found[index].norm()) <= ROUNDING * float(total.norm()):
            found[index] = None
    return found


def _sources(outputs: list[torch.Tensor]) -> list[set[int]]:
    """For each output the others of which it is made."""
    starts: dict[Any, list[int]] = {}
    for index, tensor in enumerate(outputs):
        if tensor.grad_fn is not None:
            starts.setdefault(tensor.grad_fn, []).append(index)
    found: list[set[int]] = []
    for tensor in outputs:
        visited: set[Any] = set()
        made_of: set[int] = set()
        waiting = [f for f, _ in tensor.grad_fn.next_functions if f] if tensor.grad_fn is not None else []
        while waiting:
            node = waiting.pop()
            if node not in visited:
                visited.add(node)
                made_of.update(starts.get(node, ()))
                waiting += [following for following, _ in node.next_functions if following is not None]
        found.append(made_of)
    return found
