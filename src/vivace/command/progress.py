"""Live progress of tuning and training, and last words, on standard error."""

from __future__ import annotations

import contextlib
import shlex
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Self

from vivace import words
from vivace.errors import printable
from vivace.ledger import Trial
from vivace.reporting import phrases
from vivace.tuning.result import Result
from vivace.verifying.table import COLOURS, headline

_STARTED_IN = Path.cwd()  # a job may change it


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
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._status.update(printable(text))

    def _print(self, text: str, style: str = "", indent: int = 0) -> None:
        """One line; on a terminal it is folded between words, `indent` columns behind the time."""
        line = f"[{time.monotonic() - self._begin:5.0f} s] {printable(text)}"
        if self._status is not None:
            line = textwrap.fill(
                line,
                self._console.width,
                subsequent_indent=" " * (10 + indent),
                break_on_hyphens=False,
                break_long_words=False,
            )
        with contextlib.suppress(OSError):
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
            self._refused.setdefault(trial.reason, []).append(phrases.plan_name(trial.techniques, trial.role))
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
        elif kind == "unwatched":
            self._print(event["text"], "dim")
        elif kind == "checkpoint":
            self._doing(f"checkpoint of step {event['step']}")
        elif kind == "stop":
            ended = (
                f"stopped by {event['interrupted_by']}; --resume goes on"
                if event["interrupted"]
                else "trained"
            )
            metric = event.get("metric")
            told = f"{phrases.metric(event.get('metric_data'))} {metric:.4f}, " if metric is not None else ""
            steps = words.count(event["steps"], "step")
            if event.get("watched"):
                self._print(event["watched"]["sentence"], "dim")
            self._print(f"{ended}: {steps}, {told}{_short(event['run_path'])}", "bold")


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
        text = f"measuring {what.replace('_', ' ')} ({words.percent(share)})"
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
    names = {"samples_per_second": "samples/s", "metric": phrases.metric(event.get("metric_data"))}
    found = [(k, f) for k, f in shown.items() if isinstance(event.get(k), (int, float))]
    return "  ".join(f"{names.get(key, key)} {form.format(event[key])}" for key, form in found)


def _line(trial: Trial) -> tuple[str, str]:
    plan = phrases.plan_name(trial.techniques, trial.role)
    if trial.ratio is None:
        return f"{trial.status:>18}  {plan}: {trial.reason}", "dim"
    ratio = _plain(words.ratio(trial.ratio))
    note = " measured again in fresh processes" if trial.role == "confirmation" else ""
    return f"{ratio:>18}  {plan}{note}", "bold" if trial.ratio.low > 1.0 else ""


def _plain(text: str) -> str:
    """The signs of ratios and intervals in letters that every terminal has: ``2.31x (2.24-2.38)``."""
    return text.translate({0xD7: "x", 0x2013: "-"})


def _answer(result: Result) -> tuple[str, str, str]:
    """What `tune` found: the first line, its style, and what more is to say."""
    verdict = result.verdict
    if result.outcome in phrases.ENDINGS:
        style = "bold" if result.outcome.answered else "bold yellow"
        return f"{phrases.ENDINGS[result.outcome]}.", style, f"{result.reason}." if result.reason else ""
    if not len(result.plan):
        return "The plan is the reference: the search was interrupted.", "bold", ""
    ratio, bounds = result.speedup, words.interval(result.speedup.low, result.speedup.high)
    speed = _plain(f"{words.speed(ratio)} as fast as strict fp32 ({bounds}): {result.plan}")
    if verdict is not None and verdict.judged and not verdict.kept:
        return "Not the same model.", "bold red", f"{headline(verdict)}\n{speed}"
    return speed, "bold", headline(verdict) if verdict is not None else ""


def _training(result: Result) -> str:
    """What one whole training takes with and without the plan, where its length is known."""
    seconds = result.training_seconds
    if not seconds or result.job_steps is None:
        return ""
    before, after = (words.duration(seconds[key]) for key in ("reference", "plan"))
    text = f"steps and warm-up of one training ({result.job_steps:,} steps): {before} -> {after}"
    warm, cold = result.warmup_seconds or 0.0, result.cold_warmup_seconds or 0.0
    if cold > 2 * warm + 1:
        text += f"; the warm-up is {words.duration(cold)} where nothing is compiled yet"
    return text


def _longer(result: Result) -> str:
    plan = result.long_plan
    if plan is None:
        return ""
    known = (plan.speedup, plan.from_steps, plan.warmup_seconds, _short(plan.plan_path))
    text = phrases.longer(phrases.plan_name(plan.plan.to_dict()), *known, verified=plan.verified)
    return _plain(text)


def epilogue(result: Result, job: str, console: Any) -> None:
    """The answer, the plan, and the next commands worth typing."""
    whole = not console.is_terminal  # a file gets whole lines
    console.print()
    answer, style, more = _answer(result)
    console.print(answer, style=style, markup=False, soft_wrap=whole)
    training_data = "the Job has no validation: its metric is of the training data"
    told = training_data if result.metric_data == "training" else ""
    for text in (more, _training(result), _longer(result), told):
        if text:
            console.print(text, markup=False, soft_wrap=whole)
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
    paths = f"plan    {_short(result.plan_path)}\nreport  {_short(result.report_path)}"
    console.print(f"{paths}\n\nnext:", markup=False, soft_wrap=True)
    for command in _next(result, job):
        console.print("  " + command, markup=False, soft_wrap=True)


def _short(path: str) -> str:
    """A path as a person in the folder where Vivace was started would write it."""
    found = Path(path)
    return str(found.relative_to(_STARTED_IN) if found.is_relative_to(_STARTED_IN) else found)


def _next(result: Result, job: str) -> list[str]:
    """The commands worth typing: those for a plan, or those that say why there is none."""
    plan_path = _short(result.plan_path)
    folder = str(Path(plan_path).parent)
    shown = f"vivace report {shlex.quote(folder)}"
    name, plan = shlex.quote(job), shlex.quote(plan_path)
    if not result.outcome.answered and not len(result.plan):
        return [f"vivace tune {name} --budget balanced --out {shlex.quote(folder)}", shown]
    if not len(result.plan):
        return [f"vivace profile {name}", shown]
    metric = " --metric" if result.has_metric else ""
    return [f"vivace train {name} --plan {plan}", f"vivace verify {name} --plan {plan}{metric}", shown]
