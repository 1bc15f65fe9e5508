"""A verdict in the terminal."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from vivace import words
from vivace.pages.answer import Answer, capital, ending
from vivace.pages.sameness import plain, sameness
from vivace.plan import Plan
from vivace.verifying.figures import Quantity
from vivace.verifying.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console

HELD = "{} ranks, each with its share of every batch, against one process with whole batches"
SEEN = {
    Quantity.LOSS_BIAS: "a mean loss off by",
    Quantity.GRADIENT_BIAS: "a mean gradient too long or too short by",
    Quantity.GRADIENT_DRIFT: "one that is off in any direction by",
    Quantity.GRADIENT_NOISE: "single gradients off by",
}
LEANING = (Quantity.GRADIENT_BIAS, Quantity.GRADIENT_DRIFT)
# Of a gradient. As much as a learning rate that is off by a tenth brings, which is another training. Half
# of it was seen with 22 batches behind bfloat16: that less is seen is an exception.
SMALL_BIAS = 0.1
COLOURS = {True: "green", False: "red", None: "yellow"}


def headline(verdict: Verdict) -> str:
    """The answer in one sentence."""
    answer = {True: "kept", False: "BROKEN", None: "not judged"}[verdict.kept]
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"promise {verdict.promise.upper()} {answer}{reason}"


def draw(verdict: Verdict, job: str, plan: str, console: Console, *, details: bool = False) -> None:
    """Print the answer, and with `details` every figure before it."""
    if details:
        _draw_checks(verdict, console)
        for told in filter(None, (power(verdict), *map(capital, verdict.details))):
            console.print(f"\n{told}", markup=False)
    console.print()
    ending(answer(verdict, job, plan, details=details), console, details=details)


def answer(verdict: Verdict, job: str, plan: str, *, details: bool = False) -> Answer:
    """Is it the same model, and what the plan does; `plan` as it was given, empty for an edited job.
    `details`: every figure is shown, too.
    """
    sentence = sameness(verdict.to_dict())
    promise = f"Promise {verdict.promise.upper()}, {words.count(verdict.num_checks, 'check')}"
    weighed = any(check["envelope"] for check in verdict.checks)  # else it was told without a shadow
    shadows = f", {words.count(verdict.seeds, 'shadow run')}" if weighed else ""
    ran = f"{promise}{shadows}, {words.duration(verdict.seconds)}"
    every = "" if details else "; --details shows every figure"
    checked = (ran + every,) if verdict.num_checks else ()
    held = [HELD.format(verdict.ranks)] if verdict.ranks > 1 else []
    notes = [told] if (told := verdict.reason_beside(sentence)) else []
    notes += [told for told in (_fed_whole(verdict), _blind(verdict, details)) if told and verdict.kept]
    name = shlex.quote(job)
    under = f" --plan {shlex.quote(plan)}" if plan else ""
    launched = f"torchrun --nproc-per-node {verdict.ranks} -m " if verdict.ranks > 1 else ""
    following = f"{launched}vivace train {name}{under}" if verdict.kept else ""
    following = following or (f"vivace tune {name}" if plan and verdict.ranks == 1 else "")
    return Answer(
        command="verify",
        subject=job,
        sentence=sentence,
        tone={True: "good", False: "bad", None: "open"}[verdict.kept],  # type: ignore[arg-type]
        parts=tuple(Plan.load(plan).does.items()) if plan else (),
        notes=(*held, *notes, *checked),
        next=(following,) if following else (),
    )


def power(verdict: Verdict) -> str:
    """How small a bias would have been seen; or why none would. Empty for a plan that does not round."""
    if not verdict.bias:
        return ""
    if why := verdict.bias["not_tested"]:
        return f"Bias was not tested: {why}."
    seen: dict[str, float] = {}
    for check in verdict.checks:
        if "seen_from" in check and check["quantity"] not in seen:
            seen[check["quantity"]] = check["seen_from"]
    told = [f"{text} {words.percent(seen[of])}" for of, text in SEEN.items() if of in seen]
    steps = words.count(verdict.bias["pairs"], "step")
    return f"Bias, over {steps} of each: seen four times of five from {', '.join(told)} on."


def _blind(verdict: Verdict, details: bool) -> str:
    """That only a large bias would have been seen; empty where a small one would."""
    if not verdict.bias:
        return ""
    if verdict.bias["not_tested"]:
        return "Whether errors lean to one side was not tested" + ("" if details else "; --details says why")
    seen: dict[str, float] = {}
    for check in verdict.checks:
        if "seen_from" in check and (of := check["quantity"]) in LEANING:
            seen[of] = min(check["seen_from"], seen.get(of, math.inf))
    smallest = max(seen.values(), default=0.0)
    if smallest <= SMALL_BIAS:
        return ""
    return f"Errors that lean to one side would be seen from {words.percent(smallest)} of a gradient on"


def _fed_whole(verdict: Verdict) -> str:
    """How many batches were compared, where all were; what was not stands in the reason."""
    passes = verdict.fed.get("data") or []
    if not passes or not all(one["whole"] for one in passes):
        return ""
    batches = {one["batches"] for one in passes}
    each = f"{words.number(min(batches))} batches" if len(batches) == 1 else "all batches"
    return f"Batches were compared to the end of the data: {words.count(len(passes), 'epoch')} of {each}"


def _draw_checks(verdict: Verdict, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("check", overflow="fold")
    for column in ("envelopes", "allowed", "value", "envelope"):
        table.add_column(column, justify="right")
    for check in verdict.checks:
        figures = (words.number(check.get(key)) for key in ("score", "limit", "value", "envelope"))
        style = "" if check["kept"] else COLOURS[check["kept"]]
        table.add_row(Text(plain(check["name"])), *figures, style=style)
    console.print(table)
