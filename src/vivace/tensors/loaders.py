"""Data loaders and datasets: copies with other settings, and what reading a sample does."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import random
import time
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vivace.errors import Refused
from vivace.tensors.outside import (
    MOST_ENTRIES,
    MOST_LOOKED_AT,
    PLAIN,
    Outside,
    alike,
    as_it_is,
    is_persons,
    of_library,
)
from vivace.torch_internals.loaders import iterates_itself


def known_length(data: Any) -> int | None:
    """The length of a dataset or loader; None where it has none, or says so only when it is asked."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def that_iterate_themselves(kind: type[DataLoader[Any]]) -> set[type[DataLoader[Any]]]:
    """Of the kinds of loaders made from one those that begin a pass in their own way."""
    below = kind.__subclasses__()
    own = {each for each in below if "__iter__" in vars(each)}
    return own.union(*map(that_iterate_themselves, below))


def data_loader(loader: Iterable[Any], of_a_stream: str) -> DataLoader[Any]:
    """The loader, as one that can be rebuilt.

    Raises Refused where it is not torch's, or iterates in its own way; with the reason `of_a_stream` where
    its dataset is iterable.
    """
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        name = "stream" if kind.__name__ == "IterableData" else kind.__name__
        raise Refused(f"the data is a {name}, not a torch DataLoader")
    if iterates_itself(loader):
        raise Refused(f"your {kind.__name__} iterates in its own way")
    if isinstance(loader.dataset, IterableDataset):
        raise Refused(of_a_stream)
    return loader


def with_other(
    loader: DataLoader[Any],
    dataset: Dataset[Any] | None = None,
    batch_sampler: Iterable[list[Any]] | None = None,
) -> DataLoader[Any]:
    """The same DataLoader over another dataset, or with another batch sampler."""
    same = loader.num_workers, loader.prefetch_factor or 2, loader.persistent_workers
    return with_workers(loader, *same, dataset, batch_sampler)


def with_workers(
    loader: DataLoader[Any],
    num_workers: int,
    prefetch_factor: int,
    persistent: bool,
    dataset: Dataset[Any] | None = None,
    batch_sampler: Iterable[list[Any]] | None = None,
) -> DataLoader[Any]:
    """A DataLoader with the same sampler and functions, with another number of worker processes.

    `dataset` and `batch_sampler` stand in for its own where they are given.
    """
    same: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("collate_fn", "pin_memory", "worker_init_fn", "generator", "in_order")
    }
    if batch_sampler is not None or (loader.batch_size is None and loader.batch_sampler is not None):
        same["batch_sampler"] = loader.batch_sampler if batch_sampler is None else batch_sampler
    else:
        same.update(batch_size=loader.batch_size, sampler=loader.sampler, drop_last=loader.drop_last)
    if num_workers:
        same.update(
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        )
    return DataLoader(loader.dataset if dataset is None else dataset, num_workers=num_workers, **same)


_FILE_OF = ("fp", "fileobj", "fid")  # of zipfile, tarfile, and NumPy's archives
Space = dict[str, Any]  # of an object, or of a file
MUCH = 10**6  # more reads of a dataset than a curriculum has
_UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, TypeError)
_BY_NUMBER = "no sample of your dataset can be read by its number, from 0 on"


_Generator = torch.Generator | random.Random | numpy.random.RandomState | numpy.random.Generator
_WITHOUT_GENERATORS = (*PLAIN, torch.Tensor, numpy.ndarray, types.ModuleType, random.SystemRandom)


