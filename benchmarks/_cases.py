"""docs/cases.md and its Chinese sister: jobs as cases, from the records of `accuracy` and those of `cpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import _tasks

from vivace import words as told
from vivace.recipes import RECIPES

MOST = 6  # reasons of a kind that are listed
RENAMED = {"conv1x1_gemm": "conv_gemm"}  # techniques, since records were made
WORDS: dict[str, dict[str, Any]] = {
    "cases.md": {
        "head": "# Cases\n\n[中文](cases.zh-CN.md)\n\n"
        "Written by `scripts/bench table` from the records; do not edit. What helped each "
        "job, what did not and why, what finding out cost, and what to do with a job like it.",
        "to the end": "## Trained to the end\n\nEach recipe was trained to the end in strict fp32, by a "
        "plain PyTorch loop, and under the plan that `vivace tune` found, in processes that alternate "
        "(`scripts/bench accuracy`). The final metric is of data that neither trained nor chose anything. "
        "*Time to the metric*: until the validation data reached the mean of strict fp32 less the margin.",
        "steps": "## Tuned\n\nJobs of common kinds (`benchmarks/jobs.py`) whose steps `vivace tune` made "
        "faster (`scripts/bench cpu`). They were not trained to an end: the figures are of steps, and "
        "whether the model is the same was judged by `verify`.",
        "none": "No training to the end has been recorded yet.",
        "machine": "Measured on {device}, {cores} cores, {date}, Vivace {vivace}.",
        "by": " (`{command}`)",
        "seeds": "{seeds} seeds each.",
        "failed row": "This could not be measured: {failed}.",
        "failed later": "A later run ended early: {failed}. What stands here was measured before it.",
        "gained": "A step is {ratio:.2f}x ({low:.2f}-{high:.2f}) as fast as in strict fp32.",
        "unchanged": "No plan was kept: {reason}.",
        "faster beyond noise": "nothing was faster beyond noise",
        "part": "`{name}` ({before:.2f}x to {after:.2f}x)",
        "cost_steps": "What it cost: {seconds} of searching; the plan's warm-up is gained back at step "
        "{steps}.",
        "take_steps": "With such a job: run `vivace tune` on it; with a training longer than the search, "
        "`vivace train` with the plan.",
        "leave_steps": "With such a job: train it as it is.",
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
        "planned": "The plan: {what}.",
        "without": "In the plan without a gain of its own: {what}.",
        "nothing": "What helped: nothing that was tried.",
        "slower": "What was not faster alone: {what}.",
        "refused": "What was ruled out: {what}.",
        "failed": "What broke: {what}.",
        "cost": "What it cost: {seconds} of searching, which pays after {runs} trainings.",
        "cost_nothing": "What it cost: {seconds} of searching, which nothing pays back.",
        "equal": "The plan's metric is the same within the margin ({p}).",
        "unequal": "The plan's metric was **not shown to be the same** (difference {estimate:+.4f}, "
        "{low:+.4f} to {high:+.4f}; {p}).",
        "looked": "; look {number} needs {level:g}",
        "take": "With such a job: run `vivace tune`, then `vivace train` with the plan; a whole training was "
        "{strict} as fast as in strict fp32, and {defaults} as fast as with PyTorch as it comes.",
        "leave": "With such a job: train it as it is; under the plan a whole training was {strict} as fast "
        "as in strict fp32 and {defaults} as fast as with PyTorch as it comes, which is not faster beyond "
        "noise than both.",
        "doubt": "With such a job: do not take this plan without `vivace verify --metric` and more seeds.",
        "of": "reached by {reached} of {seeds}",
        "space": " ",
        "tasks": {},
        "reasons": {},
    },
    "cases.zh-CN.md": {
        "head": "# 案例\n\n[English](cases.md)\n\n"
        "由 `scripts/bench table` 根据记录生成，请勿手动修改。每个任务："
        "什么有效，什么无效及其原因，代价多大，类似的任务该怎么做。",
        "to the end": "## 完整训练\n\n每个内置任务都完整训练到结束，分三种方式：严格 fp32、"
        "不经 Vivace 的普通 PyTorch 循环（表中“PyTorch 默认”）、"
        "`vivace tune` 找到的方案，各在独立进程中交替进行（`scripts/bench accuracy`）。"
        "最终指标在未参与训练也未参与选择的数据上计算。*达到指标的时间*：到验证数据上的指标达到“严格 fp32 的"
        "均值减去容差”为止的用时。",
        "steps": "## 仅调优\n\n常见类型的任务（`benchmarks/jobs.py`），由 `vivace tune` 加速每一步"
        "（`scripts/bench cpu`）。这些任务没有训练到结束：数字是每步的，模型是否相同由 `verify` 判断。",
        "none": "尚无完整训练的记录。",
        "machine": "测量环境：{device}，{cores} 核，{date}，Vivace {vivace}。",
        "by": "（`{command}`）",
        "seeds": "各 {seeds} 个种子。",
        "failed row": "未能测量：{failed}。",
        "failed later": "之后的一次运行未完成：{failed}。这里是此前测得的结果。",
        "gained": "每步的速度是严格 fp32 的 {ratio:.2f} 倍（{low:.2f}-{high:.2f}）。",
        "unchanged": "未采用任何方案：{reason}。",
        "faster beyond noise": "没有超出噪声的加速",
        "part": "`{name}`（{before:.2f} 倍到 {after:.2f} 倍）",
        "cost_steps": "代价：搜索用时 {seconds}；方案的预热在第 {steps} 步收回。",
        "take_steps": "类似的任务：运行 `vivace tune`；训练比搜索更久时，用该方案 `vivace train`。",
        "leave_steps": "类似的任务：照原样训练。",
        "ways": {"strict": "严格 fp32", "defaults": "PyTorch 默认", "plan": "方案"},
        "columns": ("方式", "完整训练", "达到指标", "{metric}，95% 区间", "峰值内存", "能耗"),
        "data": "{task}，数据：{data}；容差 {margin:g}。",
        "helped": "有效的：{what}。",
        "planned": "方案：{what}。",
        "without": "方案中单独没有增益的：{what}。",
        "nothing": "有效的：所试的都没有。",
        "slower": "单独使用时没有加速的：{what}。",
        "refused": "被排除的：{what}。",
        "failed": "出错的：{what}。",
        "cost": "代价：搜索用时 {seconds}，训练 {runs} 次后收回。",
        "cost_nothing": "代价：搜索用时 {seconds}，无法收回。",
        "equal": "方案的指标在容差内相同（{p}）。",
        "unequal": "**未能证明**方案的指标相同（差 {estimate:+.4f}，{low:+.4f} 至 {high:+.4f}；{p}）。",
        "looked": "；第 {number} 次检验，须小于 {level:g}",
        "take": "类似的任务：先运行 `vivace tune`，再用该方案 `vivace train`；完整训练的速度是严格 fp32 的 "
        "{strict}，是 PyTorch 默认的 {defaults}。",
        "leave": "类似的任务：照原样训练；采用方案后完整训练的速度是严格 fp32 的 {strict}，是 PyTorch 默认的 "
        "{defaults}，并未在超出噪声的程度上快于两者。",
        "doubt": "类似的任务：在用更多种子运行 `vivace verify --metric` 之前，不要采用该方案。",
        "of": "{seeds} 次中 {reached} 次达到",
        "space": "",
        "tasks": {
            "image classification": "图像分类",
            "text classification": "文本分类",
            "named-entity recognition": "命名实体识别",
            "language modelling": "语言建模",
            "semantic similarity": "语义相似度",
            "semantic segmentation": "语义分割",
            "object detection": "目标检测",
        },
        "reasons": {  # any other stays as it was given
            "it acts on cuda, and this job runs on cpu": "只作用于 CUDA，而该任务在 CPU 上运行",
            "it has no setting that suits this job": "没有适合该任务的设置",
            "it promises SEMANTICS, and ROUNDING is allowed": "其承诺为 SEMANTICS（改变训练方法），"
            "而只允许 ROUNDING（舍入误差）",
            "on this job it promises SEMANTICS, and ROUNDING is allowed": "在该任务上其承诺为 SEMANTICS，"
            "而只允许 ROUNDING",
            "at most 1.00x is predicted on this job": "预计在该任务上至多 1.00 倍",
            "the time for the search ended before it could be tried": "尚未试到，搜索时间已用完",
            "the budget ended before it could be tried": "尚未试到，预算已用完",
            "your TensorDataset has no torchvision Compose as its transform": "该 TensorDataset 的 transform "
            "不是 torchvision 的 Compose",
        },
    },
}


def page(trained: list[dict[str, Any]], tuned: list[dict[str, Any]], file: str) -> str:
    """The page, from a record of `accuracy` for each machine, and the newest of `cpu` for each job too."""
    words = WORDS[file]
    parts = [words["head"], words["to the end"]]
    for record in trained:
        cases = {
            name: found for name, found in record["recipes"].items() if "speed" in found or "failed" in found
        }
        if cases:
            version = record["vivace"] + words["by"].format(command=record["command"])
            dated = {"date": _tasks.dates(record), "vivace": version}
            parts.append(words["machine"].format(**record["machine"], **dated))
        for name in sorted(cases, key=list(RECIPES).index):
            parts += [f"### {name}", *case(name, cases[name], words)]
    if len(parts) == 2:
        parts.append(words["none"])
    jobs = {(record["machine"]["fingerprint"], record["job"]): record for record in reversed(tuned)}
    if jobs:
        parts.append(words["steps"])
    for _, record in sorted(jobs.items()):
        parts += [f"### {record['job']}", *tuned_case(record, words)]
    return "\n\n".join(parts) + "\n"


def _dated(record: dict[str, Any]) -> dict[str, str]:
    return {"date": record["date"], "vivace": record["vivace"]}


def case(name: str, found: dict[str, Any], words: dict[str, Any]) -> Iterator[str]:
    """One recipe's paragraphs."""
    recipe = RECIPES[name]
    task = words["tasks"].get(recipe.task, recipe.task)
    about = words["data"].format(task=task, data=recipe.data, margin=found["margin"])
    if "speed" not in found:
        yield about
        yield words["failed row"].format(failed=found["failed"])
        return
    yield about + words["space"] + words["seeds"].format(seeds=found["seeds"])
    if "failed" in found:
        yield words["failed later"].format(failed=found["failed"])
    yield table(recipe.metric, found, words)
    p = _tasks.p_value(found, words)
    yield (words["equal"] if found["equal"] else words["unequal"]).format(p=p, **found["difference"])
    yield "\n".join(f"- {line}" for line in lessons(found, words))
    gain = "take" if _tasks.pays(found) else "leave"
    advice = gain if found["equal"] else "doubt"
    over = {way: _tasks.interval(found["speed"][way]) for way in ("strict", "defaults")}
    yield words[advice if found["plan"] else "leave_steps"].format(**over)


