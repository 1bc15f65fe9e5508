"""How well `vivace advise` predicts: published training throughput against the predictor.

    scripts/bench advise --data FILE.csv            score a table with the shipped coefficients; nothing is
    fitted scripts/bench advise --data FILE.csv --fit      fit the coefficients, measure errors on held-out
    rows, write both scripts/bench advise --data FILE.csv --count    count the work of the table's models that
    are not counted yet

FILE has the columns model, task, gpu, n_gpus, precision, batch_per_gpu, unit, value, source. The last line of
a score
is one JSON document: {"n", "median_abs_error", "interval_coverage", "by_gpu": {card: {"n",
"median_abs_error"}}}.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _published import Row, read

from vivace.advising.demand import Bin, Demand, load_models, save_models
from vivace.advising.formula import COEFFICIENTS_FILE, PARAMETERS, architecture, load_coefficients
from vivace.advising.likeness import LIKENESS_FILE, load_likeness
from vivace.advising.reverse import EXAMPLES
from vivace.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "published_throughput.csv"
HEAD = ("Work of one training step of known models; vivace.advising.demand has the columns.",
        "Written by scripts/bench advise --count; not to be edited.")  # fmt: skip
DEMANDED = {
    "known card, new model": 0.12, "new card, known model": 0.18, "both new": 0.25, "new architecture": 0.25
}  # fmt: skip
# What is new about the figures that a split left out of the fit.
NEW = {
    "known card, new model": ("new_model",),
    "new card, known model": ("new_card",),
    "both new": ("new_card", "new_model"),
    "new architecture": ("new_card", "new_architecture"),
}
SMALL, LARGE = 2, 4
FORWARD = "timm-forward:"  # a network of timm, in evaluation
RECORDS = ROOT / "records" / "advise" / "published"
DOCS = ROOT / "docs" / "advise.md"
MARKERS = re.compile(r"(<!-- advise-errors -->\n).*?(<!-- /advise-errors -->)", re.DOTALL)


def main() -> None:
    """Score, fit or count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="table of published throughput")
    parser.add_argument(
        "--fit", action="store_true", help="write coefficients.toml and records/advise/published/<date>.json"
    )
    parser.add_argument("--count", action="store_true", help="write models.csv")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date of the record")
    given = parser.parse_args()
    counted = Counted(given.count)
    try:
        rows, left_out = read(given.data, counted)
    except InputError as error:
        print(f"benchmarks/advise.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{len(rows)} rows of {given.data.name} can be predicted; left out:")
    for reason, number in sorted(left_out.items(), key=lambda pair: -pair[1]):
        print(f"  {number:5d}  {reason}")
    if given.count:
        for key, _, _ in EXAMPLES:
            counted(key)
        save_models(counted.models, head=HEAD)
    elif given.fit:
        fit(rows, left_out, given.date)
    else:
        score(rows, left_out)


class Counted:
    """Demand of a model by key: from the shipped table, else counted where a library knows it, else None.

    `again` counts what `_zoo` rebuilds afresh.
    """

    def __init__(self, again: bool) -> None:
        kept = load_models()
        self.models = {k: d for k, d in kept.items() if not (again and k.startswith("own:"))}
        self.missing: set[str] = set()

    def __call__(self, key: str) -> Demand | None:
        """The demand of a key; what cannot be counted is said once."""
        if key in self.models or key in self.missing:
            return self.models.get(key)
        try:
            self.models[key] = count(key)
        except Exception as error:
            self.missing.add(key)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"{key} cannot be counted: {reason[:90]}")
        return self.models.get(key)


def count(key: str) -> Demand:
    """Count a model on the meta device at two batch sizes: a training step, or of a key that says so its forward pass
    alone; raises what its library raises."""
    import _zoo
    import torch

    from vivace.work.bins import make_bins
    from vivace.work.count import count_work

    works = []
    name, _, pixels = key.partition("@")
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        if name.startswith(FORWARD):
            model, step = _zoo.forward(name.removeprefix(FORWARD), int(pixels))
            with torch.no_grad():
                works = [count_work(step(batch)) for batch in (SMALL, LARGE)]
        else:
            for batch in (SMALL, LARGE):
                model, loss = _zoo.build(name, int(pixels or 0), batch)
                works.append(count_work(lambda loss=loss: loss().backward()))
    small, large = works
    bins = make_bins(small.kernels, large.kernels, SMALL, LARGE)
    saved = (large.saved_bytes - small.saved_bytes) / (LARGE - SMALL)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Demand(tuple(Bin(*b) for b in bins), sum(p.numel() for p in parameters), len(parameters), saved)