class CollatingDataset(Dataset[Any]):
    """A dataset that makes batches itself, in the place of its loader, each from random streams of its own.

    `dataset` is the person's own. `collate` makes a batch of samples; where it is `single`, of a sample that
    is a whole batch already.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    single: bool


def open_file_of(dataset: Dataset[Any]) -> str:
    """The attribute in which a dataset, or the one inside of it, holds an open file; empty where none does.

    Forked workers would read it from one position that they share, and get each other's bytes.
    """
    for one in _nested(dataset):
        for name, value in getattr(one, "__dict__", {}).items():
            inner = (getattr(value, own, None) for own in _FILE_OF)
            if any(map(_is_read_from, (value, *inner))):
                return str(name)
    return ""


def _nested(dataset: Dataset[Any] | Callable[..., Any]) -> Iterator[Any]:
    """A dataset, and the ones inside of it, each once."""
    seen, waiting = set[int](), list[Any]([dataset])
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        several = getattr(one, "datasets", ())  # as of a ConcatDataset
        several = several.values() if isinstance(several, dict) else several
        more = several if isinstance(several, Collection) and not isinstance(several, str) else ()
        waiting += [getattr(one, "dataset", None), *islice(more, MOST_ENTRIES)]


def settings_of(dataset: Dataset[Any]) -> list[tuple[str, Any]]:
    """What a dataset keeps, the ones inside of it, and the person's objects in them, such as a transform, by
    name: numbers, texts, and short containers of such as they are now, the rest as the objects that they are.
    Running workers have copies.
    """
    found = list[tuple[str, Any]]()
    for one in _nested(dataset):
        for owner in () if isinstance(one, CollatingDataset) else _spaces(one):
            for key, value in owner.items():
                found.append((str(key), as_it_is(value) if _is_setting(value) else value))
    return found


def same_settings(now: list[tuple[str, Any]], then: list[tuple[str, Any]]) -> bool:
    """Are two answers of `settings_of` equal? What is no setting, such as a large array, is one object."""
    pairs = zip(now, then, strict=False)
    return len(now) == len(then) and all(
        name == other and (value is before or (_is_setting(value) and alike(value, before)))
        for (name, value), (other, before) in pairs
    )


def _spaces(one: Any) -> list[dict[str, Any]]:
    """The attributes of an object, and those of the person's objects in it."""
    space = getattr(one, "__dict__", {})
    inner = (getattr(value, "__dict__", {}) for value in space.values() if is_persons(value))
    return [own for own in (space, *inner) if isinstance(own, dict)]


def _is_setting(value: object) -> bool:
    if not isinstance(value, list | tuple | dict | set):
        return isinstance(value, PLAIN)
    parts = value.values() if isinstance(value, dict) else value
    return len(value) <= MOST_ENTRIES and all(isinstance(part, PLAIN) for part in parts)


def _is_read_from(file: object) -> bool:
    if type(file).__module__.partition(".")[0] == "h5py":
        return bool(file)  # not where it is closed
    try:
        return isinstance(file, io.IOBase) and not file.closed and file.readable() and file.fileno() >= 0
    except OSError:  # it is in memory
        return False


def hears_epochs(dataset: Dataset[Any]) -> bool:
    """Has a dataset a `set_epoch`, or the one inside of it?"""
    return hasattr(getattr(dataset, "dataset", dataset), "set_epoch") or hasattr(dataset, "set_epoch")


def small_batch(loader: DataLoader[Any]) -> Any:
    """The first two readable samples of a loader's dataset, or the first batch of one that gives batches.

    Collated, with equal random numbers in each call; what is drawn from is given back. Raises Refused where
    no sample can be read by its number.
    """

    def begin() -> None:
        random.seed(0), numpy.random.seed(0), torch.default_generator.manual_seed(0)

    dataset, collate = _readers(loader)
    with _given_back(dataset, collate):
        return collate(_samples(loader, begin))


def _readers(loader: DataLoader[Any]) -> tuple[Any, Any]:
    """The person's own dataset and collate_fn."""
    dataset = loader.dataset
    if isinstance(dataset, CollatingDataset):
        return dataset.dataset, dataset.collate
    return dataset, loader.collate_fn


def _samples(loader: DataLoader[Any], begin: Callable[[], object]) -> Any:
    """What its collate_fn makes a small batch of; `begin` is called before each sample."""
    dataset: Any = loader.dataset
    length = known_length(dataset)
    own = isinstance(dataset, CollatingDataset)
    single = dataset.single if own else loader.batch_sampler is None
    samples = list[Any]()
    for index in range(16 if length is None else min(16, length)):
        begin()
        with contextlib.suppress(*_UNREADABLE):
            samples.append(dataset[index])
        if samples and single:
            return samples[0]
        if len(samples) == 2:
            break
    if not samples:
        raise Refused(_BY_NUMBER)
    return samples