def tuned_case(record: dict[str, Any], words: dict[str, Any]) -> Iterator[str]:
    """One tuned job's paragraphs."""
    speed = record["speedup"]
    if record["plan"]:
        gained = words["gained"].format(ratio=speed["estimate"], low=speed["low"], high=speed["high"])
    else:
        gained = words["unchanged"].format(reason=record["reason"] or words["faster beyond noise"])
    yield f"{gained} {words['machine'].format(**record['machine'], **_dated(record))}"
    lines = []
    if record["plan"]:
        ends = [1.0, *(step["ratio"]["estimate"] for step in record["waterfall"])]
        gains = [*zip(record["waterfall"], ends, ends[1:], strict=False)]
        for key, does in (("helped", True), ("without", False)):
            parts = [
                words["part"].format(name=step["step"], before=a, after=b)
                for step, a, b in gains
                if (round(b, 2) > round(a, 2)) == does
            ]
            if parts:
                lines.append(words[key].format(what=", ".join(parts)))
        if not gains:
            lines.append(words["planned"].format(what=", ".join(f"`{name}`" for name in record["plan"])))
    else:
        lines.append(words["nothing"])
    lines += failures(record, words)
    steps = record["break_even_steps"]
    if record["plan"] and steps is not None:
        lines.append(
            words["cost_steps"].format(seconds=told.duration(record["seconds"]), steps=told.number(steps))
        )
    yield "\n".join(f"- {line}" for line in lines)
    yield words["take_steps" if record["plan"] else "leave_steps"]


