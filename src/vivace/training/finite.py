"""Numbers that are not finite: found before they reach the weights, and the first module that makes them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vivace.session.session import Session
from vivace.tensors.trees import tensors

if TYPE_CHECKING:
    from vivace.tensors.shards import Shards

FAR = 10.0  # times the loss with which a run began: told
LOST = 1e4  # times: no training comes back from there


class NotFinite(Exception):
    """The loss or a gradient of the step that was begun is not finite; the message says which."""


class Careful:
    """Looks at loss and gradients of every step, before the weights are updated.

    Of gradients that loss scaling has in its care, it looks at the loss alone. Raises NotFinite.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._observing = contextlib.ExitStack()
        self._observing.enter_context(session.seams.observed(gradients=self._gradients, finish=self._finish))

    def close(self) -> None:
        """Look no more."""
        self._observing.close()

    def _gradients(self, following: Callable[[Any], Any], batch: object) -> Any:
        loss = following(batch)
        if not math.isfinite(float(loss)):
            raise NotFinite(f"the loss is {float(loss)}")
        return loss

    def _finish(self, following: Callable[[], None]) -> None:
        following()
        if self._session.build.facts.skipped_steps is None and (name := bad_gradient(self._session)):
            raise NotFinite(f"the gradient of '{name}' is not finite, though the loss is")


def bad_gradient(session: Session) -> str:
    """The last weight in the model whose gradient is not finite: the backward pass meets it first."""
    named = [pair for model in session.build.models for pair in model.named_parameters()]
    known = [(name, one.grad) for name, one in named if one.grad is not None]
    fine = are_finite([gradient for _, gradient in known], session.build.shards)
    bad = [name for (name, _), good in zip(known, fine, strict=True) if not good]
    return bad[-1] if bad else ""


def are_finite(found: Sequence[torch.Tensor], shards: Shards | None) -> list[bool]:
    """Which tensors hold finite numbers alone. With `shards` all ranks call it together."""
    return [bool(torch.isfinite(one).all()) for one in found] if shards is None else shards.finite(found)


def first_bad_module(session: Session, batch: object) -> str:
    """Where the first number that is not finite comes from in a forward pass over `batch`, in words."""
    if session.build.shards is not None:  # forward passes are exchanges, and batches differ from rank to rank
        return "which module begins with it is not sought where each rank holds a part of the weights"
    weights = [name for model in session.build.models for name, one in _state(model) if not _finite(one)]
    if weights:
        return f"'{weights[0]}' of the model is not finite"
    if not _finite(batch):
        return "the batch holds numbers that are not finite"
    with _watched(session) as found, torch.no_grad(), contextlib.suppress(Exception):
        session.seams.forward(session.place(batch))
    if found:
        return f"the first numbers that are not finite leave {found[0]}"
    return "what the model gives is still finite"


@contextlib.contextmanager
def _watched(session: Session) -> Iterator[list[str]]:
    """The modules with finite inputs and an output that is not finite, the innermost first."""
    found: list[str] = []
    hooks = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            if not found and not _finite(output) and _finite(inputs):
                found.append(f"the module '{name}' ({type(module).__name__})")

        return hook

    for model in session.build.models:
        for name, module in model.named_modules():
            hooks.append(module.register_forward_hook(look(name)))
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _finite(tree: object) -> bool:
    floating = (one for one in tensors(tree) if one.is_floating_point() or one.is_complex())
    return all(bool(torch.isfinite(one).all()) for one in floating)


class Growth:
    """Notices a loss far above the one with which the run, or this part of it, began."""

    def __init__(self) -> None:
        self._first: float | None = None
        self.told = False

    def times(self, loss: float) -> float:
        """How many times above its start the loss is; 1 for an unknown start. A start below 1 counts as 1."""
        if self._first is None:
            self._first = loss if math.isfinite(loss) else None
            return 1.0
        return loss / max(abs(self._first), 1.0)

    @property
    def first(self) -> float:
        """The loss with which it began."""
        return self._first if self._first is not None else math.nan
