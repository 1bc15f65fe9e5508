"""What a model is called with: the calls that the job's metric makes on the person's own validation data.

Each call is kept as the flat list of its tensors; how they stand in arguments and keywords is its template.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from vivace.data.damage import Damage
from vivace.data.order import ordered
from vivace.errors import JobError, Refused
from vivace.job import Job
from vivace.serving.values import array_of, is_object, padding_computed, require_alike
from vivace.session.opening import call
from vivace.tensors.modules import in_evaluation
from vivace.tensors.randomness import Streams, derive
from vivace.tensors.trees import Tree, batch_size, bytes_of, contents, map_tensors, tensors
from vivace.training.evaluation import finite

MOST_BYTES = 2**30  # of the batches that are kept, and of what the model returns for them
INPUTS = "inputs.npz"
FACTS = "calls.json"
NEVER_CALLED = (
    "the job's metric never calls the model that it is given (it may call one of its parts or methods "
    "instead): write metric=(model, batches) so that it calls model(...)"
)


@dataclasses.dataclass
class Call:
    """One call of the model: its arguments with keywords, and what it returned, as they were in that moment.

    `writes`: the model writes into the tensors that it is called with.
    """

    given: tuple[tuple[Any, ...], dict[str, Any]]
    returned: Any = None
    writes: bool = False

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors of its arguments, depth first."""
        return list(tensors(list(self.given)))

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors that it returned."""
        return list(tensors(self.returned))


@dataclasses.dataclass
class Recording:
    """The validation batches, the metric on them, and the calls that it made on each.

    `whole` is false where more batches are there than are kept. `damaged` tells of samples that could not be
    read.
    """

    batches: list[Any]
    calls: list[list[Call]]
    metric: float
    whole: bool
    damaged: str = ""

    @property
    def flat(self) -> list[list[torch.Tensor]]:
        """The inputs of every call, in order."""
        return [one.inputs for calls in self.calls for one in calls]

    @functools.cached_property
    def apart(self) -> frozenset[tuple[int, int]]:
        """The outputs that have not a row for each sample, by the number of the call and their place in it:
        one such as a prototype of each class may have as many rows as some of the batches have samples.
        """
        return frozenset(
            (number, place)
            for batch, calls in zip(self.batches, self.calls, strict=False)
            for number, one in enumerate(calls)
            for place, tensor in enumerate(one.outputs)
            if tensor.shape[:1] != (batch_size(batch),)
        )

    @property
    def samples(self) -> int:
        """How many samples all batches hold together."""
        return sum(map(batch_size, self.batches))


def record(
    job: Job, model: nn.Module, samples: int | None = None, seed: int = 0, listed: Path | None = None
) -> Recording:
    """Run the job's metric on its validation data, batch by batch, and keep what it calls the model with.

    A metric that ends before its data do is taken at its word. With `samples`, no batch is taken once there
    are so many. `seed` is the run's: data that are split at random are split as they were in its training.
    `listed` is a file for the samples that cannot be read; with it, they must be few.

    Raises JobError where the job has no metric, it fails or is no finite number, there is no sample, or more
    than a tenth is damaged; Refused where the metric does not call the model for each batch that it takes,
    before the next one.
    """
    damage = Damage.of(job, listed)
    batches, whole = _batches(job, samples, seed, damage)
    if listed is not None:
        damage.require_few(sum(map(batch_size, batches)))
    calls: list[list[Call]] = []
    value = finite(job, _asked(job, model, _fitting(batches, calls), calls, seed))
    if not any(calls):
        raise Refused(NEVER_CALLED)
    while not calls[-1]:  # it took a batch, and ended
        calls.pop()
    if not all(calls):
        raise Refused(
            "the job's metric takes some batches without calling the model, or several before it does: write "
            "it so that it calls model(...) on each batch before it takes the next"
        )
    returned = sum(bytes_of(tensors(one.returned)) for each in calls for one in each)
    cut = len(calls) < len(batches) and returned > MOST_BYTES
    return Recording(batches[: len(calls)], calls, value, whole and not cut, damage.few())


def first_call(job: Job, model: nn.Module) -> Call:
    """The first call of the model that the job's metric makes. Raises as `record` does, but for a metric that
    fails later: some cannot be told of one batch.
    """
    calls: list[list[Call]] = []
    try:
        _asked(job, model, _batches(job, 1, 0, Damage.of(job))[0], calls, 0)
    except JobError:
        if not any(calls):
            raise
    if not any(calls):
        raise Refused(NEVER_CALLED)
    return calls[0][0]


def _asked(job: Job, model: nn.Module, batches: Iterable[Any], calls: list[list[Call]], seed: int) -> object:
    """What the job's metric returns; its calls of the model go to `calls`, by batch."""
    if job.metric is None:
        raise JobError(
            "the Job has no metric: metric=(model, batches) -> float tells how the model is called, and what "
            "a smaller or faster one loses"
        )

    def fed() -> Iterator[Any]:
        for batch in batches:
            calls.append([])
            yield map_tensors(batch, torch.clone)  # the metric may write into it

    streams = Streams(derive(seed, "metric"))
    listening = _listening(model, calls)
    with listening as parts, in_evaluation([model]), torch.no_grad(), padding_computed(), streams:
        value = call(job, "metric", model, fed())
    if parts and any(calls):
        raise Refused(
            f"the job's metric calls '{parts[0]}', a part of the model, beside the model itself: what "
            "another form does there cannot be seen, so let it call model(...) alone"
        )
    return value


