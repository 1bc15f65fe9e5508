"""Do pieces of a batch train the loss of the whole batch? Asked before a run that lacks memory cuts its own.

Contrastive losses, rankings, weighted means and a batch normalization of a person's own look at samples side
by side: half a batch is another loss. Seen by passes without gradients, which take less memory than a step.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from vivace.errors import Refused, ran_out_of_memory
from vivace.job import Batch
from vivace.session.session import Session
from vivace.tensors import randomness
from vivace.tensors.modules import untouched
from vivace.tensors.outside import Outside
from vivace.tensors.trees import batch_size, split
from vivace.torch_internals.tensors import Operator, OperatorMode

DRAWS = 16  # passes of each kind, where the loss is another one each time
ERRORS = 5.0  # standard errors between the means of two kinds that are not the same
ROUNDING = 1e-4  # of a loss, in fp32
ROUNDOFFS = 8.0  # of the plan or the loss's type, where these are coarser
_DROPOUT = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


class Unknown(Exception):
    """It cannot be told whether pieces give the batch's own loss; the message says why."""


def why_not_cut(session: Session, batch: Batch, pieces: int, *, alone: bool = True) -> str:
    """Why the session may not cut a batch, which it runs in so many `pieces` by now, into twice as many;
    empty where it may. Weights, buffers, random streams and the loss's Python state stay as they are.

    Args:
        alone: no other rank takes part; else none is waited for.

    Raises Unknown where no two samples fit into memory, or the loss waits for other ranks.
    """
    build, model = session.build, session.model
    loss = build.loss
    assert loss is not None
    forward = session.seams.forward if alone else lambda part: loss(model, part)
    streams, outside = randomness.capture(build.device), Outside((loss,), build.models, store="cpu")
    try:
        with _on(build.device), _unmasked(build.models), _quiet(alone):
            batch = session.place(batch)
            return _compared(session, forward, batch, -(-batch_size(batch) // pieces))
    finally:
        outside.put_back()
        randomness.restore(streams, build.device)


def _compared(session: Session, forward: Callable[[Any], Any], batch: Batch, size: int) -> str:
    """The same, by the first `size` samples, or as many of them as fit."""
    while size >= 2:
        try:
            part = split(batch, size)[0]
            parts = split(part, -(-size // 2))
        except Refused as refused:
            return str(refused)
        try:
            return _difference(session, forward, part, parts)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
        size //= 2
    raise Unknown("no two samples fit into memory")


def _difference(session: Session, forward: Callable[[Any], Any], whole: Batch, parts: list[Any]) -> str:
    roundoff, differentiates = session.plan.unit_roundoff, False

    def loss_of(part: Batch) -> float:
        nonlocal roundoff
        with contextlib.ExitStack() as stack:
            for model in session.build.models:
                stack.enter_context(untouched(model))
            stack.enter_context(torch.set_grad_enabled(differentiates))
            found = forward(part)
            if found.is_floating_point():
                roundoff = max(roundoff, torch.finfo(found.dtype).eps)
            return float(found.detach())

    def cut() -> tuple[float, float]:
        rows = [(batch_size(part) / batch_size(whole), loss_of(part)) for part in parts]
        return sum(share * loss for share, loss in rows), sum(share * abs(loss) for share, loss in rows)

    try:
        wholes = [loss_of(whole)]
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        differentiates = True  # as a gradient penalty needs it
        wholes = [loss_of(whole)]
    wholes.append(loss_of(whole))
    try:
        cuts = [cut()]
        if wholes[0] != wholes[1]:  # it draws random numbers
            cuts += [cut() for _ in range(DRAWS - 1)]
            wholes += [loss_of(whole) for _ in range(DRAWS - 2)]
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), "")
        return f"the loss of a piece of the batch fails ({type(error).__name__}: {reason})"
    one, several = statistics.fmean(wholes), statistics.fmean(value for value, _ in cuts)
    if not math.isfinite(one):
        raise Unknown(f"the loss is {one}")
    noise = math.sqrt(_variance(wholes) + _variance([value for value, _ in cuts]))
    scale = max(abs(one), *(size for _, size in cuts))
    if abs(one - several) <= max(ROUNDING, ROUNDOFFS * roundoff) * scale + ERRORS * noise:
        return ""
    return (
        f"the loss is no mean over samples: it is {one:.6g} for {batch_size(whole)} of them at once, and "
        f"{several:.6g} for these in {len(parts)} pieces"
    )


def _variance(values: list[float]) -> float:
    """Of their mean."""
    return statistics.variance(values) / len(values) if len(values) > 1 else 0.0


@contextlib.contextmanager
def _unmasked(models: list[nn.Module]) -> Iterator[None]:
    """Inside, dropout lets all through: its masks say nothing of what pieces do."""
    masking = [
        one for model in models for one in model.modules() if isinstance(one, _DROPOUT) and one.training
    ]
    for module in masking:
        module.training = False
    try:
        yield
    finally:
        for module in masking:
            module.training = True


def _on(device: torch.device) -> Any:
    """Inside, CUDA's current device is this one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _quiet(alone: bool) -> contextlib.AbstractContextManager[Any]:
    """Inside, where others wait for this rank, no exchange with them begins."""
    return contextlib.nullcontext() if alone else _Alone()  # type: ignore[no-untyped-call]


class _Alone(OperatorMode):  # type: ignore[no-untyped-call]
    """Inside, no exchange with other ranks begins, as they do not take part: Unknown is raised."""

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        if func.namespace.startswith(("c10d", "_c10d")):
            raise Unknown("the loss waits for other ranks")
        return func(*args, **kwargs)
