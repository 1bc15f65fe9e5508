"""The child that holds the person's metric: records its calls of the model, and tells what a form loses."""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import numpy
import torch
from torch import nn

from vivace.errors import JobError, Refused, VivaceError
from vivace.job import Job
from vivace.serving.calls import (
    Calls,
    Recording,
    equal,
    outputs_file,
    read_arrays,
    record,
    write_arrays,
)
from vivace.serving.envelope import REPEATABLE, distance, names_of, names_of_inputs
from vivace.serving.forms import REFERENCE
from vivace.serving.int8 import SAMPLES
from vivace.serving.margin import Change, by_groups, by_sample
from vivace.serving.material import CALIBRATION
from vivace.serving.trained import load_trained
from vivace.serving.use import require_use
from vivace.serving.values import Untold, array_of, is_object, padding_computed, require_tensors
from vivace.session.opening import call
from vivace.tensors.modules import in_evaluation
from vivace.tensors.randomness import Streams, derive
from vivace.tensors.trees import batch_size, map_tensors, split, tensors
from vivace.training.evaluation import finite

GROUPS = 20  # of the jackknife
DAMAGED = "damaged.jsonl"
ADDITIVE = 1e-6  # of a metric: so near must it be to the mean over samples, or to itself when asked again
ALONE_SECONDS = 20.0  # for the metric of each sample alone
FIRST = 20  # samples, which foretell how long all take
# These leave padding out in evaluation.
SKIPPING = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

Piece = tuple[Any, tuple[int, slice | None]]
"""A batch or a part of it, the batch's number, and which of its rows these are."""