def _fitting(batches: Sequence[Any], calls: Sequence[Sequence[Call]]) -> Iterator[Any]:
    """The batches, until what the model returned for them is more than is kept."""
    left = MOST_BYTES
    for batch in batches:
        if left < 0:
            return
        yield batch
        left -= sum(bytes_of(tensors(one.returned)) for one in calls[-1])


def _batches(job: Job, samples: int | None, seed: int, damage: Damage) -> tuple[list[Any], bool]:
    """Validation batches in the order of `train`, as many as `MOST_BYTES` hold, and `samples` need."""
    field = "validation" if job.validation is not None else "data"
    with Streams(derive(seed, "data")):
        loader = call(job, field)
    found, num_bytes, count = list[Any](), 0, 0
    source = ordered(loader, seed=derive(seed, "validation"), epoch=0, damage=damage)
    for batch in source:
        if batch is None:
            continue
        if num_bytes > MOST_BYTES or (samples is not None and count >= samples):
            return found, False
        found.append(batch)
        num_bytes, count = num_bytes + _kept_bytes(batch), count + batch_size(batch)
    if not count:
        raise JobError(f"the Job's {field}() gave no {'sample' if found else 'batch'}")
    return found, True


def _kept_bytes(batch: Tree) -> int:
    """Of the tensors, arrays and texts of a batch."""
    rest = [one for one in contents(batch) if not isinstance(one, torch.Tensor)]
    return bytes_of(tensors(batch)) + sum(len(one) if isinstance(one, str) else one.nbytes for one in rest)


@contextlib.contextmanager
def _listening(model: nn.Module, calls: list[list[Call]]) -> Iterator[list[str]]:
    """Note the calls of the model; yields the names of parts with parameters that are called without it."""
    inside, parts = list[Call](), list[str]()

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside[:] = [Call(_kept((args, kwargs)))]

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        found = inside.pop() if inside else Call(_kept((args, kwargs)))  # else one within it has ended
        found.returned = _kept(returned)
        found.writes = not all(map(_equal_if_dense, found.inputs, tensors([args, kwargs])))
        if calls:  # a call before the first batch is asked for belongs to none
            calls[-1].append(found)

    def entering(name: str) -> Callable[..., None]:
        def enter_part(*_: object) -> None:
            if not inside:
                parts.append(name)

        return enter_part

    handles = [
        model.register_forward_pre_hook(enter, with_kwargs=True),
        model.register_forward_hook(note, with_kwargs=True),
    ]
    handles += [
        module.register_forward_pre_hook(entering(name))
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters()) and not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()