class Drawn(NamedTuple):
    """From where random numbers come while samples are read and made a batch.

    `own` is the name of a generator that the dataset or the collate_fn reaches, empty where none is drawn
    from, or only once it has been seeded anew for the sample; `shared`: from the streams of torch, NumPy or
    Python, which every worker seeds for itself, from a generator that each makes, or nobody knows. `counted`
    is the name of a whole number that the dataset counts up as it reads, and on which samples depend, as in a
    curriculum.
    """

    own: str
    shared: bool
    counted: str


def drawn_by(loader: DataLoader[Any]) -> Drawn:
    """From where the first two samples of a loader and a batch of them draw; all of it is given back."""
    streams, readers = _random_states(), _readers(loader)
    spaces = [(space, dict(space)) for one in _nested(readers[0]) for space in _spaces(one)]
    with _given_back(*readers) as generators:
        begun = {name: Outside([generator], []) for name, generator in generators.items()}
        batch = _looked_at(loader)
        moved = [name for name, state in begun.items() if state.drew()]
        shared = batch is None or not _generators(readers).keys() <= generators.keys()
        if not isinstance(loader.dataset, CollatingDataset):
            shared = shared or _comparable(streams) != _comparable(_random_states())
        if moved and batch is not None:
            _set_random_states(streams)
            ends = {name: Outside([generators[name]], []) for name in moved}
            for name in moved:
                _move(generators[name])
            # A number may be drawn that shows in few samples: the generator then ends elsewhere.
            if alike(_looked_at(loader), batch):
                moved = [name for name, state in ends.items() if state.drew()]
        counted = ""
        for space, before, name in _counts(spaces) if batch is not None else ():
            looks = []
            for more in (0, MUCH):  # whose samples differ by themselves, tell nothing of a count
                for state in begun.values():
                    state.put_back()
                _set_random_states(streams)
                space[name] = before[name] + more
                looks.append(_looked_at(loader))
            if looks[1] is not None and alike(looks[0], batch) and not alike(looks[1], batch):
                counted = name
    return Drawn(next(iter(moved), ""), shared, counted)


def _counts(spaces: Iterable[tuple[Space, Space]]) -> list[tuple[Space, Space, str]]:
    """The whole numbers in these spaces that have become larger; beside each space stands what it held."""
    return [
        (space, before, name)
        for space, before in spaces
        for name, value in space.items()
        if type(value) is type(before.get(name)) is int and value > before[name]
    ]


def _looked_at(loader: DataLoader[Any]) -> tuple[Any] | None:
    """A small batch; its samples where only workers can collate them; None where they cannot be read."""
    try:
        samples = _samples(loader, lambda: None)
    except Exception:  # this is a person's code, and the dataset's keys need not be numbers
        return None
    try:
        return (_readers(loader)[1](samples),)
    except Exception:  # it may ask which worker it is in
        return (samples,) if loader.num_workers else None


def _move(generator: _Generator) -> None:
    """Draw one number."""
    if isinstance(generator, torch.Generator):
        torch.rand(1, generator=generator, device=generator.device)
    else:
        generator.random()


def notices(dataset: Dataset[Any], look: Callable[[], Any]) -> bool:
    """Does ``look()`` see something else once a sample has been read? True if unreadable.

    What is drawn from is given back as it was.
    """
    before = look()
    with _given_back(dataset):
        try:
            dataset[0]
        except Exception:  # the dataset is a person's code, and its keys need not be numbers
            return True
        return bool(before != look())