def score(rows: Sequence[Row], left_out: dict[str, int]) -> None:
    """Print the errors of the shipped predictor by harness, precision and card; the JSON document last."""
    from _fitting import absolute, covered, errors, situations

    theta, rest = load_coefficients()
    if not rows:
        print(json.dumps({"n": 0, "median_abs_error": None, "interval_coverage": None, "by_gpu": {}}))
        return
    error = errors(theta, rows, load_likeness(rest["likeness"]))
    seen = rest["evidence"]
    situation = situations(theta, rows, seen)
    place = list(rest["interval"]["widening"]).index("new_model")
    fitted = set(json.loads(max(RECORDS.glob("*.json")).read_text(encoding="utf-8"))["models"])
    situation[:, place] = [row.key not in fitted for row in rows]
    inside = covered(rest["interval"], situation, error)
    table(absolute(error), inside, rows)
    by_gpu = {
        name: {"n": int(sum(chosen)), "median_abs_error": round(float(np.median(absolute(error)[chosen])), 4)}
        for name, chosen in groups(rows, lambda row: row.gpu.name)
    }
    print(json.dumps({
        "n": len(rows),
        "median_abs_error": round(float(np.median(absolute(error))), 4),
        "interval_coverage": round(float(np.mean(inside)), 4),
        "by_gpu": by_gpu,
        "left_out": left_out,
    }))  # fmt: skip


def groups(rows: Sequence[Row], name_of: Callable[[Row], str]) -> list[tuple[str, np.ndarray]]:
    """Names with the rows that bear them."""
    names = np.array([name_of(row) for row in rows])
    return [(str(name), names == name) for name in sorted(set(names))]


def table(error: np.ndarray, inside: np.ndarray, rows: Sequence[Row]) -> None:
    """Print medians by what a row is."""
    kinds: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("all", lambda row: "all"),
        ("harness", lambda row: row.setting.harness),
        ("precision", lambda row: row.setting.precision),
        ("layout", lambda row: "nhwc" if row.setting.channels_last else "nchw"),
        (
            "cards",
            lambda row: (
                "1" if row.setting.num_gpus == 1 else "2 to 8" if row.setting.num_gpus <= 8 else "more"
            ),
        ),
        ("card", lambda row: row.gpu.name),
    )
    print(f"{'':42s}     n  median error  80th pct  in 80 % interval")
    for title, name_of in kinds:
        for name, chosen in groups(rows, name_of):
            share = f"{np.mean(inside[chosen]):.2f}"
            middle, high = np.median(error[chosen]), np.quantile(error[chosen], 0.8)
            print(f"{title:10s} {name:30s} {sum(chosen):6d}  {middle:12.3f}  {high:8.3f}  {share:>10s}")


