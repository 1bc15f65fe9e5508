"""One training step, composed of seams: what the person wrote, and what techniques made of it.

    batch -> place -> step: [ forward -> backward -> finish -> (on_gradients) -> update ] -> mean loss
                              '---- gradients ----'

This module imports no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Seam(enum.StrEnum):
    """The places of a step that a technique may wrap or replace, with the signatures of their functions."""

    BATCHES = "batches"  # (loader) -> iterable of batches
    VALIDATION = "validation"  # (loader) -> iterable of the same batches, which the metric reads
    PLACE = "place"  # (batch) -> batch on the device
    FORWARD = "forward"  # (batch) -> scalar loss
    BACKWARD = "backward"  # (scalar loss) -> None
    ACCUMULATING = "accumulating"  # () -> context in which gradients stay on this rank
    GRADIENTS = "gradients"  # (batch) -> detached mean loss
    FINISH = "finish"  # () -> None
    UPDATE = "update"  # () -> None
    STEP = "step"  # (placed batch) -> detached mean loss


class Step:
    """The composed function of every seam, by its name. There is one such object for a session.

    Whoever calls a seam looks it up here at each call, a technique that calls other seams too, so that what
    `observed` puts around a seam sees every call of it.
    """

    batches: Callable[[Any], Iterable[Any]]
    validation: Callable[[Any], Iterable[Any]]
    place: Callable[[Any], Any]
    forward: Callable[[Any], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    accumulating: Callable[[], AbstractContextManager[Any]]
    gradients: Callable[[Any], torch.Tensor]
    finish: Callable[[], None]
    update: Callable[[], None]
    step: Callable[[Any], torch.Tensor]

    def __init__(self, functions: Mapping[Seam, Callable[..., Any]]) -> None:
        for seam, function in functions.items():
            setattr(self, seam.value, function)

    @contextmanager
    def observed(self, **observers: Callable[..., Any]) -> Iterator[None]:
        """Inside, ``observer(following, *arguments)`` stands in place of the seam whose name it has.

        `following` is the seam's function, which the observer calls once, and whose result it returns. A seam
        that is not called from outside, such as `update` in a captured step, is not seen. Observers nest: the
        last to begin is the outermost, and the first to end. Raises ValueError on a name that is no seam.
        """
        before = {name: getattr(self, Seam(name)) for name in observers}
        for name, observer in observers.items():
            setattr(self, name, partial(observer, before[name]))
        try:
            yield
        finally:
            vars(self).update(before)
