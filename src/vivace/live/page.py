"""What became of a script's run, as a page: one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from vivace.live.answering import answer_of, event, looked_at, name_of, ratio_of, timed_name, why_not
from vivace.pages import charts
from vivace.pages.render import render

_TEMPLATE = Path(__file__).parent / "templates" / "run.html.jinja"


def page(document: dict[str, Any], records: list[dict[str, Any]], command: str) -> str:
    """The page of `run.json` and its ledger."""
    tried = [entry for entry in document["tried"] if "wall" in entry]
    left_out = [(name_of(e), why_not(e)) for e in document["tried"] if "wall" not in e]
    scale = charts.linear(
        0.0, max([1.0, *(min(r.high, 2 * r.estimate) for r, _ in map(ratio_of, tried))]) * 1.02, 6
    )
    return render(
        _TEMPLATE,
        answer_of(document, command),
        document=document,
        tried=charts.rows([_row(entry, scale) for entry in tried], scale) if tried else None,
        left_out=left_out,
        pairs=_pairs(records),
        watched=[looked_at(record) for record in records if record.get("record") == "watched"],
        events=[event(r) for r in records if r.get("record") in ("adopted", "taken_back", "dropped")],
    )


def _row(entry: dict[str, Any], scale: charts.Scale) -> charts.Row:
    ratio, clock = ratio_of(entry)
    drawing = charts.step(scale, 1.0, ratio.estimate, ratio.low, min(ratio.high, scale.high))
    return charts.Row(
        timed_name(entry),
        drawing,
        f"{ratio.estimate:.2f}\N{MULTIPLICATION SIGN}",
        f"{ratio.low:.2f} to {ratio.high:.2f}",
        note=clock,
        kept=entry["answer"] == "faster",
    )


def _pairs(records: list[dict[str, Any]]) -> Markup | None:
    """Seconds a step, script and plan in turn, in the order of their timing; none beside another plan."""
    adopted = [r for r in records if r.get("record") in ("adopted", "timed") and not r.get("beside")]
    pairs = [pair for record in adopted for pair in record["pairs"]]
    series = {"plan": [pair[1] for pair in pairs], "reference": [pair[0] for pair in pairs]}
    return charts.lines(
        "Seconds a step, in turn", list(range(1, len(pairs) + 1)), series, origin=True, unit="pair"
    )
