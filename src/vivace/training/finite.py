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

FAR = 10.0  # times the first loss: from here on a notice warns
LOST = 1e4  # times the first loss: the training has diverged
_LOWER = 0.1  # of the first loss; a fall that is smaller counts as noise
_SMALL = 0.1  # least root mean square of the first weights: some models begin with zeros
_FEW_WEIGHTS, _FEW_NUMBERS = 8, 4096
_SEEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


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
        """Stop looking, and take the observers out of the session."""
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
    if shards is not None:
        return shards.finite(found)
    dense = (one.coalesce().values() if one.is_sparse else one for one in found)  # as embeddings' may be
    return [bool(torch.isfinite(one).all()) for one in dense]


def first_bad_module(session: Session, batch: object) -> str:
    """Where the first number that is not finite comes from in a forward pass over `batch`, in words."""
    if session.build.shards is not None:  # forward passes are exchanges, and batches differ from rank to rank
        return "which module begins with it is not sought where each rank holds a part of the weights"
    weights = [name for model in session.build.models for name, one in _state(model) if _is_lost(one)]
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


def _is_lost(own: torch.Tensor) -> bool:
    """Is a weight not finite? What is not trained may hold -inf, as a mask does, and is lost as NaN."""
    return not _finite(own) if own.requires_grad else bool(torch.isnan(own).any())


def _finite(tree: object) -> bool:
    floating = (one for one in tensors(tree) if one.is_floating_point() or one.is_complex())
    return all(bool(torch.isfinite(one).all()) for one in floating)


class Growth:
    """Notices a loss far above the one with which the run, or this part of it, began, and weights that have
    grown as far while the loss came no lower, as those of a bounded loss do.

    Updates far larger than the weights end there: looked at are the first numbers of a few weights.
    """

    def __init__(self, session: Session) -> None:
        self._in_the_dark = session.build.own_step  # what its loss means is not known
        self._first: float | None = None
        self._session: Session | None = None
        self._weights: Sequence[torch.Tensor] = ()
        self.told = False
        self._norm = 1.0
        self._norm = max(self.of_weights(session), _SMALL)

    def of_weights(self, session: Session) -> float:
        """How many times as large as in the beginning this rank's weights are."""
        if self._in_the_dark:
            return 1.0
        if session is not self._session:
            weights = (p for model in session.build.models for p in model.parameters())
            trained = [p for p in weights if p.requires_grad and p.dtype in _SEEN]
            self._session, self._weights = session, trained[:: max(1, len(trained) // _FEW_WEIGHTS)]
        parts = [_beginning(weight, session.build.shards) for weight in self._weights]
        num = max(1, sum(part.numel() for part in parts))
        return float(torch.nn.utils.get_total_norm(parts)) / math.sqrt(num) / self._norm

    def judge(self, loss: float, weights: float) -> tuple[float, str]:
        """How many times above its start the worse of both is, and that in words; 1 for an unknown start. A
        loss that began below 1 counts as one that began at 1.
        """
        if self._first is None or self._in_the_dark:
            self._first = loss if math.isfinite(loss) else None
            return 1.0, ""
        risen = loss / max(abs(self._first), 1.0)
        if weights > max(risen, FAR) and loss > self._first - _LOWER * abs(self._first):
            grown = f"the weights have grown {weights:.4g} times (from at least {_SMALL})"
            return weights, f"{grown}, and the loss is no lower"
        return risen, f"the loss is {loss:.4g}, which began at {self._first:.4g}"


def _beginning(weight: torch.Tensor, shards: Shards | None) -> torch.Tensor:
    """A view of about the first numbers of a weight, or of this rank's part of it."""
    own = weight.detach() if shards is None else shards.local(weight.detach())
    if not own.dim() or not own.numel():
        return own
    return own[: max(1, _FEW_NUMBERS * len(own) // own.numel())]
