"""docs/cases.md and its Chinese sister: trainings to the end as cases, from the records of `accuracy`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from vivace import words as told
from vivace.recipes import RECIPES

MOST = 4  # of a kind that are listed
WORDS: dict[str, dict[str, Any]] = {
    "cases.md": {
        "head": "# Cases\n\nWritten by `scripts/bench table` from the records of `scripts/bench "
        "accuracy`; do not "
        "edit. Each recipe was trained to the end in strict fp32, by a plain PyTorch loop, and under "
        "the plan that "
        "`vivace tune` found, with several seeds each, in processes that alternate. The final metric "
        "is of data "
        "that neither trained nor chose anything. *Time to the metric*: until the validation data "
        "reached the "
        "mean of strict fp32 less the margin.",
        "none": "No training to the end has been recorded yet.",
        "machine": "Measured on {device}, {cores} cores, {date}, Vivace {vivace}.",
        "ways": {"strict": "strict fp32", "defaults": "PyTorch as it comes", "plan": "the plan"},
        "columns": (
            "way",
            "whole training",
            "to the metric",
            "{metric}, 95 % interval",
            "peak memory",
            "energy",
        ),
        "data": "{task} on {data}; margin {margin:g}.",
        "helped": "What helped: {what}.",
        "nothing": "What helped: nothing that was tried.",
        "slower": "What did not: {what}.",
        "refused": "What could not act: {what}.",
        "failed": "What broke: {what}.",
        "cost": "What it cost: {seconds} of searching, which pays after {runs} trainings.",
        "cost_nothing": "What it cost: {seconds} of searching, which nothing pays back.",
        "equal": "The plan's metric is the same within the margin (p = {p:.2g}).",
        "unequal": "The plan's metric was **not shown to be the same** (difference {estimate:+.4f}, "
        "{low:+.4f} to "
        "{high:+.4f}; p = {p:.2g}).",
        "take": "With such a job: run `vivace tune`, then `vivace train` with the plan; a whole training was "
        "{ratio:.2f}x ({low:.2f}-{high:.2f}) as fast.",
        "leave": "With such a job: train it as it is; under the plan a whole training was {ratio:.2f}x "
        "({low:.2f}-{high:.2f}) as fast, which is no gain beyond noise.",
        "doubt": "With such a job: do not take this plan without `vivace verify --metric` and more seeds.",
        "never": "never",
        "of": "{seconds} ({reached} of {seeds})",
    },
    "cases.zh-CN.md": {
        "head": "# 案例\n\n由 `scripts/bench table` 根据 `scripts/bench accuracy` 的记录生成，请勿手动"
        "修改。每个任务都完整训练到结束，"
        "分三种方式：严格 fp32、普通 PyTorch 循环、`vivace tune` 找到的方案；每种方式用多个随机种子，各"
        "在独立进程中交替进行。"
        "最终指标在未参与训练也未参与选择的数据上计算。*达到指标的时间*：验证数据达到严格 fp32 的均值减"
        "去容差为止。",
        "none": "尚无完整训练的记录。",
        "machine": "测量环境：{device}，{cores} 核，{date}，Vivace {vivace}。",
        "ways": {"strict": "严格 fp32", "defaults": "PyTorch 默认", "plan": "方案"},
        "columns": ("方式", "完整训练", "达到指标", "{metric}，95% 区间", "峰值内存", "能耗"),
        "data": "{task}，数据：{data}；容差 {margin:g}。",
        "helped": "有效的：{what}。",
        "nothing": "有效的：所试的都没有。",
        "slower": "无效的：{what}。",
        "refused": "无法使用的：{what}。",
        "failed": "出错的：{what}。",
        "cost": "代价：搜索用时 {seconds}，训练 {runs} 次后收回。",
        "cost_nothing": "代价：搜索用时 {seconds}，无法收回。",
        "equal": "方案的指标在容差内相同（p = {p:.2g}）。",
        "unequal": "**未能证明**方案的指标相同（差 {estimate:+.4f}，{low:+.4f} 至 {high:+.4f}；p = "
        "{p:.2g}）。",
        "take": "类似的任务：先运行 `vivace tune`，再用该方案 `vivace train`；完整训练快 {ratio:.2f} 倍"
        "（{low:.2f}-{high:.2f}）。",
        "leave": "类似的任务：照原样训练；采用方案后的完整训练为 {ratio:.2f} 倍（{low:.2f}-{high:.2f}）"
        "，未超出噪声。",
        "doubt": "类似的任务：在用更多种子运行 `vivace verify --metric` 之前，不要采用该方案。",
        "never": "未达到",
        "of": "{seconds}（{reached} / {seeds}）",
    },
}


def page(records: list[dict[str, Any]], file: str) -> str:
    """The page, from the newest record of each machine."""
    words, parts = WORDS[file], [WORDS[file]["head"]]
    newest = {record["machine"]["fingerprint"]: record for record in reversed(records)}
    for record in newest.values():
        cases = {name: found for name, found in record["recipes"].items() if "speed" in found}
        if cases:
            parts.append(words["machine"].format(**record["machine"], **_dated(record)))
        for name, found in cases.items():
            parts += [f"## {name}", *case(name, found, words)]
    return "\n\n".join(parts if len(parts) > 1 else [*parts, words["none"]]) + "\n"


def _dated(record: dict[str, Any]) -> dict[str, str]:
    return {"date": record["date"], "vivace": record["vivace"]}


def case(name: str, found: dict[str, Any], words: dict[str, Any]) -> Iterator[str]:
    """One recipe's paragraphs."""
    recipe, speed = RECIPES[name], found["speed"]["strict"]
    yield words["data"].format(task=recipe.task, data=recipe.data, margin=found["margin"])
    yield table(recipe.metric, found, words)
    yield (words["equal"] if found["equal"] else words["unequal"]).format(p=found["p"], **found["difference"])
    yield "\n".join(f"- {line}" for line in lessons(found, words))
    ratio = {"ratio": speed["estimate"], "low": speed["low"], "high": speed["high"]}
    advice = "doubt" if not found["equal"] else "take" if speed["low"] > 1 else "leave"
    yield words[advice].format(**ratio)


