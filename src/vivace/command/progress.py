"""Live progress of tuning and training on standard error."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Self

from vivace import words
from vivace.errors import printable
from vivace.events import Event, EventKind, metric_title
from vivace.ledger import Trial
from vivace.pages.answer import in_letters
from vivace.pages.status import Status
from vivace.reporting import phrases
from vivace.verifying.table import COLOURS, headline

A_LINE_SECONDS = 60.0  # of a training, where there is no terminal
_STARTED_IN = Path.cwd()  # a job may change it


class _Lines:
    """Lines with the seconds since the start; on a terminal, also a spinner for what is going on."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._begin = time.monotonic()
        self._status: Any = None

    def __enter__(self) -> Self:
        if not self.quiet:
            from vivace.command.console import Lasting

            self._console = Lasting(stderr=True, highlight=False, soft_wrap=True)
            if sys.stderr.isatty():
                self._status = self._console.status("starting")
                self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._status.stop()

    def _doing(self, text: str) -> None:
        if self._status is not None:
            with contextlib.suppress(OSError):
                self._status.update(printable(text))

    def _follow(self, status: Status) -> None:
        """On a terminal, show what a status says, again and again: its time runs on."""
        if self._status is not None:
            with contextlib.suppress(OSError):
                self._status.update(_Line(status))

    def _print(self, text: str, style: str = "", indent: int = 0) -> None:
        """One line; on a terminal it is folded between words, `indent` columns behind the time, or a third
        of it where it is narrow.
        """
        line = f"[{time.monotonic() - self._begin:5.0f} s] {in_letters(printable(text))}"
        if self._status is not None:
            line = textwrap.fill(
                line,
                self._console.width,
                subsequent_indent=" " * min(10 + indent, self._console.width // 3),
                break_on_hyphens=False,
                break_long_words=False,
            )
        with contextlib.suppress(OSError):
            self._console.print(line, style=style, markup=False)


class _Line:
    """One line of a terminal, made anew whenever it is drawn."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(printable(self.status.line), no_wrap=True, overflow="ellipsis")


class TuneProgress(_Lines):
    """Listens to `tune` and shows a line a trial; plans refused without a trial share one line a reason."""

    _running = False

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._refused: dict[str, list[str]] = {}
        self._now = Status()

    def __enter__(self) -> Self:
        super().__enter__()
        self._follow(self._now)
        return self

    def __exit__(self, *exception: object) -> None:
        self._tell_refused()
        super().__exit__(*exception)

    def __call__(self, event: Event) -> None:
        """Show one event of `tune`."""
        if self.quiet:
            return
        self._now(event)
        kind, payload = event.kind, event.payload
        if kind == EventKind.TRIAL_END and not self._running:
            trial = payload["trial"]
            self._refused.setdefault(trial.reason, []).append(phrases.plan_name(trial.techniques, trial.role))
            return
        self._tell_refused()
        self._running = kind == EventKind.TRIAL_BEGIN
        if kind == EventKind.PHASE:
            if self._status is None:
                self._print(payload["name"], "dim")
        elif kind == EventKind.NOTICE:
            self._print(payload["text"], "yellow")
        elif kind == EventKind.TRIAL_END:
            self._print(*_line(payload["trial"]), indent=20)
        elif kind == EventKind.VERDICT:
            verdict = payload["verdict"]
            text = f"{'':>18}  {payload['plan']}: {headline(verdict)}"
            self._print(text, COLOURS[verdict.kept], indent=20)

    def _tell_refused(self) -> None:
        for reason, names in self._refused.items():
            self._print(f"{'refused':>18}  {', '.join(names)}: {reason}", "dim", indent=20)
        self._refused = {}


class TrainProgress(_Lines):
    """Listens to `train` and shows a line an epoch; of several ranks one hears that it `ended`."""

    ended = False

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._now = Status()
        self._told_at = self._begin

    def __call__(self, event: Event) -> None:
        """Show one event of `train`."""
        if self.quiet:
            return
        self._now(event)
        kind, payload = event.kind, event.payload
        if kind == EventKind.STEP:
            self._follow(self._now)
            if self._status is None and time.monotonic() - self._told_at >= A_LINE_SECONDS:
                self._told_at = time.monotonic()
                self._print(self._now.line, "dim")
        elif kind == EventKind.EPOCH:
            self._told_at = time.monotonic()
            left = self._now.seconds_left
            self._print(
                _words(payload, self._now.epochs) + (f"  ends in {words.duration(left)}" if left else "")
            )
        elif kind == EventKind.RESUME:
            self._print(f"goes on after step {payload['step']}")
        elif kind == EventKind.NOTICE:
            self._print(payload["text"], "yellow")
        elif kind == EventKind.UNWATCHED:
            self._print(payload["text"], "dim")
        elif kind == EventKind.STOP:
            self.ended = True


class SweepProgress(_Lines):
    """Listens to `sweep` and shows a line a trial."""

    def __call__(self, event: Event) -> None:
        """Show one event of `sweep`."""
        if self.quiet:
            return
        payload = event.payload
        if event.kind == EventKind.PHASE:
            self._doing(payload["name"])
            if self._status is None:
                self._print(payload["name"], "dim")
        elif event.kind == EventKind.NOTICE:
            self._print(payload["text"], "yellow")
        elif event.kind == EventKind.SWEPT:
            self._print(payload["text"], "dim" if payload["state"] != "complete" else "", indent=2)


class VerifyProgress(_Lines):
    """Listens to `verify` and says how long it is going to take."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._doing("the reference runs in strict fp32")
        return self

    def __call__(self, event: Event) -> None:
        """Show one event of `verify`."""
        if self.quiet:
            return
        payload = event.payload
        if event.kind == EventKind.NOTICE:
            self._print(payload["text"], "yellow")
            return
        if event.kind == EventKind.PHASE:
            self._doing(payload["name"])
            return
        if event.kind == EventKind.SEED:
            self._told_of_seed(payload)
            return
        compiling = ", and what compiling takes" if payload.get("compiles") else ""
        text = f"about {words.duration(payload['left_seconds'])} for the plan and its shadows{compiling}"
        self._doing(text)
        if self._status is None or payload["left_seconds"] >= 10:
            self._print(f"the reference has run; {text}", "dim")

    def _told_of_seed(self, payload: dict[str, Any]) -> None:
        at_most = f"at most {words.duration(payload['left_seconds'])} for the rest"
        self._print(
            f"seed {payload['n']} of at most {payload['seeds']}: {payload['name']} "
            f"{payload['reference']:.4g}, under the plan {payload['plan']:.4g}; {at_most}",
            "dim",
        )
        self._doing(f"both are trained to the end, {at_most}")


class CompressProgress(_Lines):
    """Listens to `compress` and shows a line a form."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._doing("the model as it is")
        return self

    def __call__(self, event: Event) -> None:
        """Show one event of `compress`."""
        if self.quiet:
            return
        if event.kind == EventKind.PHASE:
            self._doing(event.payload["name"])
            self._print(event.payload["name"], "dim")
            return
        if event.kind == EventKind.NOTICE:
            self._print(event.payload["text"], "yellow")
            return
        left = event.payload["left_seconds"]
        at_most = f"; at most {words.duration(left)} left" if left else ""
        if event.kind == EventKind.FORM_BEGIN:
            self._doing(f"{event.payload['form']}: {event.payload['does']}{at_most}")
        elif event.kind == EventKind.FORM_END:
            form = event.payload["form"]
            figure = words.ratio(form.ratio) if form.ratio else form.status
            reason = f": {form.reason}" if form.reason else ""
            style = "bold" if form.status == "kept" else "dim"
            self._print(f"{figure:>18}  {form.name}{reason}{at_most}", style, indent=20)


class MeasureProgress(_Lines):
    """Listens to the measurement of ceilings; without a terminal, a line for what is new or 10 s later."""

    _told = -10.0

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._seen: set[str] = set()

    def __call__(self, share: float, what: str) -> None:
        """Show what is measured, and the share of the time that is spent."""
        if self.quiet:
            return
        text = f"measuring {what.replace('_', ' ')} ({words.percent(share)})"
        self._doing(text)
        now = time.monotonic() - self._begin
        if self._status is None and (what not in self._seen or now - self._told >= 10):
            self._told = now
            self._seen.add(what)
            self._print(text, "dim")


def _words(payload: dict[str, Any], epochs: int | None) -> str:
    shown = {
        "epoch": "{:.0f}" + (f"/{epochs}" if epochs else ""),
        "step": "{:.0f}",
        "loss": "{:.4g}",
        "metric": "{:.4g}" if abs(payload.get("metric") or 1) < 0.1 else "{:.4f}",
    }
    names = {"metric": metric_title(payload)}
    found = [(k, f) for k, f in shown.items() if isinstance(payload.get(k), (int, float))]
    return "  ".join(f"{names.get(key, key)} {form.format(payload[key])}" for key, form in found)


def _line(trial: Trial) -> tuple[str, str]:
    plan = phrases.plan_name(trial.techniques, trial.role)
    if trial.ratio is None:
        return f"{trial.status:>18}  {plan}: {trial.reason}", "dim"
    note = " measured again in fresh processes" if trial.role == "confirmation" else ""
    if trial.full:
        note += f", while the GPU's memory was full {words.count(trial.full, 'time')}"
    return f"{words.ratio(trial.ratio):>18}  {plan}{note}", "bold" if trial.ratio.low > 1.0 else ""


def short(path: str) -> str:
    """A path as a person in the folder where Vivace was started would write it."""
    found = Path(path)
    return str(found.relative_to(_STARTED_IN) if found.is_relative_to(_STARTED_IN) else found)
