"""Live progress of a tune run, and its last words, on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from vivace.ledger import Trial
from vivace.tune.result import Result
from vivace.verify.table import headline


class Progress:
    """Listens to `tune` and shows a line a trial; on a terminal, also a spinner for what is going on."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._begin = time.monotonic()
        self._status: Any = None
        self._phase = ""

    def __enter__(self) -> Self:
        if not self.quiet:
            from rich.console import Console

            self._console = Console(stderr=True, highlight=False)
            if sys.stderr.isatty():
                self._status = self._console.status("starting")
                self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, kind: str, payload: dict[str, Any]) -> None:
        """Show one event of `tune`."""
        if self.quiet:
            return
        if kind == "phase":
            self._phase = payload["name"]
            if self._status is None:
                self._print(self._phase, style="dim")
            else:
                self._status.update(self._phase)
        elif kind == "trial_begin" and self._status is not None:
            self._status.update(f"{self._phase}: {payload['plan']}")
        elif kind == "trial_end":
            self._print(*_line(payload["trial"]))
        elif kind == "verdict":
            verdict = payload["verdict"]
            self._print(
                f"{'':>18}  {payload['plan']}: {headline(verdict)}", style="green" if verdict.kept else "red"
            )

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(
            f"[{time.monotonic() - self._begin:5.0f} s] ", text, style=style, markup=False, sep=""
        )


def _line(trial: Trial) -> tuple[str, str]:
    plan = " + ".join(trial.techniques) or {"baseline_default": "PyTorch's defaults"}.get(
        trial.role, "reference"
    )
    if trial.ratio is None:
        return f"{trial.status:>18}  {plan}: {trial.reason}", "dim"
    ratio = f"{trial.ratio.estimate:.2f}x ({trial.ratio.low:.2f}-{trial.ratio.high:.2f})"
    note = " confirmed in fresh processes" if trial.role == "confirmation" else ""
    return f"{ratio:>18}  {plan}{note}", "bold" if trial.ratio.low > 1.0 else ""


def epilogue(result: Result, job: str, console: Any) -> None:
    """The answer, the plan, and the next commands worth typing."""
    ratio = result.speedup
    console.print()
    if len(result.plan):
        console.print(
            f"{ratio.estimate:.2f}x faster than strict fp32 ({ratio.low:.2f}-{ratio.high:.2f}): {result.plan}",
            style="bold",
        )
    else:
        console.print("Nothing was faster beyond noise: the plan is the reference.", style="bold")
    if result.verdict is not None:
        console.print(headline(result.verdict))
    if result.interrupted:
        console.print("interrupted: this is the best so far, not yet verified", style="yellow")
    console.print(f"plan    {result.plan_path}\nreport  {result.report_path}\n")
    console.print("next:")
    console.print(f"  vivace train {job} --plan {result.plan_path}")
    console.print(f"  vivace verify {job} --plan {result.plan_path} --metric")
    console.print(f"  vivace report {result.plan_path.rpartition('/')[0] or '.'}")
