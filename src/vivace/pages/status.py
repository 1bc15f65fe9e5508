"""What a command is doing at this moment, in a line: how far it is, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vivace import words
from vivace.events import Event, EventKind

NEWEST = 0.3  # weight of the newest speed: a run may become faster or slower
SOON = 3.0  # seconds of training, before which nobody knows when it ends


class Status:
    """Hears the events of a verb; `line` says where it is, and how long it goes on.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._doing = ""
        self._budget: float | None = None
        self._tried, self._best = 0, 0.0
        self._trains: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._at: tuple[float, int] | None = None  # when and at which step the last figures came
        self._began_at: tuple[float, int] | None = None
        self._seconds_a_step: float | None = None

    def __call__(self, event: Event) -> None:
        """Hear one event."""
        kind, payload = event.kind, event.payload
        if kind == EventKind.PHASE:
            self._doing = str(payload["name"])
            self._budget = words.real(payload.get("budget_seconds")) or self._budget
        elif kind == EventKind.TRIAL_BEGIN:
            self._doing = f"trying {payload['plan']}"
        elif kind == EventKind.TRIAL_END:
            self._hear_trial(payload["trial"])
        elif kind == EventKind.BEGIN:
            self._trains = payload
        elif kind in (EventKind.STEP, EventKind.EPOCH):
            self._hear_step(payload)
        elif kind == EventKind.CHECKPOINT:
            self._doing = f"checkpoint of step {words.number(payload['step'])}"
        elif kind == EventKind.STOP:
            self._doing = ""
        elif kind in (EventKind.PREPARED, EventKind.SEED):
            self._doing = f"at most {words.duration(payload['left_seconds'])} to come"
        elif kind == EventKind.FORM_BEGIN:
            self._doing = str(payload["form"])
        elif kind == EventKind.SWEPT:
            self._doing = str(payload["text"])

    @property
    def line(self) -> str:
        """``3:12 of 10:00, 7 tried, best 1.38x, trying compile``; of a training
        ``epoch 3/90, step 412/5,005, loss 0.27, 1,204 samples/s, ends in 38 h 10 min``.
        """
        return self._training() if self._last else self._searching()

    @property
    def seconds_left(self) -> float | None:
        """Of a training whose length is known, once it has been seen for a while."""
        total, step = words.real(self._trains.get("steps")), words.real(self._last.get("step"))
        if total is None or step is None or self._seconds_a_step is None:
            return None
        return max(0.0, total - step) * self._seconds_a_step

    @property
    def epochs(self) -> int | None:
        """Of the training, where it has said so."""
        return self._trains.get("epochs")

    @property
    def place(self) -> str:
        """Epoch and step, of how many."""
        epoch, step = self._last.get("epoch"), self._last.get("step")
        epochs, an_epoch = self._trains.get("epochs"), self._trains.get("steps_per_epoch")
        parts = [f"epoch {epoch}" + (f"/{epochs}" if epochs else "")] if epoch else []
        if step is not None and an_epoch and epoch:
            parts.append(f"step {words.number(step - (epoch - 1) * an_epoch)}/{words.number(an_epoch)}")
        elif step is not None:
            parts.append(f"step {words.number(step)}")
        return ", ".join(parts)

    def _hear_trial(self, trial: Any) -> None:
        if trial.status == "measured" and trial.role == "candidate":
            self._tried += 1
            if trial.ratio.low > 1.0:
                self._best = max(self._best, trial.ratio.counts)

    def _hear_step(self, payload: dict[str, Any]) -> None:
        now, step = self._clock(), int(payload["step"])
        at = self._at
        self._began_at = began = self._began_at or (now, step)  # the first step takes longer than all others
        if step > began[1] and now - began[0] >= SOON:
            usual = (now - began[0]) / (step - began[1])
            newest = (now - at[0]) / (step - at[1]) if at is not None and step > at[1] else usual
            before = self._seconds_a_step if self._seconds_a_step is not None else usual
            self._seconds_a_step = (1 - NEWEST) * before + NEWEST * newest
        if at is None or step > at[1]:
            self._at = now, step
        self._last = {**self._last, **payload}
        self._doing = ""

    def _training(self) -> str:
        parts = [self.place]
        loss, speed = (words.real(self._last.get(key)) for key in ("loss", "samples_per_second"))
        parts += [f"loss {loss:.4g}"] if loss is not None else []
        parts += [f"{words.number(round(speed) if speed > 10 else speed)} samples/s"] if speed else []
        left = self.seconds_left
        parts += [f"ends in {words.duration(left)}"] if left else []
        return ", ".join(part for part in (*parts, self._doing) if part)

    def _searching(self) -> str:
        spent = clock(self._clock() - self._begun)
        parts = [f"{spent} of {clock(self._budget)}" if self._budget is not None else spent]
        parts += [f"{self._tried} tried"] if self._tried else []
        parts += [f"best {self._best:.2f}x"] if self._best else []
        return ", ".join((*parts, self._doing) if self._doing else parts)


def clock(seconds: float) -> str:
    """``3:12``, ``1:00:05``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
