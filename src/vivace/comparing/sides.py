"""One side of a comparison: what a run's folder, a profile or a benchmark's record holds of its speed."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace import words
from vivace.errors import FolderError
from vivace.events import metric_title
from vivace.ledger import Ratio
from vivace.reporting.content import Content, ratio_of
from vivace.reporting.course import course
from vivace.reporting.reading import load

MOST_BLOCKS = 20  # neighbouring steps share what disturbs them: few long blocks say more than many short ones
KINDS = {
    "training": "a training",
    "search": "a tune run",
    "script": "a script under vivace run",
    "profile": "a profile",
    "record": "a benchmark's record",
}
_BENCHMARK = "benchmark"


@dataclasses.dataclass(frozen=True)
class Side:
    """What is known of one side; None and empty where its files do not hold it.

    `step_seconds` is the time of a step, `sample_seconds` that of a sample; `blocks` are the seconds a sample
    (a step, where the samples are not known) of consecutive blocks of steps, without the warm-up. `bounds`
    are those of the time of a sample where only they are known. `warm_up` says that the times hold the first
    steps, which compile and fill caches. `of` is the job or the command. `course` are the metrics of a
    training at its minutes.
    """

    path: str
    kind: str
    of: str = ""
    step_seconds: float | None = None
    sample_seconds: float | None = None
    blocks: tuple[float, ...] = ()
    bounds: tuple[float, float] | None = None
    warm_up: bool = False
    total_seconds: float | None = None
    peak_bytes: float | None = None
    metric: float | None = None
    metric_name: str = "metric"
    course: tuple[tuple[float, float], ...] = ()
    loss: float | None = None
    speedup: Ratio | None = None
    plan: Mapping[str, Mapping[str, Any]] | None = None
    device: str = ""
    cores: int | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def unit_seconds(self) -> float | None:
        """What `blocks` are of: a sample, or a step where no one counted samples."""
        return self.sample_seconds if self.sample_seconds is not None else self.step_seconds

    @property
    def step_samples(self) -> float | None:
        """How many samples a step has, over all steps; None where the files do not hold it."""
        if self.step_seconds is None or not self.sample_seconds:
            return None
        return self.step_seconds / self.sample_seconds

    @property
    def plan_speedup(self) -> Ratio | None:
        """What its plan brings; None where that is empty."""
        return None if self.plan == {} else self.speedup

    def to_dict(self) -> dict[str, Any]:
        """The document of this side."""
        return dataclasses.asdict(self)


def read(path: Path) -> Side:
    """What lies at `path`: a folder of tune, train, run or profile, or a file of one, or a record.

    Raises FolderError where there is nothing, or nothing with a speed that can be read.
    """
    try:
        return _side(path)
    except FolderError:
        raise
    except OSError as error:
        raise FolderError(f"'{path}' cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise FolderError(f"'{path}' is not written as this version of Vivace reads it") from error


def _side(path: Path) -> Side:
    if not path.exists():
        raise FolderError(
            f"there is no '{path}'; name a run's folder, a profile.json or a benchmark's record"
        )
    if path.is_dir():
        return _folder(path, path)
    if path.name in ("run.json", "metrics.jsonl", "ledger.jsonl", "report.html", "profile.html"):
        return _folder(path.parent, path)
    document = _document(path)
    if "step_seconds" in document and "shares" in document:
        return _profile(document, path)
    if _BENCHMARK in document or ("speedup" in document and "baselines" in document):
        return _record(document, path)
    raise FolderError(f"'{path}' is no run, no profile and no record of a benchmark with a speed")


def _folder(folder: Path, named: Path) -> Side:
    run = _document(folder / "run.json") if (folder / "run.json").is_file() else {}
    if "own_seconds" in run:
        return _script(run, named)
    if run or (folder / "metrics.jsonl").is_file():
        return _training(load(folder), named)
    if (folder / "ledger.jsonl").is_file():
        return _search(load(folder), named)
    if (folder / "profile.json").is_file():
        return _profile(_document(folder / "profile.json"), named)
    raise FolderError(f"'{folder}' holds no run and no profile; name the --out folder of one")


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FolderError(f"'{path}' cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise FolderError(f"'{path}' is no JSON document") from None
    if not isinstance(found, dict):
        raise FolderError(f"'{path}' is no document of a run")
    return found


def _training(content: Content, path: Path) -> Side:
    run = content.training
    speeds = [_positive(line.get("samples_per_second")) for line in content.metrics]
    per_sample = [1.0 / speed for speed in speeds if speed]
    steps, spent = words.real(run.get("steps")), words.real(run.get("stepping_seconds"))
    taken = None if steps is None else steps - (words.real(run.get("resumed_from_step")) or 0.0)
    step = spent / taken if spent and taken else None
    speed = _positive(run.get("samples_per_second"))
    whole = 1.0 / speed if speed else None
    sample = _median(per_sample[1:])  # the first holds the warm-up
    last = content.metrics[-1] if content.metrics else {}
    return Side(
        path=str(path),
        kind="training",
        of=str(run.get("job") or ""),
        step_seconds=step * sample / whole if step and sample and whole else step,
        sample_seconds=sample or whole,
        blocks=_blocks(per_sample[1:]),
        warm_up=sample is None,
        total_seconds=words.real(run.get("seconds")),
        metric=words.real(run.get("metric", last.get("metric"))),
        metric_name=metric_title(run),
        course=tuple(course(content).points),
        loss=words.real(run.get("loss", last.get("loss"))),
        speedup=ratio_of((run.get("tuned") or {}).get("speedup")),
        plan=run.get("plan"),
        **_machine(run.get("machine") or {"device": run.get("device")}),
    )


def _search(content: Content, path: Path) -> Side:
    """The plan that it kept, or the reference."""
    own = content.final
    seconds = [candidate for _, candidate in own.pairs] if own is not None else []
    if own is None:  # the reference, as it was timed beside every trial
        seconds = [reference for row in content.measured for reference, _ in row.trial.pairs]
    size, step = words.real(content.job.get("batch_size")), _median(seconds)
    timed = own if own is not None else next((row.trial for row in content.measured), None)
    if timed is not None and timed.samples_per_second:  # batches may differ in size
        size = timed.samples_per_second * statistics.median(candidate for _, candidate in timed.pairs)
    if step is None:
        step = words.real(content.profile.get("step_seconds"))
    scale = 1.0 / size if size else 1.0
    return Side(
        path=str(path),
        kind="search",
        of=str(content.job.get("name") or ""),
        step_seconds=step,
        sample_seconds=step / size if step and size else None,
        blocks=_blocks([one * scale for one in seconds]),
        total_seconds=words.real((content.result.get("training_seconds") or {}).get("plan")),
        peak_bytes=content.peaks[1] or content.peaks[0],
        speedup=content.speedup,
        plan=content.plan,
        **_machine(content.machine),
    )


def _profile(document: dict[str, Any], path: Path) -> Side:
    step, speed = _positive(document.get("step_seconds")), _positive(document.get("samples_per_second"))
    each = [found for found in map(_positive, document.get("each_step_seconds") or ()) if found]
    size = step * speed if step and speed else None
    return Side(
        path=str(path),
        kind="profile",
        of=str(document.get("target") or ""),
        step_seconds=step,
        sample_seconds=1.0 / speed if speed else None,
        blocks=_blocks([seconds / (size or 1.0) for seconds in each]),
        peak_bytes=words.real((document.get("memory") or {}).get("peak_bytes")),
        plan=document.get("plan"),
        **_machine(document.get("machine") or {}),
    )


def _script(document: dict[str, Any], path: Path) -> Side:
    return Side(
        path=str(path),
        kind="script",
        step_seconds=_positive(document.get("step_seconds")),
        total_seconds=words.real(document.get("seconds")),
        speedup=ratio_of(document.get("ratio")),
        plan=document.get("plan"),
        **_machine(document.get("machine") or {}),
    )


def _record(document: dict[str, Any], path: Path) -> Side:
    """The speed of a record's plan: strict fp32 times what the plan brings, with the interval of that."""
    speedup = ratio_of(document.get("speedup"))
    strict = words.real((document.get("baselines") or {}).get("strict_fp32"))
    if speedup is None or not strict:
        name = document.get(_BENCHMARK) or "unknown"
        raise FolderError(
            f"the record '{path}' of the benchmark {name} holds no speed of a plan: compare records of `cpu`"
        )
    return Side(
        path=str(path),
        kind="record",
        of=str(document.get("job") or ""),
        sample_seconds=1.0 / (strict * speedup.counts),
        bounds=(1.0 / (strict * speedup.high), 1.0 / (strict * speedup.low)),
        speedup=speedup,
        plan=document.get("plan"),
        **_machine({"versions": document.get("versions"), **(document.get("machine") or {})}),
    )


def _machine(document: Mapping[str, Any]) -> dict[str, Any]:
    """Device, cores and versions, as the documents of `Machine`, profiles and records have them."""
    devices = document.get("devices") or [{}]
    cores = words.real(document.get("num_cores", document.get("cores")))
    versions = document.get("versions") or {}
    return {
        "device": str(document.get("device") or devices[0].get("name") or ""),
        "cores": None if cores is None else int(cores),
        "versions": {name: str(version) for name, version in versions.items() if version},
    }


def _blocks(seconds: list[float]) -> tuple[float, ...]:
    """Means of at most `MOST_BLOCKS` runs of neighbours of equal length, one shorter at the end left out."""
    length = max(1, -(-len(seconds) // MOST_BLOCKS))
    starts = range(0, len(seconds) - length + 1, length)
    return tuple(statistics.fmean(seconds[start : start + length]) for start in starts)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _positive(value: object) -> float | None:
    """A time or a speed as a number; None where it cannot be one."""
    found = words.real(value)
    return found if found is not None and found > 0 else None
