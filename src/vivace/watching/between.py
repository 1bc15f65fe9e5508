"""Between two steps nothing may change what a session holds: its weights, buffers, states of optimizers, and
what techniques keep. Digests show whether it did, and copies on the host put it back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch

from vivace.session.session import Session
from vivace.tensors.modules import named_buffers, named_parameters
from vivace.tensors.optimizers import align_state
from vivace.tensors.trees import map_tensors
from vivace.torch_internals.tensors import dense_parts
from vivace.verifying.displacement import State
from vivace.verifying.states import kept_states, parameter_names

Digests = dict[str, str]
_PLAIN = (bool, int, float, str, type(None))
_WORD_BYTES = 8
_FEW_WORDS = 4096


class Rest:
    """What a session held after `step` steps."""

    def __init__(self, session: Session, step: int) -> None:
        self.session, self.step = session, step
        self.digests = digests(session)
        self._tensors = {name: _to_host(tensor) for name, tensor in _own_tensors(session)}
        self._states = [
            (optimizer, parameter, {key: map_tensors(value, _to_host) for key, value in state.items()})
            for optimizer in session.optimizers
            for parameter, state in optimizer.state.items()
        ]
        self._kept = kept_states(session)

    @property
    def state(self) -> State:
        """The weights and buffers, by name."""
        kinds = ("weight ", "buffer ")
        return State(
            *({n.removeprefix(k): t for n, t in self._tensors.items() if n.startswith(k)} for k in kinds)
        )

    def put_back(self) -> None:
        """Let the session hold it again, in the same memory where that is still there."""
        with torch.no_grad():
            for name, tensor in _own_tensors(self.session):
                if name in self._tensors and self._tensors[name].shape == tensor.shape:
                    tensor.copy_(self._tensors[name])
            for optimizer in self.session.optimizers:
                known = [id(parameter) for one, parameter, _ in self._states if one is optimizer]
                for parameter in [found for found in optimizer.state if id(found) not in known]:
                    del optimizer.state[parameter]
            for optimizer, parameter, state in self._states:
                _put_into(optimizer.state[parameter], state, parameter)
        align_state(self.session.optimizers)
        for name, state in self._kept.items():
            self.session.build.kept[name].load_state_dict(copy.deepcopy(state))


def digests(session: Session) -> Digests:
    """A number for each thing that a session holds, as text, by its name for a person: weights first.

    Any bit that changes changes it. It is computed where the tensor is, and does not depend on the order in
    which the tensor lies in memory.
    """
    found: Digests = {}
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, value in _held(session):
        if isinstance(value, torch.Tensor):
            found[name] = f"{tuple(value.shape)} {value.dtype}"
            sums.setdefault(value.device, []).append((name, sums_of(value)))
        else:
            found[name] = repr(value)
    for rows in sums.values():
        numbers = torch.stack([row for _, row in rows]).tolist()
        for (name, _), row in zip(rows, numbers, strict=True):
            found[name] += "".join(f" {number % 2**64:x}" for number in row)
    return found


def changed(then: Digests, now: Digests) -> list[str]:
    """The names of what is not what it was, is gone or is new, in the order of `digests`."""
    return [name for name in {**then, **now} if then.get(name) != now.get(name)]


def told(name: str, then: Digests, now: Digests) -> str:
    """How it has changed."""
    if name not in now:
        return f"the {name} is gone"
    return f"the {name} is {'new' if name not in then else 'not what it was'}"


def _held(session: Session) -> Iterator[tuple[str, Any]]:
    names = parameter_names(session)
    yield from _own_tensors(session)
    for optimizer in session.optimizers:
        for number, (parameter, state) in enumerate(optimizer.state.items()):
            of = names.get(id(parameter), f"parameter {number}")
            for key, value in state.items():
                yield from _leaves(f"{key} of {of} in the optimizer", value)
    for name, stateful in session.build.kept.items():
        yield from _leaves(f"state of {name}", stateful.state_dict())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and plain values in containers."""
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in items:
            yield from _leaves(f"{name} ({key})", one)


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Three sums over the bits of a tensor, which change with any of them, and where two are exchanged; of a
    sparse one over the numbers and places that it stores.
    """
    tensor = tensor.detach()
    parts = dense_parts(tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor)
    rows = torch.stack([_sums(part) for part in parts])
    return (rows * torch.arange(1, 2 * len(parts), 2, device=rows.device)[:, None]).sum(0)


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.to_dense().resolve_conj().resolve_neg().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    num_words = octets.numel() // _WORD_BYTES
    words = octets[: num_words * _WORD_BYTES].view(torch.int64)
    columns = math.isqrt(num_words) if num_words > _FEW_WORDS else 1
    rows = num_words // columns
    body, tail = words[: rows * columns].view(rows, columns), words[rows * columns :]
    odd = octets[num_words * _WORD_BYTES :].to(torch.int64)
    return torch.stack([_weighed(body.sum(1)), _weighed(body.sum(0)) + _weighed(tail), _weighed(odd)])


def _weighed(numbers: torch.Tensor) -> torch.Tensor:
    """A sum that knows the places. The factors are odd, so that none loses a bit in 64."""
    places = torch.arange(numbers.numel(), device=numbers.device)
    return (numbers * (2 * places + 1)).sum()


def _own_tensors(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in named_parameters(session.build.models):
        yield f"weight {name}", parameter
    for name, buffer in named_buffers(session.build.models):
        yield f"buffer {name}", buffer


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _put_into(state: dict[str, Any], saved: dict[str, Any], parameter: torch.Tensor) -> None:
    """Give one parameter's state the saved values again."""
    for key in [key for key in state if key not in saved]:
        del state[key]
    for key, value in saved.items():
        now = state.get(key)
        if not isinstance(value, torch.Tensor):
            state[key] = map_tensors(value, lambda one: one.to(parameter.device, copy=True))
        elif isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
            now.copy_(value)
        else:  # a counter stays on the host, where optimizers keep it
            state[key] = value.to(parameter.device if value.dim() else "cpu", copy=True)
