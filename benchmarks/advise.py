"""How well `vivace advise` predicts: published training throughput against the predictor.

    scripts/bench advise --data FILE.csv            score a table with the shipped coefficients
    scripts/bench advise --data FILE.csv --fit      fit, measure errors on held-out rows, write both
    scripts/bench advise --data FILE.csv --count    count the work of all models of the table and of
                                                    benchmarks/figures/timm_networks.csv

FILE has the columns model, task, gpu, n_gpus, precision, batch_per_gpu, unit, value, source. A fit reads
benchmarks/figures/timm_inference.csv as well, and then predicts mlperf_training.csv, which no fit has seen.
What a table's models ask for is counted once and kept in benchmarks/figures/counted.csv. The last line of a
score is one JSON document: {"n", "median_abs_error", "median_card", "worst_card", "interval_coverage",
"by_case": {case: the same}, "by_gpu": {card: {"n", "median_abs_error"}}}.
"""

from __future__ import annotations

import argparse
import csv
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
from _published import Row, key_of, read

from vivace.advising.demand import Bin, Demand, load_models, save_models
from vivace.advising.formula import COEFFICIENTS_FILE, PARAMETERS, architecture, load_coefficients
from vivace.advising.interval import CASES, case_of
from vivace.advising.reverse import EXAMPLES
from vivace.errors import InputError
from vivace.work import bins as work
from vivace.work.kernel import Kernel

ROOT = Path(__file__).resolve().parent.parent
HEAD = ("Work of one training step of known models; vivace.advising.demand has the columns.",
        "Written by scripts/bench advise --count; not to be edited.")  # fmt: skip
FIGURES = ROOT / "benchmarks" / "figures"
COUNTED = FIGURES / "counted.csv"
MORE_DATA = (FIGURES / "timm_inference.csv",)
NETWORKS = FIGURES / "timm_networks.csv"
SET_ASIDE = FIGURES / "mlperf_training.csv"
# Median error, of the median card, and of the worst; and the share of figures inside their 80 % interval.
DEMANDED = {"median card": 0.18, "worst card": 0.35, "in interval": (0.75, 0.85)}
SMALL, LARGE = 2, 4
FORWARD = "timm-forward:"  # a network of timm, in evaluation
RECORDS = ROOT / "records" / "advise" / "published"
DOCS = ROOT / "docs" / "advise.md"
MARKERS = re.compile(r"(<!-- advise-errors -->\n).*?(<!-- /advise-errors -->)", re.DOTALL)


