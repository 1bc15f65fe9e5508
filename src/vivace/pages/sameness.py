"""A verdict in one line: is it the same model, and how near to the limit was the worst check?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vivace import words
from vivace.pages.answer import capital

_FROM_STEP = re.compile(r"(?P<kind>.*), from step (?P<step>\d+)")
_DICTATED = "dictated "
_LIFE = ", over evaluations and epochs"  # as `verifying.life` ends the names of its checks
LEAST_WATCHED = 5  # steps of a run, before they say something about all of them
_PLAIN = {  # what the ruler's figures are called where no one has read how it measures
    "averages": "running averages of the optimizer",
    "bit-identical": "all numbers, bit by bit",
    "decay": "weight decay",
    "displacement of the course": "all weights at the end",
    "evaluation": "outputs in evaluation mode",
    "evaluation under the plan": "outputs in evaluation mode",
    "gradient bias": "mean gradient",
    "gradient drift": "direction of the mean gradient",
    "gradient noise": "noise of the gradient",
    "gradient residual": "direction of the gradient",
    "gradient scale": "size of the gradient",
    "gradient size": "typical size of the gradient",
    "gradient spread": "spread of the gradient over random streams",
    "loss": "loss",
    "loss bias": "mean loss",
    "loss curve": "loss curve",
    "residual": "direction of the update",
    "scale": "size of the update",
    "shrinking": "shrinking or growing of the weights",
    "spread over random streams": "spread of random steps",
}


def sameness(verdict: Mapping[str, Any]) -> str:
    """``Same model: yes. Worst of 157 checks: 4.3 of 8 allowed (weight decay, step 21)``.

    Args:
        verdict: the document of a verdict; empty where nothing was verified.
    """
    if not verdict:
        return "Same model: not verified yet"
    kept, promise, reason = verdict.get("kept"), verdict.get("promise"), str(verdict.get("reason") or "")
    what = "Same metric" if promise == "semantics" else "Same model"
    if kept is None:
        return _joined(f"{what}: not judged", reason)
    answer = f"{what}: {'yes' if kept else 'no'}"
    if promise == "exact" and kept:
        return _joined(f"{answer}, bit for bit", reason)
    beyond = any(share > 1 for share, *_ in _scored(verdict.get("checks") or ()))
    return _joined(answer, (worst_check(verdict) if kept or beyond else "") or reason)


def of_run(run: Mapping[str, Any]) -> tuple[str, bool | None]:
    """The line on the model of a training, and its answer: as `tune` verified its plan, else as its own steps
    showed; empty without a plan.

    Args:
        run: the document of a run, see `vivace.Run`.
    """
    tuned, watched, found = (run.get(key) or {} for key in ("tuned", "watched", "found"))
    verdict = tuned.get("verdict") or {}
    if not run.get("plan"):
        return "", None
    if verdict and watched.get("kept") is not False:
        return f"{sameness(verdict)}, as tune verified", verdict.get("kept")
    if watched.get("kept") is not None:
        return _as_watched(run, watched)
    if found.get("outcome") == "faster":
        return "Same model: yes. Proven on a step of this run before the plan acted", True
    return sameness({}), None


def _as_watched(run: Mapping[str, Any], watched: Mapping[str, Any]) -> tuple[str, bool | None]:
    if watched["kept"] is not True:
        return "Same model: no", False
    watched_steps, taken = (round(words.real(at) or 0) for at in (watched.get("steps"), run.get("steps")))
    steps = max(watched_steps, taken)
    if watched_steps < min(LEAST_WATCHED, steps):
        told = f"{watched_steps} of {words.count(steps, 'step')} {'was' if watched_steps == 1 else 'were'}"
        return f"Same model: not verified. Only {told} watched; there it was the same", None
    told = f"{words.number(watched_steps)} of {words.count(steps, 'step')}"
    return f"Same model: yes, in all {told} that were watched", True


def worst_check(verdict: Mapping[str, Any]) -> str:
    """The check that came nearest to its limit, or went farthest beyond it; empty where none has a score."""
    checks = list(_scored(verdict.get("checks") or ()))
    if not checks:
        return ""
    _, score, limit, name = max(checks, key=lambda check: check[0])
    number = int(words.real(verdict.get("num_checks")) or len(checks))
    return f"Worst of {words.count(number, 'check')}: {of_limit(score, limit)} allowed ({plain(name)})"


def of_limit(score: float, limit: float) -> str:
    """A check's score and its limit, with the digits that show on which side it is: ``4.3 of 8``."""
    digits = next(num for num in range(1, 17) if (round(score, num) > limit) == (score > limit))
    told = f"{score:.{digits}f}" if score < 100 else words.number(score)
    return f"{told} of {limit:.3g}"


def plain(name: str) -> str:
    """A check's name in plain words: ``weight decay, step 21``; a layer and a buffer keep their names."""
    found = _FROM_STEP.fullmatch(name)
    kind, step = (found["kind"], found["step"]) if found else (name, "")
    when = f", step {step}" if step and step != "0" else ""
    if kind.endswith(_LIFE):
        kind, when = kind.removesuffix(_LIFE), f" after evaluations and ends of epochs{when}"
    if kind.startswith(_DICTATED):
        kind, comma, phase = kind.removeprefix(_DICTATED).partition(", ")
        when = f" with given gradients{comma}{phase}{when}"
    kind, of, layer = kind.partition(" of ") if kind not in _PLAIN else (kind, "", "")
    return f"{_PLAIN.get(kind, kind)}{of}{layer}{when}"


def _scored(checks: Iterable[Any]) -> Iterable[tuple[float, float, float, str]]:
    for check in checks:
        if isinstance(check, dict):
            score, limit = words.real(check.get("score")), words.real(check.get("limit"))
            if score is not None and limit:
                yield score / limit, score, limit, str(check.get("name"))


def _joined(answer: str, more: str) -> str:
    return f"{answer}. {capital(more)}" if more else answer
