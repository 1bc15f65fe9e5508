"""What verbs tell while they work: every `on_event` hears an `Event`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias


class EventKind(enum.StrEnum):
    """What has happened, and what `Event.payload` then holds; what stands in brackets may be missing.

    | kind | told by | payload |
    |---|---|---|
    | ``notice`` | tune, train, verify, sweep | text: a sentence that the person should read |
    | ``phase`` | tune, compress, sweep | name: what it does from now on; [budget_seconds: of all of it] |
    | ``trial_begin`` | tune | plan: as text; role |
    | ``trial_end`` | tune | trial: a `vivace.ledger.Trial`; without a beginning where it got no process |
    | ``verdict`` | tune | plan: as text; verdict: a `vivace.Verdict` |
    | ``prepared`` | verify | seconds: of the reference; left_seconds: for the plan; compiles: and more |
    | ``seed`` | verify | what is known after one seed of the test of the metric; left_seconds |
    | ``begin`` | train | step, epochs, num_parameters; steps and steps_per_epoch: in all, None if unknown |
    | ``resume`` | train | step: from which the run goes on |
    | ``step`` | train | step, epoch, loss, samples_per_second, [skipped_steps] |
    | ``epoch`` | train | step, epoch, loss, [metric, metric_name, metric_data, seconds: since it began] |
    | ``metric`` | train | step, metric, metric_name, metric_data, seconds: of a run's last step |
    | ``checkpoint`` | train | step, path, seconds: that it took |
    | ``watch`` | train | step, watch_kept, and the figures of a step that was repeated under the reference |
    | ``unwatched`` | train | text: why steps are not watched |
    | ``form_begin`` | compress | form: its name; does: in words; left_seconds: expected at most |
    | ``form_end`` | compress | form: a `vivace.compressing.result.Tried`; left_seconds |
    | ``swept`` | sweep | number, state: of a trial that ended; text: a line on it; [seed: of a repetition] |
    | ``stop`` | train | the keys of `vivace.Run.to_dict` |
    """

    NOTICE = "notice"
    PHASE = "phase"
    TRIAL_BEGIN = "trial_begin"
    TRIAL_END = "trial_end"
    VERDICT = "verdict"
    PREPARED = "prepared"
    SEED = "seed"
    BEGIN = "begin"
    RESUME = "resume"
    STEP = "step"
    EPOCH = "epoch"
    METRIC = "metric"
    CHECKPOINT = "checkpoint"
    WATCH = "watch"
    UNWATCHED = "unwatched"
    FORM_BEGIN = "form_begin"
    FORM_END = "form_end"
    SWEPT = "swept"
    STOP = "stop"


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened; `EventKind` says what the payload holds."""

    kind: EventKind
    payload: dict[str, Any]

    @property
    def step(self) -> int | None:
        """The step of a training at which it happened; None where it is of none."""
        return self.payload.get("step")

    @property
    def scalars(self) -> dict[str, float]:
        """The figures of a training at its `step`, such as loss, metric and samples_per_second: what trackers
        draw. The metric has its own name (see `metric_title`). Empty where an event brings none.
        """
        drawn = self.kind in (EventKind.STEP, EventKind.EPOCH, EventKind.METRIC)
        return scalars_of(self.payload) if drawn else {}


_FIGURES = ("step", "epoch", "loss", "samples_per_second", "skipped_steps", "seconds")


def scalars_of(payload: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a payload but its step; the metric by its title, and as ``metric loss`` where that is
    what another figure of a training is called.
    """
    title = metric_title(payload)
    taken = {*_FIGURES, *payload} - {"metric"}
    own_name = {"metric": f"metric {title}" if title in taken else title}
    numbers = {k: v for k, v in payload.items() if isinstance(v, int | float) and k != "step"}
    return {own_name.get(name, name): value for name, value in numbers.items()}


def metric_title(facts: Mapping[str, Any]) -> str:
    """What a metric is called, which says where it is of the data that were trained on.

    Args:
        facts: ``metric_name`` and ``metric_data`` as payloads, runs and other documents have them.
    """
    name = str(facts.get("metric_name") or "metric")
    return f"{name} on the training data" if facts.get("metric_data") == "training" else name


OnEvent: TypeAlias = Callable[[Event], None]
Tell: TypeAlias = Callable[[str, dict[str, Any]], None]


def teller(on_event: OnEvent | None) -> Tell:
    """``tell(kind, payload)``, which hands an event to the listener, if there is one."""

    def tell(kind: str, payload: dict[str, Any]) -> None:
        if on_event is not None:
            on_event(Event(EventKind(kind), payload))

    return tell