def main() -> None:
    """Score, fit or count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="table of published throughput")
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
    if given.fit:
        rows = [*rows, *(row for path in MORE_DATA for row in read(path, counted)[0])]
    if given.count:
        shipped = counted.shipped | {row.key for row in rows} | {key for key, _, _ in EXAMPLES}
        found = {key: counted(key) for key in sorted(shipped) if not key.startswith(FORWARD)}
        save_models({key: demand for key, demand in found.items() if demand is not None}, head=HEAD)
        count_networks(counted)
    aside = read(SET_ASIDE, counted)[0]
    counted.keep()
    if given.fit:
        fit(rows, aside, left_out, given.date)
    elif not given.count:
        score(rows, left_out)


class Counted:
    """Demand of a model by key: from the shipped table and what was counted before, else counted where a
    library knows it, else None.

    `again` counts what `_zoo` rebuilds afresh.
    """

    def __init__(self, again: bool) -> None:
        shipped = load_models()
        kept = shipped | (load_models(COUNTED) if COUNTED.is_file() else {})
        self.shipped = set(shipped)
        self.models = {k: d for k, d in kept.items() if not (again and k.startswith(("own:", "fused:")))}
        self.missing: set[str] = set()
        self.new = False

    def __call__(self, key: str) -> Demand | None:
        """The demand of a key; what cannot be counted is said once."""
        if key in self.models or key in self.missing:
            return self.models.get(key)
        try:
            self.models[key] = count(key)
            self.new = True
        except Exception as error:
            self.missing.add(key)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"{key} cannot be counted: {reason[:90]}")
        return self.models.get(key)

    def keep(self) -> None:
        """Write what the shipped table does not hold, so that it is counted once."""
        if self.new:
            self.new = False
            save_models({k: d for k, d in self.models.items() if k not in self.shipped}, COUNTED, HEAD)


def count_networks(counted: Counted) -> None:
    """Count what a table may ask for that nobody has shown yet; what is counted is kept now and then."""
    for number, row in enumerate(csv.DictReader(NETWORKS.read_text(encoding="utf-8").splitlines())):
        counted(key_of(row["model"], f"train/timm/{row['pixels']}px"))
        if number % 50 == 0:
            counted.keep()


def count(key: str) -> Demand:
    """Count a model on the meta device at two batch sizes: a training step, or of a key that says so its
    forward pass alone; raises what its library raises."""
    import _zoo
    import torch

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
    bins = bins_between(small.kernels, large.kernels)
    saved = (large.saved_bytes - small.saved_bytes) / (LARGE - SMALL)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Demand(tuple(Bin(*b) for b in bins), sum(p.numel() for p in parameters), len(parameters), saved)


def bins_between(small: Sequence[Kernel], large: Sequence[Kernel]) -> list[work.Bin]:
    """The bins of a step counted at two batch sizes, whose difference tells what grows with the batch.

    Raises ValueError where its kernels differ between them.
    """
    if [k.name for k in small] != [k.name for k in large]:
        raise ValueError("the step runs other operators when the batch is larger")
    parts = []
    for one, other in zip(small, large, strict=True):
        growing = max(other.bytes - one.bytes, 0) / (LARGE - SMALL)
        flops = max(other.flops - one.flops, 0) / (LARGE - SMALL)
        parts.append((work.kind_of(one), flops, growing, max(one.bytes - SMALL * growing, 0)))
    return work.gather(parts)


def score(rows: Sequence[Row], left_out: dict[str, int]) -> None:
    """Print the errors of the shipped predictor by harness, precision and card; the JSON document last."""
    if not rows:
        print(json.dumps({"n": 0, "median_abs_error": None, "interval_coverage": None, "by_gpu": {}}))
        return
    found, error, inside = judged(rows, *load_coefficients())
    table(error, inside, rows)
    for name, case in found["by_case"].items():
        print(f"{name:24s}", case)
    print(json.dumps({**found, "left_out": left_out}))


def judged(
    rows: Sequence[Row], theta: dict[str, np.ndarray], rest: dict[str, Any]
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Errors of coefficients: the document of a score, and by row the relative error and whether the interval
    holds it."""
    from _fitting import absolute, covered, errors, situations

    error = errors(theta, rows)
    seen = rest["evidence"]
    situation = situations(theta, rows, seen)
    new = np.array([row.key not in seen["models"] for row in rows])
    case = np.array([case_of(row.gpu, seen, new_model=n) for row, n in zip(rows, new, strict=True)])
    inside = np.zeros(len(rows), bool)
    for name in CASES:
        for unseen in (False, True):
            chosen = (case == name) & (new == unseen)
            inside[chosen] = covered(
                rest["interval"], name, situation[chosen], error[chosen], new_model=unseen
            )
    by_gpu = medians(error, rows, lambda row: row.gpu.name)
    by_case = {}
    for name in CASES:
        if (case == name).any():
            here = medians(np.where(case == name, error, np.nan), rows, lambda row: row.gpu.name)
            by_case[name] = {
                "n": int((case == name).sum()),
                "median_abs_error": median(error[case == name]),
                **over_cards(here),
                "interval_coverage": round(float(np.mean(inside[case == name])), 4),
            }
    document = {
        "n": len(rows),
        "median_abs_error": median(error),
        **over_cards(by_gpu),
        "interval_coverage": round(float(np.mean(inside)), 4),
        "by_case": by_case,
        "by_gpu": by_gpu,
    }
    return document, absolute(error), inside