def _kept(value: Tree) -> Any:
    """A copy: forward may write into what it is given, and the metric into what it is told."""
    return map_tensors(value, lambda part: part if is_object(part) else part.detach().clone(), is_object)


def _equal_if_dense(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_nested or one.layout != torch.strided or equal(one, other)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are they the same numbers? What is no number, as where a value is missing, is the same as another."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


class Flat(nn.Module):
    """A model that takes the tensors of a call in a row and returns a tuple of tensors, as runtimes do.

    Args:
        model: the person's.
        given: arguments and keywords of a call, as a template; all that is not a tensor stays as it is.
        writes: the model writes into what it is given; this one does not.
    """

    def __init__(
        self, model: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], *, writes: bool = False
    ) -> None:
        super().__init__()
        self.model, self.writes = model, writes
        args, kwargs = given
        plain = all(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
        self.names = tuple(kwargs) if plain else None
        self.template = None if plain else map_tensors((list(args), dict(kwargs)), lambda _: torch.empty(0))

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that the model returns for the tensors of a call."""
        flat = tuple(tensor.clone() for tensor in flat) if self.writes else flat
        if self.names is not None:
            place = len(flat) - len(self.names)
            returned = self.model(*flat[:place], **dict(zip(self.names, flat[place:], strict=True)))
        else:
            rest = iter(flat)
            args, kwargs = map_tensors(self.template, lambda _: next(rest))
            returned = self.model(*args, **kwargs)
        return (returned,) if isinstance(returned, torch.Tensor) else tuple(tensors(returned))


@dataclasses.dataclass(frozen=True)
class Calls:
    """The recorded calls as arrays, with what of them varies.

    Args:
        inputs: of each call the arrays in order.
        dynamic: of each input the dimensions whose length differs between calls; 0 is the batch.
        per_batch: how many calls the metric makes on each batch.
        rows: samples of each batch.
    """

    inputs: list[list[numpy.ndarray[Any, Any]]]
    dynamic: tuple[tuple[int, ...], ...]
    per_batch: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, recording: Recording) -> Calls:
        """The calls of a recording. Raises Refused where one call has other arguments than another, tensors
        apart, or has numbers that no other runtime takes, or samples do not lie first.
        """
        rows = [batch_size(batch) for batch in recording.batches]
        per_batch = [len(calls) for calls in recording.calls]
        of_call = [size for size, count in zip(rows, per_batch, strict=True) for _ in range(count)]
        flat = recording.flat
        kinds = {tuple((tensor.dtype, tensor.dim()) for tensor in inputs) for inputs in flat}
        if len(kinds) > 1:
            raise Refused(
                "the job's metric calls the model in several ways: with other inputs from call to call"
            )
        require_alike([one.given for each in recording.calls for one in each])
        dynamic = []
        for place in range(len(flat[0])):
            shapes = [tuple(inputs[place].shape) for inputs in flat]
            varying = {d for d in range(len(shapes[0])) if len({shape[d] for shape in shapes}) > 1}
            if shapes[0] and all(shape[0] == size for shape, size in zip(shapes, of_call, strict=True)):
                varying.add(0)
            dynamic.append(tuple(sorted(varying)))
        if not any(0 in dims for dims in dynamic):
            raise Refused("no input of the model has a row for each sample of the batch")
        arrays = [[array_of(tensor, "is called with") for tensor in inputs] for inputs in flat]
        _require_samples_first(recording, [place for place, dims in enumerate(dynamic) if 0 in dims])
        return cls(arrays, tuple(dynamic), tuple(per_batch), tuple(rows))

    def save(self, folder: Path) -> None:
        """Write arrays and facts into a folder."""
        named = {f"{i}.{k}": array for i, inputs in enumerate(self.inputs) for k, array in enumerate(inputs)}
        numpy.savez(folder / INPUTS, **named)  # type: ignore[arg-type]
        facts = {"dynamic": self.dynamic, "per_batch": self.per_batch, "rows": self.rows}
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Calls:
        """The inverse of `save`; reads no pickle."""
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        dynamic = tuple(map(tuple, facts["dynamic"]))
        inputs = read_arrays(folder / INPUTS)
        return cls(inputs, dynamic, tuple(facts["per_batch"]), tuple(facts["rows"]))

    def sample(self, count: int, start: int = 0) -> list[numpy.ndarray[Any, Any]]:
        """One call on `count` samples from the `start`-th on, over and over where there are fewer.

        Raises Refused where the calls cannot be put together: other lengths than the batch's vary too.
        """
        usable = [max(self._of(count), key=self.rows_of)] if self.ragged else self.inputs
        rows = sum(map(self.rows_of, usable))
        taken = [(start + number) % rows for number in range(count)]
        joined = []
        for place, dims in enumerate(self.dynamic):
            arrays = [inputs[place] for inputs in usable]
            joined.append(_rows(arrays, taken) if 0 in dims else arrays[0])
        return joined

    def several(self, number: int, count: int) -> list[list[numpy.ndarray[Any, Any]]]:
        """So many calls on `count` samples each; where lengths differ, from short to long, each standing for
        as many of the calls as the next.

        Raises Refused as `sample` does.
        """
        if not self.ragged:
            return [self.sample(count, count * place) for place in range(number)]
        usable, found = sorted(self._of(count), key=self._numbers_a_sample), []
        for place in range(number):
            inputs = usable[(2 * place + 1) * len(usable) // (2 * number)]
            found.append(self.cut(inputs, count * place % (self.rows_of(inputs) - count + 1), count))
        return found

    def _numbers_a_sample(self, inputs: Sequence[numpy.ndarray[Any, Any]]) -> float:
        return sum(array.size for array in inputs) / self.rows_of(inputs)

    def _of(self, count: int) -> list[list[numpy.ndarray[Any, Any]]]:
        """The calls on at least `count` samples. Raises Refused where there is none."""
        found = [inputs for inputs in self.inputs if self.rows_of(inputs) >= count]
        if not found:
            raise Refused(
                f"a batch of {count} cannot be made, as your samples differ in length: the largest of your "
                f"validation batches has {max(map(self.rows_of, self.inputs))}, so let its loader give "
                "larger ones"
            )
        return found

    @property
    def fixed(self) -> list[tuple[str, tuple[int | None, ...]]]:
        """Of each input the numbers and the lengths that do not vary, with None for those that do."""
        return [
            (str(array.dtype), tuple(None if d in dims else length for d, length in enumerate(array.shape)))
            for array, dims in zip(self.inputs[0], self.dynamic, strict=True)
        ]

    def fit(self, others: Calls) -> bool:
        """Does a model take these that is made for the others, whose lengths are fixed but for those that
        vary?
        """
        if len(self.fixed) != len(others.fixed):
            return False
        pairs = list(zip(self.fixed, others.fixed, strict=True))
        return all(a[0] == b[0] and len(a[1]) == len(b[1]) for a, b in pairs) and all(
            there in (None, here) for a, b in pairs for here, there in zip(a[1], b[1], strict=True)
        )

    @property
    def ragged(self) -> bool:
        """Do lengths beside the batch's vary, as those of texts do?"""
        return any(set(dims) - {0} for dims in self.dynamic)

    def rows_of(self, inputs: Sequence[numpy.ndarray[Any, Any]]) -> int:
        """How many samples a call is on."""
        return next(len(array) for array, dims in zip(inputs, self.dynamic, strict=True) if 0 in dims)

    def digests(self) -> Iterator[bytes]:
        """What tells the samples of all calls apart."""
        for inputs in self.inputs:
            of_rows = [array for array, dims in zip(inputs, self.dynamic, strict=True) if 0 in dims]
            for row in range(self.rows_of(inputs)):
                yield hashlib.blake2b(b"".join(a[row].tobytes() for a in of_rows), digest_size=16).digest()

    def cut(
        self, inputs: Sequence[numpy.ndarray[Any, Any]], start: int, rows: int
    ) -> list[numpy.ndarray[Any, Any]]:
        """So many samples of a call, or as many as it has from the `start`-th on."""
        both = zip(inputs, self.dynamic, strict=True)
        return [array[start : start + rows] if 0 in dims else array for array, dims in both]

    def larger(self) -> list[numpy.ndarray[Any, Any]]:
        """A call on one sample more than any; where they differ in length, one of the largest twice."""
        largest = max(self.inputs, key=self.rows_of)
        rows = self.rows_of(largest) + 1
        if not self.ragged:
            return self.sample(rows)
        both = zip(largest, self.dynamic, strict=True)
        return [a.take(range(rows), 0, mode="wrap") if 0 in dims else a for a, dims in both]

    def first(self, samples: int) -> list[list[numpy.ndarray[Any, Any]]]:
        """The calls on the first so many samples, the last one cut."""
        found, left = list[list[numpy.ndarray[Any, Any]]](), samples
        for inputs in self.inputs:
            if left <= 0:
                break
            found.append(self.cut(inputs, 0, left))
            left -= self.rows_of(inputs)
        return found


def _require_samples_first(recording: Recording, places: Sequence[int]) -> None:
    """Raises Refused where the rows of the inputs at these places are not those of samples: time steps, or
    all nodes of several graphs in a row, would count as samples.

    What else is in the batch, such as labels, tells how many samples there are.
    """
    across, packed = [], []  # do samples lie along the second dimension; are there several rows for each?
    differs: tuple[list[int], int] | None = None
    for batch, calls in zip(recording.batches, recording.calls, strict=True):
        for one in calls:
            inputs = [one.inputs[place] for place in places]
            shapes = [list(tensor.shape) for tensor in inputs]
            rows = shapes[0][0]
            if any(shape[0] != rows for shape in shapes):
                told = " and ".join(map(str, shapes))
                raise Refused(
                    f"the model is called with tensors of the shapes {told} at once, in which no row is that "
                    "of one sample: let each of them have a row for each sample"
                )
            given = {tensor.shape for tensor in one.inputs}
            others = (part for part in tensors(batch) if part.dim() and not part.is_nested)
            beside = {len(part) for part in others if part.shape not in given}
            samples = beside.pop() if len(beside) == 1 else batch_size(batch)
            answered = any(part.shape[:1] == (rows,) for part in one.outputs)
            across.append(not answered and samples in {shape[1] for shape in shapes if len(shape) > 1})
            packed.append(samples <= rows and any(part.shape[:1] == (samples,) for part in one.outputs))
            if samples != rows > 1:
                differs = differs or (shapes[0], samples)
    if differs and (all(across) or all(packed)):
        raise Refused(
            f"the model is called with a tensor of the shape {differs[0]}, and what else is in the batch has "
            f"{differs[1]} rows: let forward take a row for each sample first, as with batch_first=True"
        )


def _rows(arrays: Sequence[numpy.ndarray[Any, Any]], taken: Sequence[int]) -> numpy.ndarray[Any, Any]:
    """Rows by their number in all arrays."""
    found = []
    ends = numpy.cumsum([len(array) for array in arrays])
    for row in taken:
        place = int(numpy.searchsorted(ends, row, side="right"))
        found.append(arrays[place][row - (ends[place - 1] if place else 0)])
    return numpy.stack(found)


def outputs_file(form: str) -> str:
    """What the file is called that holds a form's outputs for the recorded calls."""
    return f"outputs-{form}.npz"


def read_arrays(path: Path) -> list[list[numpy.ndarray[Any, Any]]]:
    """Arrays that were written as ``call.place``, call by call."""
    with numpy.load(path, allow_pickle=False) as file:
        found: dict[int, dict[int, numpy.ndarray[Any, Any]]] = {}
        for name in file.files:
            call_number, place = map(int, name.split("."))
            found.setdefault(call_number, {})[place] = file[name]
    return [[places[k] for k in sorted(places)] for _, places in sorted(found.items())]


def write_arrays(path: Path, calls: Sequence[Sequence[numpy.ndarray[Any, Any]]]) -> None:
    """Write the arrays of every call into one file, for `read_arrays`."""
    named = {f"{i}.{k}": array for i, arrays in enumerate(calls) for k, array in enumerate(arrays)}
    numpy.savez(path, **named)  # type: ignore[arg-type]