def table(metric: str, found: dict[str, Any], words: dict[str, Any]) -> str:
    """The three ways side by side."""
    columns = [column.format(metric=metric) for column in words["columns"]]
    rows = [columns, ["---"] * len(columns)]
    for way, name in words["ways"].items():
        one = found["ways"][way]
        reached, seeds = one["reached"], found["seeds"]
        until = told.duration(one["seconds_to_target"])
        if reached < seeds:
            until = words["of"].format(reached=reached, seeds=seeds)
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
    chosen = [f"`{name}`" for name in found["plan"]]
    helped = words["helped" if _tasks.pays(found) else "planned"].format(what=", ".join(chosen))
    yield helped if chosen else words["nothing"]
    yield from failures(found, words)
    took = {way: one["seconds"] for way, one in found["ways"].items()}
    saved = min(took["strict"], took["defaults"]) - took["plan"]
    seconds = told.duration(found["tune_seconds"])
    if _tasks.pays(found) and saved > 0:
        yield words["cost"].format(seconds=seconds, runs=-int(-found["tune_seconds"] // saved))
    else:
        yield words["cost_nothing"].format(seconds=seconds)


def failures(found: dict[str, Any], words: dict[str, Any]) -> Iterator[str]:
    """What was slower alone, what could not act, and what broke, each with its figure or its reason."""
    single = [trial for trial in found["trials"] if len(trial["techniques"]) == 1]
    slower = {
        f"`{next(iter(trial['techniques']))}`": f" ({trial['ratio']['estimate']:.2f}x)"
        for trial in single
        if trial["ratio"] and trial["ratio"]["high"] <= 1
    }
    if slower:
        yield words["slower"].format(what=", ".join(name + ratio for name, ratio in slower.items()))
    for status in ("refused", "failed"):
        by_reason: dict[str, list[str]] = {}
        for trial in single:
            if trial["status"] == status:
                names = by_reason.setdefault(trial["reason"], [])
                now = [RENAMED.get(name, name) for name in trial["techniques"]]
                names += [name for name in now if name not in names]
        if by_reason:
            told_reasons = [
                f"{', '.join(f'`{name}`' for name in names)} ({words['reasons'].get(reason, reason)})"
                for reason, names in by_reason.items()
            ]
            yield words[status].format(what="; ".join(told_reasons[:MOST]))