def over_cards(by_gpu: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The median over cards of their median errors, and the worst card."""
    found = {name: entry["median_abs_error"] for name, entry in by_gpu.items()}
    worst = max(found, key=lambda name: found[name])
    return {"median_card": round(statistics.median(found.values()), 4), "worst_card": [worst, found[worst]]}


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


def fit(rows: Sequence[Row], aside: Sequence[Row], left_out: dict[str, int], date: str) -> None:
    """Fit on all rows; errors from fits that left rows, families, cards or architectures out, and of the
    whole fit on what was set aside; write coefficients and record."""
    import _fitting as fitting

    theta = fitting.fit(fitting.thin(rows), fitting.FIRST_ITERATIONS)
    seen = fitting.evidence(rows)
    found = fitting.held_out(rows, theta)
    situation = fitting.situations(theta, rows, seen)
    interval = fitting.calibrate(situation, {name: error for name, (error, _) in found.items()}, rows)
    splits = split_errors(found, situation, interval, rows)
    own = fitting.errors(theta, rows)
    document = {
        "benchmark": "advise",
        "job": "advise",
        "machine": {"fingerprint": "published"},
        "command": "scripts/bench advise --data FILE.csv --fit",
        "date": date,
        "rows": len(rows),
        "cards": len(seen["cards"]),
        "models": sorted({row.key for row in rows}),
        "parameters": sum(value.size for value in theta.values()),
        "left_out": left_out,
        "in_sample": median(own),
        "demanded": DEMANDED,
        "splits": splits,
        "set_aside": judged(aside, theta, {"interval": interval, "evidence": seen})[0],
    }
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{date}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    errors = {
        name: {
            **{key: split[key] for key in ("n", "median_abs_error", "median_card")},
            "interval_coverage": split["coverage_on_the_other_half"],
            **{kind.replace(" ", "_").lower(): value for kind, value in split["simple"].items()},
        }
        for name, split in splits.items()
    }
    DOCS.write_text(with_errors(DOCS.read_text(encoding="utf-8"), document), encoding="utf-8")
    write(theta, {"interval": interval, "errors": errors, "evidence": seen}, date)
    for name, split in splits.items():
        print(name, {key: value for key, value in split.items() if not key.startswith("by_")})
    print("in sample", median(own))


def split_errors(
    found: dict[str, tuple[np.ndarray, dict[str, np.ndarray]]],
    situation: np.ndarray,
    interval: dict[str, dict[str, float]],
    rows: Sequence[Row],
) -> dict[str, Any]:
    """What `held_out` found, for the record; the share in interval also of one half of the families, where
    the other half made the interval."""
    import _fitting as fitting

    half = np.array([len(row.family) % 2 == 0 for row in rows])
    other = fitting.calibrate(
        situation, {name: np.where(half, error, np.nan) for name, (error, _) in found.items()}, rows
    )
    splits: dict[str, Any] = {}
    for name, (error, simple) in found.items():
        mask = ~np.isnan(error)
        by_gpu = medians(error, rows, lambda row: row.gpu.name)
        inside = fitting.covered(interval, name, situation[mask], error[mask])
        rest = mask & ~half
        splits[name] = {
            "n": int(mask.sum()),
            "median_abs_error": median(error[mask]),
            **over_cards(by_gpu),
            "interval_coverage": round(float(np.mean(inside)), 3),
            "coverage_on_the_other_half": round(
                float(np.mean(fitting.covered(other, name, situation[rest], error[rest]))), 3
            ),
            "simple": {kind: median(values[mask]) for kind, values in simple.items()},
            "simple_median_card": {
                kind: over_cards(medians(values, rows, lambda row: row.gpu.name))["median_card"]
                for kind, values in simple.items()
            },
            "by_gpu": by_gpu,
            "by_architecture": medians(error, rows, lambda row: architecture(row.gpu)),
            "by_family": medians(error, rows, lambda row: f"{row.setting.harness} {row.family}"),
        }
    return splits


def with_errors(text: str, record: dict[str, Any]) -> str:
    """The documentation page with the record's errors between its markers."""
    lines = [
        f"Fitted on {record['date']}: {record['parameters']} parameters, {record['rows']:,} figures of "
        f"{len(record['models'])} models and {record['cards']} cards. On the figures of the fit itself the "
        f"median error is {100 * record['in_sample']:.1f} %.\n",
        "| left out of the fit | figures | median error | of the median card | of the worst card "
        "| in interval | of the median card: by roofline | by bandwidth | by TFLOPS |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, split in record["splits"].items():
        worst, of_worst = split["worst_card"]
        cells = (
            f"{name} | {split['n']:,} | **{100 * split['median_abs_error']:.1f} %** | "
            f"{100 * split['median_card']:.0f} % | {100 * of_worst:.0f} % ({worst}) | "
            f"{100 * split['coverage_on_the_other_half']:.0f} %"
        )
        simple = " | ".join(f"{100 * value:.0f} %" for value in split["simple_median_card"].values())
        lines.append(f"| {cells} | {simple} |")
    aside = record["set_aside"]
    worst, of_worst = aside["worst_card"]
    names = ", ".join(aside["by_gpu"])
    lines.append(
        f"\nOf {aside['n']} figures of MLPerf's RetinaNet that no fit has seen, on {names}: median error "
        f"{100 * aside['median_abs_error']:.0f} %, of the worst card {100 * of_worst:.0f} % ({worst}), "
        f"{100 * aside['interval_coverage']:.0f} % in interval."
    )
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