class Judge:
    """Judges forms in a child process: each method is a command of `vivace.processes.launch.Child`."""

    def __init__(self, job: Job, run: str, folder: str) -> None:
        self.job, self.folder = job, Path(folder)
        self.model, self.trained = load_trained(job, Path(run))
        self.recording: Recording | None = None
        self._theirs: list[list[numpy.ndarray[Any, Any]]] = []
        self._by_sample: list[float] | None = None

    def record(self) -> dict[str, Any]:
        """Run the metric once on the model as it is, and write its calls and what they returned.

        Raises Refused where the model is in half precision, as all is compared with fp32, or returns what
        another form cannot.
        """
        _require_fp32(self.model)
        self.recording = record(self.job, self.model, seed=self.trained.seed, listed=self.folder / DAMAGED)
        require_tensors([one.returned for each in self.recording.calls for one in each])
        calls = Calls.of(self.recording)
        calls.save(self.folder)
        calibration = self.folder / CALIBRATION
        calibration.mkdir(exist_ok=True)
        self._theirs = [
            [array_of(tensor, "returns") for tensor in one.outputs]
            for each in self.recording.calls
            for one in each
        ]
        self._require_replayable()
        self._require_repeatable()
        self._require_padding_unread()
        write_arrays(self.folder / outputs_file(REFERENCE), self._theirs)
        (first, *_), *_ = self.recording.calls
        calibrated_on, num_shared = self._write_calibration(calibration, calls)
        return {
            "metric": self.recording.metric,
            "metric_name": self.job.metric_name,
            "metric_data": self.job.metric_data,
            "samples": self.recording.samples,
            "whole": self.recording.whole,
            "damaged": self.recording.damaged,
            "inputs": names_of_inputs(self.model, first.given),
            "outputs": names_of(first.returned),
            "calibrated_on": calibrated_on,
            "num_shared": num_shared,
            "trained": self.trained.to_dict(),
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model": type(self.model).__name__,
            "double": any(p.dtype == torch.float64 for p in self.model.parameters()),
            "threads": torch.get_num_threads(),
        }

    def _require_replayable(self) -> None:
        """Raises Refused where the metric, of the model's own outputs, is not what it was."""
        assert self.recording is not None
        again = self._metric(self._theirs, self.recording.batches, [(b, None) for b in self._numbers])
        before = self.recording.metric
        if abs(again - before) > ADDITIVE * max(1.0, abs(before)):
            raise Refused(
                f"the job's metric is {before:.6g}, and {again:.6g} when it is told the same outputs again: "
                "it must depend on the batches and on what model(...) returns alone"
            )

    def _require_repeatable(self) -> None:
        """Raises Refused where the model answers the same call otherwise, by far more than rounding."""
        assert self.recording is not None
        (first, *_), *_ = self.recording.calls
        with torch.no_grad(), padding_computed(), Streams(derive(0, "again")):
            pair = [self._answers(*map_tensors(first.given, torch.clone)) for _ in range(2)]
        for name, one, other in zip(names_of(first.returned), *pair, strict=True):
            if distance([one], [other]) > REPEATABLE * distance([one], [numpy.zeros_like(one)]):
                raise Refused(
                    f"the model returns another '{name}' each time that it is called with the same input: "
                    "another form of it cannot be compared; let it draw no random numbers in evaluation mode"
                )

    def _require_padding_unread(self) -> None:
        """Raises Refused where the metric reads what torch's transformer layers leave zero at padding in
        evaluation, and another form of them computes.
        """
        assert self.recording is not None
        if not any(isinstance(part, SKIPPING) for part in self.model.modules()):
            return
        given = [one.given for each in self.recording.calls for one in each]
        with torch.no_grad(), Streams(derive(0, "padding")):
            skipped = [self._answers(*map_tensors(one, torch.clone)) for one in given]
        changed = [
            [_where_they_differ(*pair) for pair in zip(*answers, strict=True)]
            for answers in zip(self._theirs, skipped, strict=True)
        ]
        before = self.recording.metric
        now = self._metric(changed, self.recording.batches, [(b, None) for b in self._numbers])
        if abs(now - before) > ADDITIVE * max(1.0, abs(before)):
            raise Refused(
                "the job's metric depends on what the model's transformer layers have at padded positions: "
                "zeros in evaluation mode, and computed numbers in another form of it; leave these out by "
                "the mask, or call torch.backends.mha.set_fastpath_enabled(False) in the job's file"
            )

    def _answers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[numpy.ndarray[Any, Any]]:
        return [array_of(tensor, "returns") for tensor in tensors(self.model(*args, **kwargs))]

    def _write_calibration(self, folder: Path, validation: Calls) -> tuple[str, int]:
        """Calls on training data, from which int8 learns its ranges; what data they are of, and how many of
        their samples are judged too.
        """
        alike = dataclasses.replace(self.job, validation=None)
        try:
            found = Calls.of(record(alike, self.model, SAMPLES, self.trained.seed))
            if found.fit(validation):
                found.save(folder)
                judged = set(validation.digests())
                return "training", sum(one in judged for one in found.digests())
        except VivaceError:  # a metric need not take the batches that the loss takes
            pass
        validation.save(folder)
        return "validation", 0

    def unused(self) -> list[int]:
        """The places of outputs on which the metric does not depend.

        Raises Refused where that is all of them, or the metric is better where answers are wrong.
        """
        assert self.recording is not None
        batches = self.recording.batches

        def ask(outputs: Sequence[Any]) -> float:
            return self._metric(outputs, batches, [(b, None) for b in self._numbers])

        return require_use(ask, self._theirs, self.recording.metric, self.job.metric_name)

    def change(self, outputs: str, margin: float) -> dict[str, Any]:
        """What the metric loses with the outputs of a form, which answer the recorded calls one by one."""
        assert self.recording is not None
        ours = read_arrays(Path(outputs))
        whole = self._metric(ours, self.recording.batches, [(b, None) for b in self._numbers])
        reference = self.recording.metric
        each = self._each(ours) if self._additive() else []
        if _is_mean(each, whole):  # one that is all right, or all wrong, is the mean by chance
            assert self._by_sample is not None
            found = by_sample(each, self._by_sample, margin, reference, whole)
        else:
            found = self._jackknife(ours, margin, reference, whole)
        return found.to_dict()

    @property
    def _numbers(self) -> range:
        assert self.recording is not None
        return range(len(self.recording.batches))

    def _additive(self) -> bool:
        """Is the metric the mean of its values of single samples? Asked once, of the reference."""
        if self._by_sample is None:
            assert self.recording is not None
            try:
                found = self._each(self._theirs, ALONE_SECONDS)
            except (JobError, Refused):  # it needs more than one sample, or other samples beside it
                found = []
            self._by_sample = found if _is_mean(found, self.recording.metric) else []
        return bool(self._by_sample)

    def _each(self, outputs: Sequence[Any], seconds: float = math.inf) -> list[float]:
        """The metric of each sample alone; of none, where the first ones show that all take longer."""
        assert self.recording is not None
        found, begin = list[float](), time.monotonic()
        for number, batch in enumerate(self.recording.batches):
            for row, piece in enumerate(split(batch, 1)):
                found.append(self._metric(outputs, [piece], [(number, slice(row, row + 1))]))
                if len(found) == FIRST:
                    taken = time.monotonic() - begin
                    if taken * self.recording.samples / FIRST > seconds:
                        return []
        return found

    def _jackknife(self, ours: Sequence[Any], margin: float, reference: float, whole: float) -> Change:
        """By groups of pieces of the batches; of whole batches, where the metric cannot be told of pieces."""
        assert self.recording is not None
        pieces: list[Piece] = []
        size = max(1, self.recording.samples // (4 * GROUPS))
        try:
            for number, batch in enumerate(self.recording.batches):
                start = 0
                for piece in split(batch, size):
                    pieces.append((piece, (number, slice(start, start + batch_size(piece)))))
                    start += batch_size(piece)
            values = self._without_groups(ours, pieces, "samples")
        except (JobError, Refused):  # as where it cuts samples into crops, or a batch is packed
            batches: list[Piece] = [(b, (n, None)) for n, b in enumerate(self.recording.batches)]
            values = self._without_groups(ours, batches, "batches")
        return by_groups(values[0], values[1], margin, reference, whole, self.recording.samples)

    def _without_groups(self, ours: Sequence[Any], pieces: Sequence[Piece], what: str) -> list[list[float]]:
        """The metric without each group of pieces, of a form and of the reference."""
        groups = min(GROUPS, len(pieces))
        if groups < 4:
            raise Refused(f"{len(pieces)} {what} are too few to tell what the metric loses")
        without = [[one for place, one in enumerate(pieces) if place % groups != g] for g in range(groups)]
        return [
            [self._metric(outputs, [b for b, _ in kept], [w for _, w in kept]) for kept in without]
            for outputs in (ours, self._theirs)
        ]

    def _metric(
        self, outputs: Sequence[Any], batches: list[Any], where: Sequence[tuple[int, slice | None]]
    ) -> float:
        """The metric of a stand-in for the model that answers with the outputs, on these rows."""
        assert self.recording is not None
        stand_in, taken = Replay(self.model, self.recording, outputs), list[int]()

        def fed() -> Iterator[Any]:
            for batch, (number, rows) in zip(batches, where, strict=True):
                stand_in.turn_to(number, rows)
                taken.append(number)
                yield map_tensors(batch, torch.clone)  # the metric may write into it

        guard = self.model.register_forward_pre_hook(_refuse)
        try:
            with in_evaluation([stand_in]), torch.no_grad(), Streams(derive(self.trained.seed, "metric")):
                found = finite(self.job, call(self.job, "metric", stand_in, fed()))
        except JobError as error:
            if isinstance(error.__cause__, Refused):  # the stand-in's own, through the person's metric
                raise error.__cause__ from None
            raise
        finally:
            guard.remove()
        if len(taken) < len(batches):
            raise JobError(
                f"the Job's {self.job.metric_name} is of {len(taken)} batches, however many there are, and "
                "cannot be told of other parts of the data"
            )
        return found


def _is_mean(each: Sequence[float], whole: float) -> bool:
    """Is a metric the mean of its values of single samples?"""
    mean = sum(each) / len(each) if each else float("nan")
    return abs(mean - whole) <= ADDITIVE * max(map(abs, each), default=0.0)


def _refuse(*_: object) -> None:
    """Raises Refused: the model itself is called where another stands in for it."""
    raise Refused(
        "the job's metric calls the model in a way in which nothing can stand in for it: write "
        "metric=(model, batches) so that it calls the model that it is given, as model(...)"
    )


def _where_they_differ(
    computed: numpy.ndarray[Any, Any], skipped: numpy.ndarray[Any, Any]
) -> numpy.ndarray[Any, Any]:
    """The first, with other numbers where the second is another one by far more than rounding."""
    if computed.dtype.kind != "f":
        return skipped
    size = abs(computed).max(initial=0.0)
    other = numpy.random.default_rng(0).normal(scale=size, size=computed.shape).astype(computed.dtype)
    return numpy.where(abs(computed - skipped) > REPEATABLE * size, other, computed)


def _require_fp32(model: nn.Module) -> None:
    """Raises Refused where weights are in half precision."""
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            numbers = str(parameter.dtype).removeprefix("torch.")
            raise Refused(
                f"the model's weights are {numbers} ('{name}'), and every form is compared with the model in "
                "fp32: give a Job whose model() ends with .float(), with the same run"
            )


class Replay(nn.Module):
    """Stands for the model in the metric, and answers its calls with outputs that are there already.

    All else that the metric may ask of a model, the model answers; methods of the model's own call the
    stand-in. Raises Refused where a call is another one than was recorded, as where a metric feeds outputs
    back into the model.
    """

    def __init__(self, model: nn.Module, recording: Recording, outputs: Sequence[Any]) -> None:
        super().__init__()
        self.original, self.training = model, model.training
        self._recording, self._outputs = recording, outputs
        counts = [len(calls) for calls in recording.calls]
        self._starts = [sum(counts[:number]) for number in range(len(counts))]
        self._batch, self._rows, self._next = 0, slice(None), 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("original"), name)
        if inspect.ismethod(found) and found.__self__ is self.original:
            return MethodType(found.__func__, self)  # which may call self(...)
        return found

    def turn_to(self, batch: int, rows: slice | None) -> None:
        """The calls from now on are those of these rows of a batch."""
        self._batch, self._rows, self._next = batch, rows or slice(None), 0

    def forward(self, *args: object, **kwargs: object) -> Any:
        """What the form returned for these rows."""
        calls = self._recording.calls[self._batch]
        number, self._next = self._next, self._next + 1
        if number >= len(calls):
            raise Refused("the job's metric calls the model more often than it did with the model as it is")
        known, size = calls[number], batch_size(self._recording.batches[self._batch])
        given = list(tensors([args, kwargs]))
        expected = [self._cut(tensor, size) for tensor in known.inputs]
        same = len(given) == len(expected) and all(map(equal, given, expected))
        if not same:
            raise Refused(
                "the job's metric calls the model with what depends on its outputs, so that a form would be "
                "asked otherwise: that cannot be compared sample by sample"
            )
        arrays = enumerate(self._outputs[self._starts[self._batch] + number])

        def told(like: Any) -> Any:
            if is_object(like):
                return Untold(type(like).__name__)
            place, array = next(arrays)
            by_rows = (number, place) not in self._recording.apart
            part = self._part(torch.from_numpy(array), size, by_rows)
            return part.to(like.dtype, copy=True)  # the metric may write into it

        return map_tensors(known.returned, told, is_object)

    def _part(self, tensor: torch.Tensor, size: int, rows: bool) -> torch.Tensor:
        """Of an output what these rows have; no number where that is not known, as of a batch's mean loss.

        `rows`: it has one for each sample.
        """
        if rows:
            return self._cut(tensor, size)
        some = self._rows.stop is not None and len(range(size)[self._rows]) < size
        return torch.full_like(tensor, torch.nan) if some and tensor.is_floating_point() else tensor

    def _cut(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        return tensor[self._rows] if tensor.dim() and tensor.shape[0] == size else tensor