def fit(rows: Sequence[Row], left_out: dict[str, int], date: str) -> None:
    """Fit on all rows; errors from fits that left families, cards or both out; write coefficients
    and record."""
    import _fitting as fitting
    import _likeness

    theta = fitting.fit(rows, steps=2 * fitting.STEPS)
    seen = fitting.evidence(rows)
    likeness, lines = _likeness.fit(rows, fitting.errors(theta, rows))
    own = fitting.errors(theta, rows, likeness)
    found = fitting.held_out(rows)
    situation = fitting.situations(theta, rows, seen)
    there = {name: fitting.renewed(situation, new) for name, new in NEW.items()}
    predicted = {name: ~np.isnan(error) for name, (error, _) in found.items()}
    parts = [(situation, own)]
    parts += [(there[name][predicted[name]], found[name][0][predicted[name]]) for name in found]
    interval = fitting.calibrate(np.concatenate([s for s, _ in parts]), np.concatenate([e for _, e in parts]))
    half = np.array([len(row.family) % 2 == 0 for row in rows])
    splits: dict[str, Any] = {}
    for name, (error, simple) in found.items():
        mask, here = predicted[name], there[name]
        other = fitting.calibrate(here[mask & half], error[mask & half])
        splits[name] = {
            "n": int(mask.sum()),
            "median_abs_error": median(error[mask]),
            "demanded": DEMANDED[name],
            "interval_coverage": round(float(np.mean(fitting.covered(interval, here[mask], error[mask]))), 3),
            "coverage_on_the_other_half": round(
                float(np.mean(fitting.covered(other, here[mask & ~half], error[mask & ~half]))), 3
            ),
            "simple": {other: median(values[mask]) for other, values in simple.items()},
            "by_gpu": medians(error, rows, lambda row: row.gpu.name),
            "by_architecture": medians(error, rows, lambda row: architecture(row.gpu)),
            "by_family": medians(error, rows, lambda row: f"{row.setting.harness} {row.family}"),
        }
    document = {
        "benchmark": "advise",
        "job": "advise",
        "machine": {"fingerprint": "published"},
        "command": "scripts/bench advise --fit",
        "date": date,
        "rows": len(rows),
        "cards": len(seen["cards"]),
        "models": sorted({row.key for row in rows}),
        "parameters": sum(value.size for value in theta.values()),
        "likeness_weights": len(lines),
        "left_out": left_out,
        "in_sample": median(own),
        "splits": splits,
    }
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{date}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    errors = {
        name: {
            "n": split["n"],
            "median_abs_error": split["median_abs_error"],
            "interval_coverage": split["interval_coverage"],
            **{other.replace(" ", "_").lower(): value for other, value in split["simple"].items()},
        }
        for name, split in splits.items()
    }
    DOCS.write_text(with_errors(DOCS.read_text(encoding="utf-8"), document), encoding="utf-8")
    alike = {"lengths": dict(likeness.lengths), "variances": dict(likeness.variances)}
    _likeness.write(lines, LIKENESS_FILE)
    write(theta, {"likeness": alike, "interval": interval, "errors": errors, "evidence": seen}, date)
    for name, split in splits.items():
        print(name, {key: value for key, value in split.items() if not key.startswith("by_")})
    print("in sample", median(own))


def with_errors(text: str, record: dict[str, Any]) -> str:
    """The documentation page with the record's errors between its markers."""
    lines = [
        f"Fitted on {record['date']}: {record['parameters']} parameters, {record['rows']:,} figures of "
        f"{len(record['models'])} models and {record['cards']} cards. On the figures of the fit itself the "
        f"median error is {100 * record['in_sample']:.1f} %.\n",
        "| left out of the fit | figures | median error | of the median card | demanded | in interval "
        "| roofline | bandwidth alone | TFLOPS alone |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, split in record["splits"].items():
        simple = [f"{100 * value:.0f} %" for value in split["simple"].values()]
        error = f"**{100 * split['median_abs_error']:.1f} %**"
        inside = f"{100 * split['interval_coverage']:.0f} %"
        middle = statistics.median(card["median_abs_error"] for card in split["by_gpu"].values())
        cells = (
            name,
            f"{split['n']:,}",
            error,
            f"{100 * middle:.0f} %",
            f"{100 * split['demanded']:.0f} %",
            inside,
        )
        cells += tuple(simple)
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines) + "\n"
    return MARKERS.sub(rf"\g<1>{table}\g<2>", text)


def medians(
    error: np.ndarray, rows: Sequence[Row], name_of: Callable[[Row], str]
) -> dict[str, dict[str, float]]:
    """Number, median error and median ratio of predicted to measured time by what a row is."""
    known = ~np.isnan(error)
    return {
        name: {
            "n": int((chosen & known).sum()),
            "median_abs_error": median(error[chosen & known]),
            "median_ratio": round(float(np.exp(np.median(error[chosen & known]))), 3),
        }
        for name, chosen in groups(rows, name_of)
        if (chosen & known).any()
    }


def median(error: np.ndarray) -> float:
    """Median relative error of the throughput, in three digits."""
    return round(float(np.median(np.abs(np.exp(-error) - 1))), 4)


def write(theta: dict[str, np.ndarray], rest: dict[str, Any], date: str) -> None:
    """coefficients.toml, with labels."""
    import tomlkit

    parameters: dict[str, Any] = {}
    for name, (labels, _, _) in PARAMETERS.items():
        value = np.vectorize(lambda number: float(f"{number:.4g}"))(theta[name])
        if not labels:
            parameters[name] = float(value)
        elif len(labels) == 1:
            parameters[name] = dict(zip(labels[0], map(float, value), strict=True))
        else:
            parameters[name] = {
                key: dict(zip(labels[1], map(float, line), strict=True))
                for key, line in zip(labels[0], value, strict=True)
            }
    document = {"format": 1, "date": date, "parameters": parameters, **rest}
    head = "# Fitted by scripts/bench advise --fit; vivace.advising.formula says what each parameter is.\n\n"
    COEFFICIENTS_FILE.write_text(head + tomlkit.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
