"""A Chrome trace read back: time by operator class and module, the timeline, memory over time."""

from __future__ import annotations

import bisect
import dataclasses
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vivace.operators import class_of, is_operator, seconds_by_class
from vivace.profiling.record import CUT

MOST_POINTS = 400
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclasses.dataclass
class Event:
    """One range of the trace; times in microseconds; `own` is without the ranges inside of it."""

    name: str
    start: float
    end: float
    thread: Any
    arguments: dict[str, Any]
    own: float = 0.0
    parent: Event | None = None


def read_trace(path: Path, device: str = "cpu", usual_steps: Iterable[bool] = ()) -> dict[str, Any]:
    """Facts of the last usual step in the trace; an empty dict where it holds none. Times in seconds.

    `usual_steps`: of each step in turn, whether it did what the loop's steps do.

    A step on ``cuda`` without kernels gets no times of operators and modules: the host's are not theirs.
    """
    events = json.loads(path.read_bytes().decode("utf-8", errors="replace"))["traceEvents"]
    complete = [e for e in events if e.get("ph") == "X"]
    steps = [e for e in complete if e["name"] == "vivace:step" and "gpu" not in e.get("cat", "")]
    cuts = [e["ts"] for e in complete if e["name"] == CUT]
    steps = [e for e in steps if not any(e["ts"] <= cut < e["ts"] + e["dur"] for cut in cuts)]
    if not steps:
        return {}
    steps.sort(key=lambda e: e["ts"])
    alike = [e for e, usual in zip(steps, usual_steps, strict=False) if usual] or steps
    usual = statistics.median_low(e["dur"] for e in alike)
    whole = [e for e in steps if e["dur"] > 0.3 * usual]
    step = [e for e in alike if 0.3 * usual < e["dur"] <= 2 * usual][-1]  # longer: with a validation in it
    begin, end = step["ts"], step["ts"] + step["dur"]
    inside = [e for e in complete if begin <= e["ts"] < end and e is not step]
    operators = _nest(e for e in inside if e.get("cat") == "cpu_op")
    ranges = _nest(e for e in inside if e.get("cat") == "user_annotation")
    phases = [e for e in ranges if e.name.startswith("vivace:")]
    modules = [e for e in ranges if e.name.startswith("module:")]
    within = [e for e in inside if e.get("cat") in KERNELS]
    # A GPU runs behind its host: what the step launched may end after it. A replayed graph's kernels have no
    # operator that launched them: of those only the time is known.
    launchers = {e.arguments.get("External id") for e in operators} - {None}
    every = (e for e in complete if e.get("cat") in KERNELS)
    kernels = [e for e in every if e.get("args", {}).get("External id") in launchers] or within
    unseen = device == "cuda" and not kernels
    timed = [] if unseen else [(e, e.own) for e in operators]
    spent = _without_loading(_kernel_times(kernels, operators) if kernels else timed, phases)
    owner = _owners(operators, modules)
    called = [e.name for e in operators if is_operator(e.name)]
    return {
        "step_seconds": (end - begin) / 1e6,
        "operators": seconds_by_class(((e.name, t / 1e6) for e, t in spent), on_device=bool(kernels)),
        "counts": dict(Counter(map(class_of, called))),
        "num_operators": len(called),
        "num_kernels": len(kernels),
        "busy_seconds": None if unseen else _busy(within, [] if kernels else operators, begin),
        "slowest": _slowest(spent),
        "modules": _by_module(spent, owner, phases),
        **_timeline(complete, whole),
        **_communication([*operators, *ranges], within),
        **_memory(events, (begin, end), operators, owner, phases),
    }


def _timeline(complete: list[dict[str, Any]], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What the loop did when in all traced steps, and when each began, from the beginning of the first."""
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    inside = (
        e
        for e in complete
        if e.get("cat") == "user_annotation" and begin <= e["ts"] < end
        if e["name"].startswith("vivace:") and e["name"] != "vivace:step"
    )
    return {
        "phases": [
            [e.name.removeprefix("vivace:"), (e.start - begin) / 1e6, (e.end - begin) / 1e6]
            for e in _top(_nest(inside))
        ],
        "step_starts": [(e["ts"] - begin) / 1e6 for e in steps],
        "timeline_seconds": (end - begin) / 1e6,
    }


def _nest(events: Iterable[dict[str, Any]]) -> list[Event]:
    """Events with their parents and own times; they nest within one thread."""
    found = [
        Event(e["name"], e["ts"], e["ts"] + e["dur"], e["tid"], e.get("args", {}), e["dur"]) for e in events
    ]
    found.sort(key=lambda e: (str(e.thread), e.start, -e.end))
    stack: list[Event] = []
    for event in found:
        while stack and (stack[-1].thread != event.thread or stack[-1].end <= event.start):
            stack.pop()
        if stack:
            event.parent = stack[-1]
            stack[-1].own -= event.end - event.start
        stack.append(event)
    return found


def _kernel_times(kernels: list[dict[str, Any]], operators: list[Event]) -> list[tuple[Event, float]]:
    """Device time by the operator that launched it."""
    launchers = {e.arguments.get("External id"): e for e in operators}
    found = []
    for kernel in kernels:
        launcher = launchers.get(kernel.get("args", {}).get("External id"))
        if launcher is not None:
            found.append((launcher, float(kernel["dur"])))
    return found


def _without_loading(spent: list[tuple[Event, float]], phases: list[Event]) -> list[tuple[Event, float]]:
    """Without what a data set computes in the loop's own thread: the time for that is the wait for data."""
    loading: dict[Any, list[Event]] = defaultdict(list)
    for phase in phases:
        if phase.name == "vivace:data":
            loading[phase.thread].append(phase)
    return [(e, micros) for e, micros in spent if _innermost(loading[e.thread], e.start) is None]


def _owners(operators: list[Event], modules: list[Event]) -> dict[int, str]:
    """The module of each operator; one of the backward pass belongs to the module of its forward operator."""
    owner: dict[int, str] = {}
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for module in modules:
        by_thread[module.thread].append(module)
    sequences: dict[Any, str] = {}
    for operator in operators:
        innermost = _innermost(by_thread[operator.thread], operator.start)
        if innermost is not None:
            owner[id(operator)] = innermost.name.removeprefix("module:")
            number = operator.arguments.get("Sequence number")
            if number is not None:
                sequences[number] = owner[id(operator)]
    for operator in operators:
        above: Event | None = operator
        while id(operator) not in owner and above is not None:
            number = above.arguments.get("Sequence number")
            if above.name.startswith("autograd::engine") and number in sequences:
                owner[id(operator)] = sequences[number]
            above = above.parent
    return owner


def _innermost(ranges: list[Event], moment: float) -> Event | None:
    place = bisect.bisect_right(ranges, moment, key=lambda e: e.start) - 1
    event = ranges[place] if place >= 0 else None
    while event is not None and event.end <= moment:
        event = event.parent
    return event


def _by_module(
    spent: list[tuple[Event, float]], owner: dict[int, str], phases: list[Event]
) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, float]] = defaultdict(lambda: {"forward": 0.0, "backward": 0.0})
    backward = [e for e in phases if e.name == "vivace:backward"]
    for event, micros in spent:
        name = owner.get(id(event))
        if name is not None:
            behind = any(e.start <= event.start < e.end for e in backward)
            rows[name]["backward" if behind else "forward"] += micros / 1e6
    longest = sorted(rows.items(), key=lambda item: -sum(item[1].values()))
    return [{"name": name, **row} for name, row in longest[:40]]


