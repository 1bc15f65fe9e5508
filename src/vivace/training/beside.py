"""What training changes of a model beside its `state_dict`: buffers that are not persistent, and plain values
of its modules, such as a counter of steps. A checkpoint holds them, so that a resumed run goes on with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from vivace.torch_internals.modules import own_tensors
from vivace.torch_internals.tensors import version_of

_PLAIN = (bool, int, float, str, type(None))
_TORCHS = ("training",)  # a mode, and no state

Key = tuple[int, str, str]  # model, module, name


class Beside:
    """Made before the first step of a process, of models as they were built.

    Args:
        models: of the session.
        captured: replayed steps change buffers without counting versions, so that all are taken as changed.
        plain: plain values too; of several ranks each may have its own.
    """

    def __init__(self, models: Sequence[nn.Module], *, captured: bool, plain: bool) -> None:
        self._models, self._captured, self._plain = models, captured, plain
        self._built = {key: (value, _version(value)) for key, value in self._held()}

    def state(self) -> list[tuple[int, str, str, Any]]:
        """What is no more as it was built."""
        return [
            (*key, value.detach() if isinstance(value, torch.Tensor) else value)
            for key, value in self._held()
            if (self._captured and isinstance(value, torch.Tensor)) or not self._is_as_built(key, value)
        ]

    def load(self, state: list[tuple[int, str, str, Any]]) -> None:
        """Let the models hold it again."""
        for index, name, key, value in state:
            module = self._models[index].get_submodule(name)
            now = own_tensors(module)[1].get(key)
            if not isinstance(value, torch.Tensor):
                vars(module)[key] = value
            elif now is None:
                own = next(chain(module.parameters(), self._models[index].parameters()), value)
                module.register_buffer(key, value.to(own.device), persistent=False)
            elif now.shape == value.shape and now.dtype == value.dtype:
                with torch.no_grad():
                    now.copy_(value)
            else:
                setattr(module, key, value.to(now.device))

    def _is_as_built(self, key: Key, value: object) -> bool:
        built, version = self._built.get(key, (self, 0))
        if isinstance(value, torch.Tensor):
            return value is built and version_of(value) == version
        return type(value) is type(built) and (value == built or value != value)

    def _held(self) -> Iterator[tuple[Key, Any]]:
        for index, model in enumerate(self._models):
            saved = model.state_dict().keys()
            for name, module in model.named_modules():
                for key, buffer in own_tensors(module)[1].items():
                    if buffer is not None and f"{name}.{key}".lstrip(".") not in saved:
                        yield (index, name, key), buffer
                for key, value in vars(module).items() if self._plain else ():
                    if isinstance(value, _PLAIN) and not key.startswith("_") and key not in _TORCHS:
                        yield (index, name, key), value


def _version(value: object) -> int:
    return version_of(value) if isinstance(value, torch.Tensor) else 0
