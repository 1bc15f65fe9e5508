"""The READMEs' table of public scripts, alone and under `vivace run`, from the records of `scripts`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vivace import words as told

WORDS: dict[str, dict[str, Any]] = {
    "README.md": {
        "head": "{count} public scripts, unmodified, on {device}, {cores} cores, {date}: {faster} faster "
        "under `vivace run` beyond noise, {slower} slower, {open} neither, {broken} broken. Whole runs in "
        "turns, {pairs} of each; `scripts/bench scripts FOLDER`, on copies of their repositories:",
        "columns": ("script", "alone", "under `vivace run`", "as fast, 95 % interval", "what acted"),
        "nothing": "left as it is",
        "differs": "something else each time",
        "broken": "**broken**",
        "none": "No public script has been recorded yet: `scripts/bench scripts`.",
    },
    "README.zh-CN.md": {
        "head": "{count} 个未经修改的公开脚本，{device}，{cores} 核，{date}：用 `vivace run` 明确更快 "
        "{faster} 个，更慢 {slower} 个，未见差别 {open} 个，出错 {broken} 个。"
        "完整运行、交替计时，各 {pairs} 次；`scripts/bench scripts FOLDER`（FOLDER 存放这些仓库的副本）：",
        "columns": ("脚本", "单独运行", "`vivace run`", "加速比（95% 区间）", "生效的设置"),
        "nothing": "保持原样",
        "differs": "每次不同",
        "broken": "**出错**",
        "none": "尚无公开脚本的记录：`scripts/bench scripts`。",
    },
}


def table(records: Iterable[dict[str, Any]], file: str) -> str:
    """The newest record of each script, machine by machine, the one with the most scripts first."""
    words, parts = WORDS[file], []
    machines: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        machines.setdefault(record["machine"]["fingerprint"], {}).setdefault(record["job"], record)
    for newest in sorted(machines.values(), key=len, reverse=True):
        found = sorted(
            newest.values(), key=lambda record: -(record["ratio"] or {"estimate": 0.0})["estimate"]
        )
        dates = sorted({record["date"] for record in found})
        counted = Counter(map(answer, found))
        head = words["head"].format(
            **found[0]["machine"],
            count=len(found),
            date=" / ".join(dates[:1] + dates[1:][-1:]),
            pairs=" / ".join(map(str, sorted({len(record["pairs"]) for record in found}))),
            **{name: counted[name] for name in ("faster", "slower", "open", "broken")},
        )
        rows = [words["columns"], ["---"] * len(words["columns"]), *(row(record, words) for record in found)]
        parts += [head, "\n".join(f"| {' | '.join(cells)} |" for cells in rows)]
    return "\n" + "\n\n".join(parts or [words["none"]]) + "\n\n"


def answer(record: dict[str, Any]) -> str:
    """Which side of 1 the whole interval lies on."""
    ratio = record["ratio"]
    if ratio is None:
        return "broken"
    return "faster" if ratio["low"] > 1 else "slower" if ratio["high"] < 1 else "open"


def row(record: dict[str, Any], words: dict[str, Any]) -> list[str]:
    """One script: medians of its runs, and what acted at the end of more than half of them."""
    alone, under = (told.duration(statistics.median(side)) for side in zip(*record["pairs"], strict=True))
    ratio, script = record["ratio"], record["script"]
    fast = f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else words["broken"]
    plans = [outcome.get("plan") or {} for outcome in record["outcomes"]]
    counts = Counter(technique for plan in plans for technique in plan)
    most = " + ".join(technique for technique, count in counts.items() if 2 * count > len(plans))
    few = words["differs" if 2 * sum(map(bool, plans)) > len(plans) else "nothing"]
    name = record["job"].removeprefix("script_")
    return [
        f"`{name}` ({script['repository']})",
        alone,
        under,
        fast,
        most or few,
    ]
