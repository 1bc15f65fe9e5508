"""Random streams: capture, restore, and own streams beside the main ones for data and metrics."""

from __future__ import annotations

import hashlib
import random
import time
from types import TracebackType
from typing import Any, Self

import numpy
import torch

from vivace.torch_internals.numbers import put_second_normal, second_normal

FIRST_STEPS = 8  # before which all streams are noted
MOST_SHARE = 0.004  # of the time, for noting streams that no step has moved
_States = tuple[Any, ...]


def derive(*parts: object) -> int:
    """A seed of 63 bits that depends on all of `parts` and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """The state of the random streams of Python, NumPy, torch and, where `device` is a GPU, of that GPU."""
    return {**host_state(), **torch_state(device)}


def host_state() -> dict[str, Any]:
    """The state of Python's and NumPy's streams, whose copies take about 0.1 ms."""
    return {"python": random.getstate(), "numpy": numpy.random.get_state()}


def torch_state(device: torch.device | None) -> dict[str, Any]:
    """The state of torch's stream on the CPU and, where `device` is a GPU, on that GPU."""
    state = {"torch": torch.default_generator.get_state()}
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def same_host_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Are Python's and NumPy's streams at one place in both states?"""
    return not {"python", "numpy"} & moved(one, other)


def moved(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """The streams of the CPU that are not where they were."""
    (name, keys, *rest), (other_name, other_keys, *other_rest) = before["numpy"], now["numpy"]
    same = {
        "python": before["python"] == now["python"],
        "numpy": (name, rest) == (other_name, other_rest) and numpy.array_equal(keys, other_keys),
        "torch": "torch" not in before or torch.equal(before["torch"], now["torch"]),
    }
    return {stream for stream, is_same in same.items() if not is_same}


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Continue the streams where `capture` found them; those of them that `state` holds."""
    for stream, put in (
        ("python", random.setstate),
        ("numpy", numpy.random.set_state),
        ("torch", torch.set_rng_state),
    ):
        if stream in state:
            put(state[stream])
    if device is not None and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class StreamNotes:
    """The random streams as they were before a step. torch's cost 1 us and are noted before every step.

    Python's and NumPy's cost 0.1 ms, and few steps draw from them. Where the first steps left them alone,
    they are noted as often as takes `MOST_SHARE` of the time; from the first move on, before every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch: dict[str, Any] = {}
        self._host: dict[str, Any] = {}
        self._num_notes, self._due = 0, 0.0
        self._move = self._fresh = False

    def take(self, *, whole: bool = False) -> None:
        """Note the present state; called before every step. With `whole`, of every stream."""
        self._torch = torch_state(self._device)
        begin = time.perf_counter()
        self._fresh = whole or self._move or self._num_notes < FIRST_STEPS or begin >= self._due
        if self._fresh:
            before, self._host = self._host, host_state()
            self._move = self._move or (bool(before) and not same_host_state(before, self._host))
            self._num_notes += 1
            end = time.perf_counter()
            self._due = end + (end - begin) / MOST_SHARE

    def now(self) -> dict[str, Any]:
        """The streams after a step. Those that no step moves are as they were noted last."""
        host = self._host if self._host and not self._move else host_state()
        return {**host, **torch_state(self._device)}

    def put_back(self) -> str:
        """Go back to the last `take`; returns what could not be put back, else an empty string."""
        if not self._fresh and not same_host_state(self._host, now := host_state()):
            restore({**now, **self._torch}, self._device)
            return "Python's or NumPy's random stream began to move, in this step or one shortly before"
        self.restore()
        self._fresh = True
        return ""

    def restore(self) -> None:
        """Put back the streams alone, after `put_back` has said that they are known."""
        restore({**self._host, **self._torch}, self._device)


def to_plain(state: dict[str, Any]) -> dict[str, Any]:
    """A captured state as lists, numbers and tensors, which `torch.load` reads without running code."""
    name, keys, *rest = state["numpy"]
    version, words, gauss = state["python"]
    plain = {"python": [version, list(words), gauss], "numpy": [name, keys.tolist(), *rest]}
    return {**state, **plain}


def from_plain(plain: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `to_plain`."""
    name, keys, *rest = plain["numpy"]
    version, words, gauss = plain["python"]
    state = {"python": (version, tuple(words), gauss)}
    return {**plain, **state, "numpy": (name, numpy.array(keys, dtype=numpy.uint32), *rest)}


def seed_streams(seed: int) -> None:
    """Let the CPU's streams begin at `seed`, and leave every GPU's as it is, unlike `torch.manual_seed`."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


_SPARE: list[numpy.random.MT19937] = []  # to make one takes 50 microseconds, more than to seed it


def _spare_generator() -> numpy.random.MT19937:
    """One that nobody needs any more, in whatever state, or a new one."""
    try:
        return _SPARE.pop()
    except IndexError:
        return numpy.random.MT19937(0)


class Streams:
    """Own random streams, seeded once: entered, they stand in for the main ones; left, both are as they were.

    Args:
        seed: a seed of up to 63 bits.
        device: a GPU whose stream is kept apart too; the CPU's streams always are.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self.seed = seed
        self.device = device if device is not None and device.type == "cuda" else None
        self._numpy: numpy.random.MT19937 | None = None  # put in place whole: copying its state takes 0.1 ms
        self._own: _States | None = None
        self._outer: tuple[Any, _States] = (None, ())

    def __enter__(self) -> Self:
        self._outer = numpy.random.mtrand.get_bit_generator(), self._states()
        if self._numpy is None:
            self._numpy = _spare_generator()
        numpy.random.mtrand.set_bit_generator(self._numpy)
        if self._own is not None:
            self._put(self._own)
            return self
        seed_streams(self.seed)
        if self.device is not None:
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(self.seed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = self._states()
        self._leave()

    def _leave(self) -> None:
        numpy_before, states = self._outer
        numpy.random.mtrand.set_bit_generator(numpy_before)
        self._put(states)

    def _states(self) -> _States:
        cuda = torch.cuda.get_rng_state(self.device) if self.device is not None else None
        return random.getstate(), second_normal(), torch.get_rng_state(), cuda

    def _put(self, states: _States) -> None:
        python, normal, cpu, cuda = states
        random.setstate(python)
        put_second_normal(normal)
        torch.set_rng_state(cpu)
        if cuda is not None:
            assert self.device is not None
            torch.cuda.set_rng_state(cuda, self.device)


class SeededStreams(Streams):
    """Streams that begin at `seed` again at each entry; where they end is not kept, which is cheaper."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self._numpy is not None:
            _SPARE.append(self._numpy)
            self._numpy = None
