"""What fetching a batch does beside giving it, and whether two batches are the same.

In a worker process random numbers come from other streams, and what is noted, opened or written there is not
the script's: data that do any of it are fetched where they always were.
"""

from __future__ import annotations

import concurrent.futures
import functools
import io
import multiprocessing.process
import os
import random
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping

import numpy
import torch

from vivace.tensors import randomness

MOST_THINGS = 2000  # of a data set that are looked at, the nearest first
FEW = 16  # items of a collection, or numbers of an array, that are looked at
PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Open files and connections would be shared with the workers, their place in the file as well.
OPEN_KINDS = {"h5py", "lmdb", "sqlite3", "zipfile", "tarfile", "netCDF4", "tables", "socket"}
STREAMS = {"torch": "torch's", "numpy": "NumPy's", "python": "Python's", "cuda": "the GPU's"}


class Traces:
    """What a fetch can change in this process: random streams, files' places, what its objects remember."""

    def __init__(self, *fetching: object) -> None:
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.random = randomness.capture(torch.device("cuda") if on_gpu else None)
        self.places = _places()
        self.memory, self.holds = memory(*fetching)

    def changed(self, later: Traces) -> str:
        """Why workers cannot do what was done between the two, or empty."""
        for name, whose in STREAMS.items():
            if name in self.random and not _same_stream(self.random[name], later.random[name]):
                return f"fetching draws random numbers from {whose} stream, and workers would draw others"
        moved = [path for path, place in self.places.items() if later.places.get(path, place) != place]
        if moved:
            return f"fetching reads from a file that stays open ('{moved[0].partition(' ')[2]}')"
        if later.holds:
            return f"its data set holds {later.holds}, which workers would share"
        name = changed_memory(self.memory, later.memory)
        return f"fetching changes what its data set remembers ({name})" if name else ""