def table(metric: str, found: dict[str, Any], words: dict[str, Any]) -> str:
    """The three ways side by side."""
    columns = [column.format(metric=metric) for column in words["columns"]]
    rows = [columns, ["---"] * len(columns)]
    for way, name in words["ways"].items():
        one = found["ways"][way]
        reached, seeds = one["reached"], sum(row["way"] == way for row in found["rows"])
        seconds = one["seconds_to_target"]
        until = words["never"] if seconds is None else told.duration(seconds)
        if reached < seeds:
            until = words["of"].format(seconds=until, reached=reached, seeds=seeds)
        value = one["metric"]
        rows.append(
            [
                name,
                told.duration(one["seconds"]),
                until,
                f"{value['estimate']:.4f} ({value['low']:.4f} - {value['high']:.4f})",
                told.size(one["peak_bytes"]),
                "-" if one["joules"] is None else f"{told.number(one['joules'] / 1e3)} kJ",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def lessons(found: dict[str, Any], words: dict[str, Any]) -> Iterator[str]:
    """What helped, what did not, what could not act and why, and what finding out cost."""
    single = [trial for trial in found["trials"] if len(trial["techniques"]) == 1]
    chosen = [f"`{name}`" for name in found["plan"]]
    yield words["helped"].format(what=", ".join(chosen)) if chosen else words["nothing"]
    slower = [
        f"`{next(iter(trial['techniques']))}` ({trial['ratio']['estimate']:.2f}x)"
        for trial in single
        if trial["ratio"] and trial["ratio"]["high"] <= 1
    ]
    if slower:
        yield words["slower"].format(what=", ".join(dict.fromkeys(slower)))
    for status in ("refused", "failed"):
        reasons = [
            f"`{next(iter(trial['techniques']))}` ({trial['reason']})"
            for trial in single
            if trial["status"] == status
        ]
        if reasons:
            common = [reason for reason, _ in Counter(reasons).most_common(MOST)]
            yield words[status].format(what="; ".join(common))
    saved = found["ways"]["strict"]["seconds"] - found["ways"]["plan"]["seconds"]
    seconds = told.duration(found["tune_seconds"])
    if saved > 0:
        yield words["cost"].format(seconds=seconds, runs=-int(-found["tune_seconds"] // saved))
    else:
        yield words["cost_nothing"].format(seconds=seconds)
