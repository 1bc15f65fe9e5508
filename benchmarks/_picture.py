"""The READMEs' picture: how long each task's whole training takes in strict fp32, with PyTorch as it
comes, and under tune's plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import _tasks

from vivace import words as told
from vivace.pages.charts import Markup, element
from vivace.recipes import RECIPES

WORDS = {
    "README.md": {
        "strict": "strict fp32",
        "defaults": "PyTorch as it comes",
        "plan": "tune's plan, times as fast as each",
        "none": "no plan helped",
        "unequal": "the same accuracy not shown",
        "below": "{device}, {cores} cores, {date}; {seeds} seeds",
    },
    "README.zh-CN.md": {
        "strict": "严格 fp32",
        "defaults": "PyTorch 默认",
        "plan": "tune 找到的方案：相对前两者的速度",
        "none": "没有有效的方案",
        "unequal": "未能证明指标相同",
        "below": "{device}，{cores} 核，{date}；{seeds} 个种子",
    },
}
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1c2430 }
.small { font-size: 12px; fill: #5a6675 }
.strict { fill: #b4bcc8 } .defaults { fill: #8794a6 } .plan { fill: #0b7a5c }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0 } .small { fill: #9aa6b5 } .strict { fill: #566273 }
  .defaults { fill: #76859b } .plan { fill: #35b88f }
}
"""
WAYS = {"strict": 0, "defaults": 115, "plan": 295}  # the legend's places, pixels from the left
WIDTH, LEFT, RIGHT, HEAD, ROW, BAR = 800, 160, 190, 44, 64, 16  # pixels


def name_of(file: str) -> str:
    """The picture's place, of a README."""
    return f"docs/pictures/trained{'.zh-CN' if 'zh' in file else ''}.svg"


def picture(records: Iterable[dict[str, Any]], file: str) -> str:
    """The record that holds most tasks, as SVG; empty where there is none."""
    newest = max(records, key=lambda record: (len(_tasks.measured(record)), record["date"]), default=None)
    if newest is None or not _tasks.measured(newest):
        return ""
    done, words = _tasks.measured(newest), WORDS[file]
    names = sorted(done, key=list(RECIPES).index)
    longest = max(one["seconds"] for found in done.values() for one in found["ways"].values())
    seeds = " / ".join(sorted({str(found["seeds"]) for found in done.values()}))
    height = HEAD + ROW * len(names) + 28
    parts = [element("style", Markup(STYLE)), *_legend(words)]
    for number, name in enumerate(names):
        parts += _row(name, done[name], HEAD + ROW * number, (WIDTH - LEFT - RIGHT) / longest, words)
    said = words["below"].format(**newest["machine"], date=_tasks.dates(newest), seeds=seeds)
    parts.append(element("text", said, class_="small", x=0, y=height - 8))
    drawn = element(
        "svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", width=WIDTH
    )
    return str(drawn).replace("><", ">\n<") + "\n"


def _legend(words: dict[str, str]) -> list[Markup]:
    parts = []
    for way, place in WAYS.items():
        parts.append(element("rect", class_=way, x=LEFT + place, y=6, width=BAR, height=BAR))
        parts.append(element("text", words[way], x=LEFT + place + 24, y=19))
    return parts


def _row(name: str, found: dict[str, Any], top: float, scale: float, words: dict[str, str]) -> list[Markup]:
    parts = [element("text", name, x=0, y=top + 3 * BAR // 2 + 7)]
    for place, way in enumerate(WAYS):
        seconds = found["ways"][way]["seconds"]
        up, long = top + (BAR + 2) * place, round(seconds * scale, 1)
        value = told.duration(seconds)
        if way == "plan":
            ratios = " / ".join(f"{found['speed'][other]['estimate']:.2f}x" for other in found["speed"])
            value += f", {ratios}" if found["plan"] else f", {words['none']}"
            value += "" if found["equal"] else f"; {words['unequal']}"
        parts.append(element("rect", class_=way, x=LEFT, y=up, width=long, height=BAR))
        parts.append(element("text", value, x=LEFT + long + 8, y=up + BAR - 3))
    return parts
