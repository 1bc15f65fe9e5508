"""The first table of the READMEs: time to the same accuracy, task by task, from the records of `accuracy`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vivace import words as told
from vivace.recipes import RECIPES

WORDS: dict[str, dict[str, Any]] = {
    "README.md": {
        "head": "Trained to the end on {device}, {cores} cores, {date}; `{command}`, {seeds} seeds each:",
        "columns": (
            "task",
            "time to the same {metric}: strict fp32, the plan",
            "faster",
            "whole training: strict fp32, PyTorch as it comes, the plan",
            "whole training under the plan: over strict fp32; over PyTorch as it comes",
            "final metric: strict fp32, the plan",
            "the same within the margin",
        ),
        "metric": "accuracy",
        "same": {True: "yes, {margin:g} ({p})", False: "**not shown**, {margin:g} ({p})"},
        "looked": "; look {number} needs {level:g}",
        "never": "not reached by {missing} of {seeds}",
        "no plan": "no plan helped",
        "none": "No training to the end has been recorded yet: `scripts/bench accuracy`.",
    },
    "README.zh-CN.md": {
        "head": "完整训练，测量环境：{device}，{cores} 核，{date}；`{command}`，各 {seeds} 个种子：",
        "columns": (
            "任务",
            "达到同样{metric}的时间：严格 fp32、方案",
            "加速比",
            "完整训练：严格 fp32、PyTorch 默认、方案",
            "完整训练的加速比：方案相对严格 fp32；相对 PyTorch 默认",
            "最终指标：严格 fp32、方案",
            "在容差内相同",
        ),
        "metric": "指标",
        "same": {True: "是，{margin:g}（{p}）", False: "**未能证明**，{margin:g}（{p}）"},
        "looked": "；第 {number} 次检验，须小于 {level:g}",
        "never": "{seeds} 次中有 {missing} 次未达到",
        "no plan": "没有有效的方案",
        "none": "尚无完整训练的记录：`scripts/bench accuracy`。",
    },
}


def together(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest record of each machine and budget, with the newest result of each recipe from all records of
    both, those first that hold most. A recipe that failed later keeps what was measured before, and says so.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: record["date"]):
        same = (record["machine"]["fingerprint"], record["budget"])
        rows = found[same]["rows"] if same in found else []
        known = {name: one for name, one in record["recipes"].items() if name in RECIPES}
        dated = [(name, {"date": record["date"], **one}) for name, one in known.items()]
        found[same] = {**record, "rows": rows + dated}
    for one in found.values():
        recipes = one["recipes"] = dict[str, dict[str, Any]]()
        for name, entry in sorted(one.pop("rows"), key=lambda row: row[1]["date"]):
            before = recipes.get(name, {})
            if "speed" in entry or "speed" not in before:
                recipes[name] = entry
            elif "failed" in entry:
                recipes[name] = {**before, "failed": entry["failed"]}
    return sorted(found.values(), key=lambda one: (len(measured(one)), one["date"]), reverse=True)


def measured(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its recipes that were trained to their end."""
    return {name: found for name, found in record["recipes"].items() if "speed" in found}


def table(records: Iterable[dict[str, Any]], file: str) -> str:
    """Each machine that has a recipe trained to its end."""
    words, parts = WORDS[file], []
    for record in records:
        done = measured(record)
        if not done:
            continue
        seeds = " / ".join(sorted({str(found["seeds"]) for found in done.values()}))
        measured_by = {"command": record["command"], "date": dates(record), "seeds": seeds}
        parts.append(words["head"].format(**record["machine"], **measured_by))
        columns = [column.format(metric=words["metric"]) for column in words["columns"]]
        ordered = sorted(done, key=list(RECIPES).index)
        rows = [columns, ["---"] * len(columns), *(row(name, done[name], words) for name in ordered)]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    return "\n" + "\n\n".join(parts or [words["none"]]) + "\n\n"


def dates(record: dict[str, Any]) -> str:
    """When its rows were begun: a record goes on later with what is missing."""
    rows = measured(record).values()
    return " / ".join(sorted({found.get("date", record["date"]) for found in rows} or {record["date"]}))


def row(name: str, found: dict[str, Any], words: dict[str, Any]) -> list[str]:
    """One task."""
    ways = found["ways"]
    whole = ", ".join(told.duration(ways[way]["seconds"]) for way in ("strict", "defaults", "plan"))
    finals = ", ".join(f"{ways[way]['metric']['estimate']:.3f}" for way in ("strict", "plan"))
    same = words["same"][found["equal"]].format(margin=found["margin"], p=p_value(found, words))
    faster = interval(found["to_target"]) if found["to_target"] else "-"
    over = "; ".join(interval(found["speed"][way]) for way in ("strict", "defaults"))
    return [
        f"`{name}`: {RECIPES[name].metric}",
        ", ".join(reached(ways[way], found["seeds"], words) for way in ("strict", "plan")),
        faster if found["plan"] else words["no plan"],
        whole,
        over if found["plan"] else "-",
        finals,
        same,
    ]


def interval(ratio: dict[str, float]) -> str:
    """``1.63x (1.37-1.94)``."""
    return f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"


def p_value(found: dict[str, Any], words: dict[str, Any]) -> str:
    """``p = 0.038``, and where it was not judged for the first time how small it had to be."""
    looks = len(found.get("looks", ()))
    more = words["looked"].format(number=looks, level=found["level"]) if looks > 1 else ""
    return f"p = {found['p']:.2g}{more}"


def pays(found: dict[str, Any]) -> bool:
    """Is a whole training under the plan faster beyond noise, than in strict fp32 and than PyTorch's own?"""
    return bool(found["plan"]) and all(found["speed"][way]["low"] > 1 for way in ("strict", "defaults"))


def reached(way: dict[str, Any], seeds: int, words: dict[str, Any]) -> str:
    """The mean time to the target, or how many trainings never came there."""
    if way["seconds_to_target"] is None:
        return str(words["never"]).format(missing=seeds - way["reached"], seeds=seeds)
    return told.duration(way["seconds_to_target"])
