"""The answer of a tune or train run: what its page opens with, and what the command ends with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace import words
from vivace.ledger import Outcome, Ratio
from vivace.pages.answer import Answer
from vivace.pages.sameness import of_run, sameness
from vivace.reporting import phrases
from vivace.reporting.content import Content, ratio_of

_NO_LENGTH = (
    "How long the training is was not known, so no warm-up is weighed: for minutes, tune it with --steps N"
)
_CROWDED = "Timed on one thread, as others computed on this processor"
_TRAINING_DATA = "The job has no validation: its metric is of the training data"


def answer(content: Content, beside: Mapping[str, Any] | None = None) -> Answer:
    """What the run's files say, the most important first; `beside` is what another training ended with."""
    return _tuned(content) if content.tuned else _trained(content, beside or {})


def _tuned(content: Content) -> Answer:
    result, verdict = content.result, content.verdict
    figure, sentence, tone = _gain(content)
    has_plan = bool(content.plan)
    return Answer(
        command="tune",
        subject=_subject(content),
        figure=figure,
        sentence=sentence,
        tone=tone,  # type: ignore[arg-type]
        same=sameness(verdict) if has_plan else "",
        same_kept=verdict.get("kept"),
        parts=parts(content.plan, _mapping(result.get("does"))),
        notes=tuple(_notes(content)),
        facts=tuple(_facts(content)),
        next=_next(content),
        date=str(content.run.get("date") or ""),
        page=str(result.get("report_path") or ""),
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _subject(content: Content) -> str:
    return str(content.job.get("name") or content.folder.name)


def parts(plan: Mapping[str, Any], does: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """A plan's techniques and what each does; its settings where nothing says that."""
    return tuple((name, str(does.get(name) or phrases.setting(chosen))) for name, chosen in plan.items())


def _gain(content: Content) -> tuple[str, str, str]:
    """The large figure, what it is of, and the tone."""
    speedup, outcome, result = content.speedup, content.outcome, content.result
    if not result or (content.interrupted and not content.plan):
        return "", _unfinished(content), "open"
    if outcome in phrases.ENDINGS or speedup is None:
        outcome = outcome if outcome in phrases.ENDINGS else Outcome.NOTHING_HELPS
        more = f": give {_budget(content)}" if result.get("more_time") else ""
        return "", f"{phrases.ENDINGS[outcome]}{more}", "plain" if outcome.answered else "open"
    if content.broken:
        return "", "Not the same model", "bad"
    bounds = words.interval(speedup.low, speedup.high)
    if outcome == Outcome.FITS and content.final and content.final.peak_bytes:
        budget = words.size(result.get("memory_bytes") or content.run.get("memory_bytes"))
        rest = f"at its peak, within {budget}; {words.fast(speedup)} as strict fp32 ({bounds})"
        return words.size(content.final.peak_bytes), rest, "good"
    if speedup.low <= 1:
        rest = f"Not faster beyond noise: {words.fast(speedup)} as strict fp32 ({bounds})"
        return "", rest, "plain"
    found = _mapping(result.get("training_seconds"))
    before, after, steps = _whole(content)
    if before is None or after is None:
        return words.fast(speedup), f"as strict fp32 ({bounds})", "good"
    low, high = (words.duration(found.get(f"plan_{end}")) for end in ("low", "high"))
    if after >= before:
        gains = f"One training of {steps} steps gains nothing: {words.duration(before)} as it is, "
        gains += f"{words.duration(after)} under the plan, which pays in longer ones; "
        gains += f"its steps are {words.fast(speedup)} ({bounds})"
        return "", gains, "plain"
    rest = "" if low == high or words.UNKNOWN in (low, high) else f"({low} to {high}) "
    rest += f"for one training of {steps} steps, all included; a step is {words.fast(speedup)} as"
    return (
        f"{words.duration(before)} \N{RIGHTWARDS ARROW} {words.duration(after)}",
        f"{rest} in strict fp32 ({bounds})",
        "good",
    )


def _whole(content: Content) -> tuple[float | None, float | None, str]:
    """The seconds of one training as it is and under the plan, and its steps."""
    found = _mapping(content.result.get("training_seconds"))
    steps = words.number(content.result.get("job_steps"))
    return words.real(found.get("reference")), words.real(found.get("plan")), steps


def _gains(content: Content) -> bool | None:
    """Does one whole training end sooner under the plan? None where its minutes are not known."""
    before, after, _ = _whole(content)
    return None if before is None or after is None else after < before


def _unfinished(content: Content) -> str:
    best = content.best
    if best is None:
        return "Interrupted before anything faster was found: nothing is decided"
    bounds = words.interval(best.ratio.low, best.ratio.high)
    return (
        f"Interrupted; best so far {words.fast(best.ratio)} ({bounds}) by {best.name}, neither confirmed nor "
        "verified"
    )


def _notes(content: Content) -> list[str]:
    """What a person should know beside the figures, the gravest first."""
    result, notes = content.result, []
    if content.broken:
        reason, speed = str(content.verdict.get("reason") or ""), content.speedup
        promise = str(result.get("promise") or "").upper()
        told = words.unless_said(reason, sameness(content.verdict))
        notes.append(f"The promise {promise} is broken{': ' if told else ''}{told}".replace("  ", " "))
        notes += [f"Its steps ran {words.fast(speed)} as strict fp32"] if speed else []
    elif content.outcome in phrases.ENDINGS and result.get("reason"):
        notes.append(str(result["reason"]))
    if content.interrupted and content.plan:
        notes.append("The run was interrupted: this is the best it had found, not verified")
    elif content.tuned and not result:
        notes.append("There is no result yet: what follows is what was measured until then")
    if content.late_steps and content.job_steps and _gains(content) is None:
        late, steps = words.number(int(content.late_steps)), words.number(int(content.job_steps))
        notes.append(
            f"Its warm-up pays for itself after {late} steps, and this job takes {steps}: one run does not "
            "gain by it"
        )
    notes += [_CROWDED] if result.get("crowded") is True and content.plan and not content.broken else []
    notes += _of_ranks(result)
    if content.plan and not content.broken and "job_steps" in result and not content.job_steps:
        notes.append(_NO_LENGTH)
    notes += _cost(result) if content.plan and not content.broken else []
    longer = result.get("long_plan")
    notes += [_longer(longer, content.folder)] if isinstance(longer, dict) else []
    notes += [f"Loading: {content.loading}"] if content.loading else []
    notes += [_TRAINING_DATA] if result.get("metric_data") == "training" else []
    notes += _left_out(content)
    if content.unread:
        what = "trial" if content.unread == 1 else "trials"
        be = "is" if content.unread == 1 else "are"
        notes.append(f"{content.unread} {what} in the ledger could not be read and {be} left out")
    return notes


def _left_out(content: Content) -> list[str]:
    """What of the run's files cannot be read."""
    more = f", and {len(content.skipped) - 1} more" if len(content.skipped) > 1 else ""
    return [f"Left out, as it cannot be read: {content.skipped[0]}{more}"] if content.skipped else []


def _of_ranks(result: Mapping[str, Any]) -> list[str]:
    """Of what a search on several ranks is the answer."""
    ranks, over_one = words.real(result.get("ranks")), words.real(result.get("over_one_rank"))
    if ranks is None or ranks < 2:
        return []
    together = f"All figures are of {int(ranks)} ranks together, each with its share of every batch"
    if over_one is None:
        return [together]
    return [f"{together}; without the plan they are {words.times(over_one)} as fast as one"]


def _cost(result: Mapping[str, Any]) -> list[str]:
    """What tuning took beside what the plan saves in one training, where both are known."""
    found = _mapping(result.get("training_seconds"))
    took, before, after = map(words.real, (result.get("seconds"), found.get("reference"), found.get("plan")))
    if took is None or before is None or after is None or after >= before:
        return []
    return [f"Tuning took {words.duration(took)}; the plan saves {words.duration(before - after)} a training"]


def _longer(plan: dict[str, Any], folder: Path) -> str:
    """A plan that wins in longer trainings only, which lies in the folder."""
    judged = "same model" if plan.get("verified") else "not verified yet"
    speedup = ratio_of(plan.get("speedup"))
    fast = words.fast(speedup) if speedup else words.UNKNOWN
    return (
        f"For trainings of {words.number(plan.get('from_steps'))} steps and more there is "
        f"{folder / Path(plan.get('plan_path') or '').name}: {phrases.plan_name(plan.get('plan') or {})}, "
        f"{fast}, after a warm-up of {words.duration(plan.get('warmup_seconds'))}; {judged}"
    )


def _facts(content: Content) -> list[tuple[str, str]]:
    """The few figures that stand under the plan on the page."""
    result, measured = content.result, len(content.measured)
    facts: list[tuple[str, str]] = []
    if content.plan and not content.broken:
        over, pays = content.over_default, phrases.steps(result.get("break_even_steps"))
        if bool(content.late_steps) is _gains(content):  # it says otherwise than the minutes, which hold more
            pays = words.UNKNOWN
        facts += [
            ("as fast as PyTorch's defaults", words.times(over)),
            ("steps until the warm-up is gained back", pays.removesuffix(" steps").removesuffix(" step")),
            *_warmup(content),
        ]
        loader = content.without_loader
        facts.append(("as fast, if loading data cost nothing", words.times(loader)))
    before, after = content.peaks
    if after:
        was = f"peak memory; {words.size(before)} in strict fp32" if before else "peak memory"
        facts.append((was, words.size(after)))
    if content.plan and content.final and content.final.joules:
        strict, plan = (words.quantity(joules, "J") for joules in content.final.joules)
        facts.append((f"a sample; {strict} in strict fp32", plan))
    if content.trials:
        told = f"measured; {len(content.trials) - measured} ruled out or failed"
        facts.append((told, words.count(measured, "trial")))
    facts.append(("the search took", words.duration(result.get("seconds"))))
    return [(name, value) for name, value in facts if value != words.UNKNOWN]


def _warmup(content: Content) -> list[tuple[str, str]]:
    """The warm-up, where it is longer while nothing is compiled yet."""
    warm, cold = (words.real(content.result.get(f"{key}warmup_seconds")) for key in ("", "cold_"))
    if warm is None or cold is None or cold <= 2 * warm + 1:
        return []
    name = f"warm-up on this machine; {words.duration(cold)} where nothing is compiled yet"
    return [(name, words.duration(warm))]


def _next(content: Content) -> tuple[str, ...]:
    """The command worth typing: to train by the plan, or to learn why there is none."""
    result, command = content.result, str(content.run.get("command") or "")
    in_python = command.startswith("vivace.")
    vivace = _launched(result)
    job, plan = shlex.quote(_subject(content)), str(result.get("plan_path") or "")
    folder = shlex.quote(str(Path(plan).parent)) if plan else shlex.quote(str(content.folder))
    if content.plan and plan and not content.broken and content.verdict.get("kept") is None:
        if in_python:
            return (f"vivace.verify(job, {plan!r})",)
        return (f"{vivace} verify {job} --plan {shlex.quote(plan)}",)
    if content.plan and plan and not content.broken:
        if _gains(content) is False:
            return ("vivace.train(job)",) if in_python else (f"{vivace} train {job}",)
        if in_python:
            return (f"vivace.train(job, {plan!r})",)
        return (f"{vivace} train {job} --plan {shlex.quote(plan)}",)
    if not result or content.broken or not content.outcome.answered:
        return (_again(content, f"{vivace} tune {job} --budget balanced --out {folder}"),)
    return ("vivace.profile(job)",) if in_python else (f"{vivace} profile {job}",)


def _budget(content: Content) -> str:
    """The larger budget that a search needs, as the person gives it."""
    more = str(content.result.get("more_time"))
    in_python = str(content.run.get("command") or "").startswith("vivace.")
    return f"budget={more!r}" if in_python else f"--budget {more}"


def _again(content: Content, plain: str) -> str:
    """The command of a search once more, with the larger budget where it needs one.

    `plain` is what it is where nothing tells how it was started.
    """
    command, more = str(content.run.get("command") or ""), str(content.result.get("more_time") or "")
    if command.startswith("vivace."):
        given = command if "budget=" in command else f"{command.removesuffix(')')}, budget='auto')"
        return re.sub(r"budget=[^,)]*", _budget(content), given) if more else command
    try:
        words = shlex.split(command or plain)
    except ValueError:  # no shell's
        return command
    if more and "--budget" in words[:-1]:
        words[words.index("--budget") + 1] = more
    return shlex.join(words)


def _launched(document: Mapping[str, Any]) -> str:
    """How the command is started with as many ranks as a run or a search had."""
    ranks = int(words.real(document.get("ranks")) or 1)
    return f"torchrun --nproc-per-node {ranks} -m vivace" if ranks > 1 else "vivace"


def _trained(content: Content, beside: Mapping[str, Any]) -> Answer:
    """What a training run ended with, and what `tune` had found of its plan."""
    run, tuned = content.training, _mapping(content.training.get("tuned"))
    found = _mapping(run.get("found"))
    plan, seconds = _mapping(run.get("plan")), words.real(run.get("seconds"))
    speedup = ratio_of(tuned.get("speedup")) if plan else None
    stopped, unfinished = bool(run.get("interrupted")), bool(run.get("unfinished"))
    figure, sentence = _took(content, seconds, speedup, beside)
    notes = [str(notice) for notice in run.get("notices") or []]
    if beside.get("device") and beside["device"] != run.get("device"):
        notes.append(f"The other training ran on another device: {beside['device']}")
    notes += [f"Its steps are {words.fast(speedup)} as in strict fp32, as tune measured"] if speedup else []
    notes += [*_found(found), *_left_out(content)]
    name = str(run.get("job") or "")
    job, folder = shlex.quote(name or "JOB"), shlex.quote(str(content.folder))
    again = f"{_launched(run)} train {job} --out {folder} --resume"
    same, same_kept = of_run(run)
    return Answer(
        command="train",
        subject=name or content.folder.name,
        figure=figure,
        sentence=sentence,
        tone="open" if stopped or unfinished else "bad" if same_kept is False else "good",
        same=same,
        same_kept=same_kept,
        parts=parts(plan, _mapping(run.get("does"))),
        notes=tuple(notes),
        facts=tuple(_run_facts(run)),
        next=(again,) if stopped or unfinished or content.epochs_left else (),
        page=str(found.get("page") or ""),
        date=str(run.get("date") or ""),
    )


def _found(found: Mapping[str, Any]) -> list[str]:
    """What a search while the run trained came to, where it ended with the run: else a notice has said it."""
    if not found or found.get("ended"):
        return []
    ratio = ratio_of(found.get("ratio"))
    if found.get("outcome") != "faster" or ratio is None:
        return [f"Nothing was changed while it trained: {found.get('reason')}"]
    bounds = words.interval(ratio.low, ratio.high)
    return [f"Steps under the plan were {words.fast(ratio)} ({bounds}); the search had not ended"]


def _took(
    content: Content, seconds: float | None, speedup: Ratio | None, beside: Mapping[str, Any]
) -> tuple[str, str]:
    """The time of a training and what it ended with; the time that it took otherwise where that was measured,
    or would have taken where it is known.
    """
    run = content.training
    if run.get("interrupted"):
        by = f" by {run['interrupted_by']}" if run.get("interrupted_by") else ""
        return "", f"Stopped{by} after {content.trained}; it can go on"
    if run.get("unfinished"):
        return "", f"Not ended, or still running: {content.trained}"
    if seconds is None:
        return "", f"Trained {content.trained}"
    took = words.duration(seconds)
    other = None if beside.get("interrupted") else words.real(beside.get("seconds"))
    if other is not None and beside.get("steps") == run.get("steps"):
        return f"{took} instead of {words.duration(other)}", f"to train {content.trained}"
    stepping = words.real(run.get("stepping_seconds")) or 0.0
    steps, before = (words.real(run.get(key)) or 0.0 for key in ("steps", "resumed_from_step"))
    if steps > before:  # else nothing was left to be trained, and it is of the process before
        stepping *= steps / (steps - before)
    saved = (speedup.counts - 1) * stepping if speedup else 0.0
    saved = saved or words.real(_mapping(run.get("found")).get("saved_seconds")) or 0.0
    figure = f"{took} instead of about {words.duration(seconds + saved)}" if saved > 0.05 * seconds else took
    return figure, f"to train {content.trained}"


def _energy(found: Mapping[str, Any]) -> tuple[str, str]:
    """Of a sample and who counted it, or why nobody did."""
    if found.get("reason"):
        return f"energy: {found['reason']}", "not measured"
    counters = ", ".join(map(str, found.get("counters") or []))
    return f"a sample; counted by {counters}", words.quantity(found.get("joules_per_sample"), "J")


def _run_facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("samples a second", words.number(run.get("samples_per_second") or None)),
        ("resumed from step", words.number(run.get("resumed_from_step") or None)),
        _energy(_mapping(run.get("energy"))),
        ("machine", str(run.get("device") or words.UNKNOWN)),
    ]
    return [(name, value) for name, value in facts if value != words.UNKNOWN]
