"""Live progress of tuning and training, and last words, on standard error."""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
from pathlib import PurePath
from typing import Any, Self

from vivace.ledger import Trial
from vivace.report import words
from vivace.tune.result import Result
from vivace.verify.table import COLOURS, headline


class _Lines:
    """Lines with the seconds since the start; on a terminal, also a spinner for what is going on."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._begin = time.monotonic()
        self._status: Any = None

    def __enter__(self) -> Self:
        if not self.quiet:
            from rich.console import Console

            self._console = Console(stderr=True, highlight=False, soft_wrap=True)
            if sys.stderr.isatty():
                self._status = self._console.status("starting")
                self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _doing(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)

    def _print(self, text: str, style: str = "", indent: int = 0) -> None:
        """One line; on a terminal it is folded between words, `indent` columns behind the time."""
        line = f"[{time.monotonic() - self._begin:5.0f} s] {text}"
        if self._status is not None:
            line = textwrap.fill(
                line,
                self._console.width,
                subsequent_indent=" " * (10 + indent),
                break_on_hyphens=False,
                break_long_words=False,
            )
        self._console.print(line, style=style, markup=False)


class TuneProgress(_Lines):
    """Listens to `tune` and shows a line a trial; plans refused without a trial share one line a reason."""

    _phase = ""
    _running = False

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._refused: dict[str, list[str]] = {}

    def __exit__(self, *exception: object) -> None:
        self._tell_refused()
        super().__exit__(*exception)

    def __call__(self, kind: str, payload: dict[str, Any]) -> None:
        """Show one event of `tune`."""
        if self.quiet:
            return
        if kind == "trial_end" and not self._running:
            trial = payload["trial"]
            self._refused.setdefault(trial.reason, []).append(words.plan_name(trial.techniques, trial.role))
            return
        self._tell_refused()
        self._running = kind == "trial_begin"
        if kind == "phase":
            self._phase = payload["name"]
            self._doing(self._phase)
            if self._status is None:
                self._print(self._phase, "dim")
        elif kind == "notice":
            self._print(payload["text"], "yellow")
        elif kind == "trial_begin":
            self._doing(f"{self._phase}: {payload['plan']}")
        elif kind == "trial_end":
            self._print(*_line(payload["trial"]), indent=20)
        elif kind == "verdict":
            verdict = payload["verdict"]
            text = f"{'':>18}  {payload['plan']}: {headline(verdict)}"
            self._print(text, COLOURS[verdict.kept], indent=20)

    def _tell_refused(self) -> None:
        for reason, names in self._refused.items():
            self._print(f"{'refused':>18}  {', '.join(names)}: {reason}", "dim", indent=20)
        self._refused = {}


class TrainProgress(_Lines):
    """Listens to `train` and shows a line an epoch."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event of `train`."""
        if self.quiet:
            return
        kind = event["event"]
        if kind == "step":
            self._doing(_words(event))
        elif kind == "epoch":
            self._print(_words(event))
        elif kind == "resume":
            self._print(f"goes on after step {event['step']}")
        elif kind == "notice":
            self._print(event["text"], "yellow")
        elif kind == "checkpoint":
            self._doing(f"checkpoint of step {event['step']}")
        elif kind == "stop":
            ended = (
                f"stopped by {event['interrupted_by']}; --resume goes on"
                if event["interrupted"]
                else "trained"
            )
            self._print(f"{ended}: {words.count(event['steps'], 'step')}, {event['run_path']}", "bold")


class VerifyProgress(_Lines):
    """Listens to `verify` and says how long it is going to take."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._doing("the reference runs in strict fp32")
        return self

    def __call__(self, kind: str, payload: dict[str, Any]) -> None:
        """Show one event of `verify`."""
        if self.quiet:
            return
        text = f"about {words.duration(payload['left_seconds'])} for the plan and its shadows"
        self._doing(text)
        if self._status is None or payload["left_seconds"] >= 10:
            self._print(f"the reference has run; {text}", "dim")


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
        text = f"measuring {what.replace('_', ' ')} ({share:.0%})"
        self._doing(text)
        now = time.monotonic() - self._begin
        if self._status is None and (what not in self._seen or now - self._told >= 10):
            self._told = now
            self._seen.add(what)
            self._print(text, "dim")


def _words(event: dict[str, Any]) -> str:
    shown = {
        "epoch": "{:.0f}",
        "step": "{:.0f}",
        "loss": "{:.4g}",
        "metric": "{:.4f}",
        "samples_per_second": "{:.0f}",
    }
    names = {"samples_per_second": "samples/s"}
    found = [(k, f) for k, f in shown.items() if isinstance(event.get(k), (int, float))]
    return "  ".join(f"{names.get(key, key)} {form.format(event[key])}" for key, form in found)


def _line(trial: Trial) -> tuple[str, str]:
    plan = words.plan_name(trial.techniques, trial.role)
    if trial.ratio is None:
        return f"{trial.status:>18}  {plan}: {trial.reason}", "dim"
    ratio = f"{trial.ratio.estimate:.2f}x ({trial.ratio.low:.2f}-{trial.ratio.high:.2f})"
    note = " confirmed in fresh processes" if trial.role == "confirmation" else ""
    return f"{ratio:>18}  {plan}{note}", "bold" if trial.ratio.low > 1.0 else ""


def epilogue(result: Result, job: str, console: Any) -> None:
    """The answer, the plan, and the next commands worth typing."""
    ratio, plan = result.speedup, result.plan_path
    whole = not console.is_terminal  # a file gets whole lines
    console.print()
    if len(result.plan):
        text = (
            f"{ratio.estimate:.2f}x as fast as strict fp32 ({ratio.low:.2f}-{ratio.high:.2f}): {result.plan}"
        )
    else:
        text = f"The plan is the reference: {result.reason or 'the search was interrupted'}."
    console.print(text, style="bold", markup=False, soft_wrap=whole)
    if result.verdict is not None:
        console.print(headline(result.verdict), markup=False, soft_wrap=whole)
    after, steps = result.break_even_steps, result.job_steps
    if after is not None and steps is not None and after > steps:
        console.print(
            f"its warm-up pays for itself after {after:,} steps, and this job takes {steps:,}: one run does "
            "not gain by it",
            style="yellow",
            soft_wrap=whole,
        )
    if result.loading:
        console.print(result.loading, markup=False, soft_wrap=whole)
    if result.interrupted:
        console.print("interrupted: this is the best so far, not yet verified", style="yellow")
    console.print(f"plan    {plan}\nreport  {result.report_path}\n\nnext:", markup=False, soft_wrap=True)
    for command in _next(result, job):
        console.print("  " + command, markup=False, soft_wrap=True)


def _next(result: Result, job: str) -> list[str]:
    """The commands worth typing: those for a plan, or those that say why there is none."""
    folder = str(PurePath(result.plan_path).parent)
    shown = f"vivace report {shlex.quote(folder)}"
    name, plan = shlex.quote(job), shlex.quote(result.plan_path)
    if not len(result.plan):
        return [f"vivace profile {name}", shown]
    metric = " --metric" if result.has_metric else ""
    return [f"vivace train {name} --plan {plan}", f"vivace verify {name} --plan {plan}{metric}", shown]