def changed_memory(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Where two looks by `memory` do not see the same, or empty."""
    changed = (name for name, value in after.items() if name not in before or not _equal(before[name], value))
    return next(changed, "")


def _same_stream(mine: object, theirs: object) -> bool:
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return all(map(_equal, mine, theirs))
    return mine == theirs


def _equal(mine: object, theirs: object) -> bool:
    if isinstance(mine, numpy.ndarray) and isinstance(theirs, numpy.ndarray):
        return numpy.array_equal(mine, theirs)
    return bool(mine is theirs or mine == theirs or (mine != mine and theirs != theirs))


def _places() -> dict[str, int]:
    """Where this process is in each ordinary file that it has open to read from.

    In those that are only written to, such as what the shell made of the standard output, others write too.
    """
    found = {}
    screen = {os.path.realpath(f"/proc/self/fd/{number}") for number in range(3)}
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith("/") and not path.startswith(("/dev/", "/proc/")):
                with open(f"/proc/self/fdinfo/{number}", encoding="ascii") as file:
                    place, flags = (line.split()[1] for line in (file.readline(), file.readline()))
                shown = os.path.realpath(f"/proc/self/fd/{number}") in screen
                if not shown and int(flags, 8) & os.O_ACCMODE != os.O_WRONLY:
                    found[f"{number} {path}"] = int(place)
        except OSError:  # it is the folder's own, or another thread has closed it
            continue
    return found


def memory(*roots: object, most: int = MOST_THINGS) -> tuple[dict[str, object], str]:
    """Values by where they stand, from `roots` on, the nearest first; and what is open or runs, in words.

    Of a list's items, or an array's numbers, the first few; of `most` things in all.
    """
    waiting = deque((type(root).__name__, root) for root in roots)
    seen: dict[int, object] = {}
    values: dict[str, object] = {}
    holds = ""
    while waiting and len(seen) < most:
        name, thing = waiting.popleft()
        if isinstance(thing, PLAIN):
            values[name] = thing
        elif id(thing) not in seen and not isinstance(thing, (type, types.ModuleType)):
            seen[id(thing)] = thing  # kept, for else its id would be given anew
            state = _state(thing)
            if state is not None:
                values[name] = state
                continue
            holds = holds or _held(name, thing)
            waiting.extend((f"{name}.{part}", value) for part, value in _parts(thing))
            if isinstance(thing, (list, tuple, set, frozenset, dict, deque)):
                values[f"the length of {name}"] = len(thing)
    return values, holds


def _state(thing: object) -> object:
    """Of random generators and arrays, whose parts need not be looked at."""
    if isinstance(thing, torch.Generator):
        return thing.get_state().cpu().numpy()
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, numpy.random.RandomState):
        return str(thing.get_state(legacy=False))
    if isinstance(thing, numpy.random.Generator):
        return str(thing.bit_generator.state)
    if isinstance(thing, (torch.Tensor, numpy.ndarray)):
        few = thing.size if isinstance(thing, numpy.ndarray) else thing.numel()
        return str(thing.tolist()) if few <= FEW else tuple(thing.shape)
    return None


def _held(name: str, thing: object) -> str:
    if isinstance(
        thing, (threading.Thread, concurrent.futures.Executor, multiprocessing.process.BaseProcess)
    ):
        return f"threads or processes ({name})"
    module = type(thing).__module__.partition(".")[0]
    if isinstance(thing, io.IOBase) or module in OPEN_KINDS:
        return f"an open file or connection ({name})"
    return ""


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, functools.partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield "self", thing.__self__
    elif isinstance(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        for name, cell in cells:
            with_value = cell.cell_contents if cell != types.CellType() else None
            yield name, with_value
    elif isinstance(thing, Mapping):
        if isinstance(thing, dict):
            yield from ((str(key), value) for key, value in list(thing.items())[:FEW])
    elif isinstance(thing, (list, tuple)):
        yield from ((str(index), value) for index, value in enumerate(thing[:FEW]))
    if not isinstance(thing, types.FunctionType):
        yield from list(getattr(thing, "__dict__", {}).items())
        counted = vars(type(thing)).items() if type(thing).__module__.partition(".")[0] != "torch" else ()
        yield from [(key, value) for key, value in counted if isinstance(value, (bool, int, float, list))]


def contents(thing: object) -> Iterator[tuple[object, object]] | None:
    """What a batch, or a part of one, is made of, with its keys; None for what is compared as one."""
    if isinstance(thing, (torch.Tensor, numpy.ndarray, *PLAIN)):
        return None
    if isinstance(thing, Mapping):
        return iter([(key, thing[key]) for key in thing])
    if isinstance(thing, (list, tuple)):
        return iter(enumerate(thing))
    if isinstance(getattr(thing, "__dict__", None), dict):
        return iter(vars(thing).items())
    return None


def difference(mine: object, theirs: object, name: str = "a batch") -> str:
    """What is not the same bit for bit in two batches, or cannot be compared; or empty."""
    if type(mine) is not type(theirs):
        return f"{name} is a {type(theirs).__name__} there, and a {type(mine).__name__} here"
    parts, others = contents(mine), contents(theirs)
    if parts is not None and others is not None:
        pairs, other_pairs = list(parts), list(others)
        if [key for key, _ in pairs] != [key for key, _ in other_pairs]:
            return f"{name} has other parts there"
        found = (
            difference(one, other, f"{name}[{key!r}]")
            for (key, one), (_, other) in zip(pairs, other_pairs, strict=True)
        )
        return next(filter(None, found), "")
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return "" if _same_tensor(mine, theirs) else f"{name} has other values there"
    if isinstance(mine, numpy.ndarray) and isinstance(theirs, numpy.ndarray):
        same = (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        same = same and mine.dtype != object and mine.tobytes() == theirs.tobytes()
        return "" if same else f"{name} has other values there"
    if isinstance(mine, PLAIN):
        return "" if _equal(mine, theirs) else f"{name} has other values there"
    return f"{name} is a {type(mine).__name__}, which cannot be compared"


def _same_tensor(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The same numbers in the same order of memory; a NaN is equal to itself."""
    alike = (mine.dtype, mine.shape, mine.device) == (theirs.dtype, theirs.shape, theirs.device)
    strided = mine.layout == theirs.layout == torch.strided and mine.stride() == theirs.stride()
    if not alike or not strided or mine.requires_grad or theirs.requires_grad:
        return False
    return torch.equal(_bytes(mine), _bytes(theirs))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def num_bytes(batch: object) -> int:
    """About what a batch takes, handed over."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, numpy.ndarray):
        return batch.nbytes
    if isinstance(batch, (str, bytes)):
        return len(batch)
    return 64 + sum(num_bytes(part) for _, part in contents(batch) or ())