def _slowest(spent: list[tuple[Event, float]]) -> list[dict[str, Any]]:
    names = _sum((e.name, t) for e, t in spent)
    counts = Counter(e.name for e, _ in spent)
    longest = sorted(names.items(), key=lambda item: -item[1])
    return [{"name": name, "seconds": seconds, "count": counts[name]} for name, seconds in longest[:12]]


def _sum(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds by name from microseconds."""
    total: Counter[str] = Counter()
    for name, micros in pairs:
        total[name] += micros / 1e6  # type: ignore[assignment]
    return dict(total)


def _top(events: list[Event]) -> list[Event]:
    return [e for e in events if e.parent is None or not e.parent.name.startswith("vivace:")]


def _busy(kernels: list[dict[str, Any]], operators: list[Event], begin: float) -> float:
    """Seconds during which the device worked: a kernel ran, or on a CPU an operator of any thread."""
    if kernels:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels)
    else:
        spans = sorted((e.start, e.end) for e in operators if e.parent is None)
    busy, last = 0.0, begin
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy / 1e6


def _communication(ranges: list[Event], kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of collectives, and of those the seconds during which nothing else ran."""
    if kernels:
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if "nccl" in e["name"].lower()]
        others = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if "nccl" not in e["name"].lower()]
    else:
        spans = [(e.start, e.end) for e in ranges if _is_collective(e.name)]
        others = [(e.start, e.end) for e in ranges if _is_work(e)]
    alone = _length(spans + others) - _length(others) if spans else 0.0
    return {"communication_seconds": max(0.0, alone) / 1e6, "collective_seconds": _length(spans) / 1e6}


def _is_work(event: Event) -> bool:
    """Is it an operator? Ranges of phases, of modules and of the engine do nothing by themselves."""
    return event.name.startswith("aten::")


def _is_collective(name: str) -> bool:
    return name.startswith(("gloo:", "nccl:", "c10d::", "record_param_comms", "mpi:"))


def _length(spans: list[tuple[float, float]]) -> float:
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def _memory(
    events: list[dict[str, Any]],
    span: tuple[float, float],
    operators: list[Event],
    owner: dict[int, str],
    phases: list[Event],
) -> dict[str, Any]:
    """Bytes above the step's beginning over time, and what ran at the highest point."""
    on_gpu = any(e["name"] == "[memory]" and e["args"].get("Device Type") == 1 for e in events)
    moves = sorted(
        (e["ts"], e["args"].get("Bytes", 0))
        for e in events
        if e["name"] == "[memory]" and span[0] <= e["ts"] < span[1]
        if not on_gpu or e["args"].get("Device Type") == 1
    )
    total, highest, at = 0, 0, span[0]
    curve = []
    for moment, size in moves:
        total += size
        curve.append([(moment - span[0]) / 1e6, total])
        if total > highest:
            highest, at = total, moment
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for operator in operators:
        by_thread[operator.thread].append(operator)
    running = [e for thread in by_thread.values() if (e := _innermost(thread, at)) is not None]
    inner = min(running, key=lambda e: e.end - e.start, default=None)
    phase = next((e.name.removeprefix("vivace:") for e in phases if e.start <= at < e.end), "forward")
    return {
        "memory_curve": _thin(curve),
        "rise_bytes": highest,
        "peak_at": {
            "seconds": (at - span[0]) / 1e6,
            "phase": phase,
            "operator": inner.name if inner else None,
            "module": owner.get(id(inner)) if inner else None,
        },
    }


def _thin(curve: list[list[float]]) -> list[list[float]]:
    """At most so many points; of each group the highest stays, so that the peak does."""
    length = -(-len(curve) // MOST_POINTS) or 1
    groups = [curve[i : i + length] for i in range(0, len(curve), length)]
    return [max(group, key=lambda point: point[1]) for group in groups]