@contextlib.contextmanager
def _given_back(*readers: Dataset[Any] | Callable[..., Any]) -> Iterator[dict[str, _Generator]]:
    """The random streams of the process, the generators that `readers` reach, by their names, and what
    `readers` and the datasets inside of them keep: what one makes at its first sample, each worker must make.
    """
    streams, generators = _random_states(), _generators(readers)
    begun = Outside(generators.values(), [])
    owners: list[Any] = [one.__self__ if isinstance(one, types.MethodType) else one for one in readers]
    spaces = [space for owner in owners for one in _nested(owner) for space in _spaces(one)]
    kept = [dict(space) for space in spaces]
    try:
        yield generators
    finally:
        begun.put_back()
        for space, then in zip(spaces, kept, strict=True):
            for name in space.keys() - then.keys():
                del space[name]
            space.update(then)
        _set_random_states(streams)


def _generators(readers: Iterable[Dataset[Any] | Callable[..., Any]]) -> dict[str, _Generator]:
    """Each generator of random numbers that a dataset or function reaches, by its name there."""
    found = dict[str, _Generator]()
    shared = (torch.default_generator, random.seed.__self__, numpy.random.get_state.__self__)  # type: ignore
    seen, waiting = set(map(id, shared)), deque[tuple[str, Any]](("", reader) for reader in readers)
    while waiting and len(seen) < MOST_LOOKED_AT:
        path, thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, _WITHOUT_GENERATORS):
            continue
        seen.add(id(thing))
        if isinstance(thing, _Generator):
            found[path or type(thing).__name__] = thing
        else:
            waiting.extend((f"{path}.{name}".strip("."), part) for name, part in _parts(thing))
    return found


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What an object, a container or a function of the person's holds or names."""
    if isinstance(thing, dict):
        yield from islice(((str(key), value) for key, value in dict.items(thing)), MOST_ENTRIES)
    elif isinstance(thing, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(thing[:MOST_ENTRIES]))
    elif isinstance(thing, functools.partial):
        yield from (("", part) for part in (thing.func, thing.args, thing.keywords))
    elif isinstance(thing, types.MethodType | types.BuiltinMethodType):
        yield from (("", part) for part in (thing.__self__, getattr(thing, "__func__", None)))
    elif isinstance(thing, types.FunctionType):
        if not of_library(thing.__module__ or ""):
            with contextlib.suppress(ValueError):  # a variable that is not set yet
                names = inspect.getclosurevars(thing)
                yield from (*names.nonlocals.items(), *names.globals.items())
            yield from (("", part) for part in (thing.__defaults__, thing.__kwdefaults__))
    elif not isinstance(thing, type):
        yield from getattr(thing, "__dict__", {}).items()
        for kind in (each for each in type(thing).__mro__ if not of_library(each.__module__)):
            for name, value in vars(kind).items():
                yield name, getattr(value, "__func__", value)


def _random_states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def _set_random_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])


def _comparable(states: tuple[Any, Any, Any]) -> list[Any]:
    _, words, *position = states[1]
    return [states[0].tolist(), words.tolist(), position, states[2]]


def lengths_of(dataset: Any, seconds: float) -> list[int]:
    """The length of every sample: of its first tensor or list that has one. Reads them all once.

    One that cannot be read has none, and is met again in training. What is drawn from is given back. Raises
    Refused where the dataset has no length, no sample can be read by its number, or that would take more than
    `seconds`.
    """
    found, begin, total = list[int](), time.monotonic(), known_length(dataset)
    if total is None:
        raise Refused("your dataset has no length")
    with _given_back(dataset):
        for index in range(total):
            found.append(0)
            with contextlib.suppress(*_UNREADABLE):
                found[-1] = _length_of(dataset[index])
            spent = time.monotonic() - begin
            if index == 63 and spent / 64 * total > seconds:
                raise Refused(f"reading the lengths of {total:,} samples would take too long")
    if not any(found):
        raise Refused(_BY_NUMBER)
    return found


def _length_of(sample: object) -> int:
    if not isinstance(sample, Collection) or getattr(sample, "ndim", 1) == 0:
        return 1
    if isinstance(sample, torch.Tensor | numpy.ndarray | str):
        return len(sample)
    for value in sample.values() if isinstance(sample, Mapping) else sample:
        if isinstance(value, list | tuple | str) or getattr(value, "ndim", 0) > 0:
            return len(value)
    return len(sample)
