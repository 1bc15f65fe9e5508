"""Steps of a loop whose weights no optimizer of torch's updates: a library's own, or lines of the script."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vivace.live.refusals import several
from vivace.profiling.record.hooks import Patches
from vivace.torch_internals.tensors import in_backward

if TYPE_CHECKING:
    from vivace.live.loop import Loop

CHANGES = 3  # of the weights between backward passes, before it is certain that no optimizer of torch's steps


class OwnUpdate(torch.optim.Optimizer):
    """Stands for what updates the weights, which goes on as it is. Only copies of a step are updated by this,
    by their gradients, so that a proof compares these.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__([p for p in root.parameters() if p.requires_grad], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Subtract the gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad)


class OwnUpdates:
    """Where the weights of the only model change, and no optimizer of torch's has stepped, steps of the
    `loop` end where a backward pass has returned.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._stands: OwnUpdate | None = None
        self._root: weakref.ref[nn.Module] = weakref.ref(nn.Module())
        self._changes, self._sums = 0, list[float]()
        self._patches, self._thread = Patches(loop.guard), threading.get_ident()

    def install(self) -> None:
        """Listen to backward passes, before anything else does."""
        self._patches.replace(torch.autograd, "backward", self._backward)

    def looked(self) -> None:
        """It is known by now how the loop's steps end; nothing else listens to backward passes."""
        if self._stands is None:
            self.restore()

    def restore(self) -> None:
        """Leave torch as it was."""
        self._patches.restore()
        self._stands = None

    def _backward(self, original: Callable[..., Any]) -> Any:
        def backward(*arguments: object, **keywords: object) -> Any:
            result = original(*arguments, **keywords)
            if threading.get_ident() == self._thread and not in_backward():
                self._went_backward()
            return result

        return backward

    def _went_backward(self) -> None:
        loop = self._loop
        if self._root() is None and self._stands is not None:  # the script trains another one
            self._stands = None
            loop.look_anew()
        is_told = loop.seen.optimizers or loop.of_threads or several()
        if self._stands is None and not is_told and len(loop.seen.roots) == 1:
            self._look(loop.seen.root)
        if self._stands is not None:
            loop.stepped(self._stands)

    def _look(self, root: nn.Module) -> None:
        before = self._sums
        self._sums = [float(p.detach().sum()) for p in root.parameters() if p.requires_grad]
        if self._root() is root:
            self._changes += before != self._sums
        else:
            self._root, self._changes = weakref.ref(root), 0
        if self._changes == CHANGES:
            self._stands = OwnUpdate(root)
