"""A step of the script's, kept so that it can be run again on copies: the call, and what came back to it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from vivace.live.refusals import device_of
from vivace.profiling.record.hooks import tensors_of
from vivace.tensors import randomness


class CannotKeep(Exception):
    """This step cannot be run again; the message says why, in words for a person."""


class Kept:
    """Made just before a call of the root; `returned` after it. `is_complete` once the backward pass is over.

    `things` are copies of root, optimizer, arguments and keywords, from before the call; `gradients` are the
    loss's with respect to the outputs, in the order of `tensors_of`, None where it does not depend on one
    directly; `of_weights` those of the parameters by name, as the script got them.
    """

    def __init__(self, root: nn.Module, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self.device = device_of(root)
        if any(t.requires_grad for t in tensors_of([list(arguments), keywords])):
            raise CannotKeep("its model is called with tensors that are differentiated")
        self.random = randomness.capture(self.device)
        try:
            self.things = copy.deepcopy((root, optimizer, arguments, keywords))
        except Exception as error:
            raise CannotKeep(f"its model cannot be copied: {error}") from None
        self.gradients: list[torch.Tensor | None] = []
        self.of_weights: dict[str, torch.Tensor] = {}
        self.names = {id(p): name for name, p in root.named_parameters()}
        self._handles: list[Any] = []
        self._expects = [p for p in root.parameters() if p.requires_grad]

    @property
    def is_complete(self) -> bool:
        """Has the loss's gradient come back to the outputs and to the weights?"""
        return bool(self.of_weights) and any(g is not None for g in self.gradients)

    def returned(self, outputs: Any) -> None:
        """Wait for the gradients of what the call returned."""
        found = list(tensors_of(outputs))
        self.gradients = [None] * len(found)
        inner = _inner(found)
        for index, tensor in enumerate(found):
            if tensor.requires_grad and index not in inner:
                self._listen(tensor, self._output_hook(index))
        for parameter in self._expects:
            self._listen(parameter, self._weight_hook(self.names[id(parameter)]))

    def end(self) -> None:
        """No longer listen."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._expects = []

    def _listen(self, tensor: Any, hook: Any) -> None:
        self._handles.append(tensor.register_hook(hook))

    def _output_hook(self, index: int) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            if self.gradients[index] is None:
                self.gradients[index] = gradient.detach().clone()

        return hook

    def _weight_hook(self, name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            self.of_weights.setdefault(name, gradient.detach().clone())

        return hook


def _inner(outputs: list[torch.Tensor]) -> set[int]:
    """Those of which another output is made, as the logits beside a loss.

    Their gradient comes from inside of the model, and a second time it would count twice.
    """
    starts = {tensor.grad_fn: index for index, tensor in enumerate(outputs) if tensor.grad_fn is not None}
    found: set[int] = set()
    for tensor in outputs:
        visited: set[Any] = set()
        waiting = [f for f, _ in tensor.grad_fn.next_functions if f] if tensor.grad_fn is not None else []
        while waiting:
            node = waiting.pop()
            if node in visited:
                continue
            visited.add(node)
            if node in starts:
                found.add(starts[node])
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found
