"""Extract figures that others published from local copies of their public repositories into our own tables.

    scripts/bench gather --timm FOLDER          a clone of huggingface/pytorch-image-models
    scripts/bench gather --mlperf FOLDER ...    clones of mlcommons/training_results_v4.1, _v5.0, _v5.1

Each writes a table to benchmarks/figures, with the columns of the published throughput table. What is copied
are figures with their source and its date, never a file. A clone may be bare.

timm_inference.csv has images a second of networks whose training is counted already, forward alone, on cards
that were measured with the same software; timm_networks.csv names the networks whose training timm has timed,
without a figure, so that their work can be counted beforehand. mlperf_training.csv has images a second of
RetinaNet, from the times of its epochs without the first. The newer rounds' other figures are left out: their
language models and BERT train in fp8 and less, the recommender is no PyTorch, the others are not counted.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

from vivace.advising.demand import load_models

FIGURES = Path(__file__).resolve().parent / "figures"
COLUMNS = ("model", "task", "gpu", "n_gpus", "precision", "batch_per_gpu", "unit", "value", "source", "date")
CARDS = {
    "rtx3090": "RTX 3090", "rtx4090": "RTX 4090", "4090": "RTX 4090", "5090": "RTX 5090",
    "pro6000maxq": "RTX PRO 6000 Blackwell Max-Q",
}  # fmt: skip
# PyTorch 2.4 and later: older files ran another attention.
NAME = re.compile(r"benchmark-infer-amp-(nchw|nhwc)-pt(2)([4-9])\d-cu\d+-(\w+)\.csv")
EVERY = 3  # a third of the networks: neighbours in the alphabet are siblings


RETINANET = re.compile(r"([^/]+)/results/([^/]+)/(?:retinanet|ssd)/result_\d+\.txt")  # ssd until 4.1
IMAGES = 1_170_301  # of an epoch: OpenImages as MLPerf trains on it
ROUND = re.compile(r"training_results_v(\d\.\d)")
ACCELERATORS = (
    ("GB200", "GB200-186GB"), ("GB300", "GB300-279GB"), ("B200", "B200-SXM-180GB"),
    ("B300", "B300-SXM-270GB"), ("H200.*NVL", "H200-NVL-141GB"), ("H200", "H200-SXM-141GB"),
    ("H100.*SXM", "H100-SXM5-80GB"),
    ("L40S", "L40S"), ("RTX Pro 6000", "RTX PRO 6000 Blackwell Server"),
)  # fmt: skip
Rows = list[tuple[str, ...]]


def main() -> None:
    """Write the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--timm", type=Path, help="clone of huggingface/pytorch-image-models")
    parser.add_argument("--mlperf", type=Path, nargs="+", help="clones of mlcommons/training_results_v*")
    given = parser.parse_args()
    if not given.timm and not given.mlperf:
        parser.error("give --timm or --mlperf")
    if given.timm:
        write(FIGURES / "timm_inference.csv", list(timm_rows(given.timm)))
        write(FIGURES / "timm_networks.csv", list(timm_networks(given.timm)), ("model", "pixels"))
    if given.mlperf:
        rows = [row for clone in given.mlperf for row in mlperf_rows(clone)]
        again = {row[2:8]: row for row in reversed(rows)}  # of what was handed in twice, the first
        write(FIGURES / "mlperf_training.csv", list(reversed(again.values())))


def mlperf_rows(clone: Path) -> Iterator[tuple[str, ...]]:
    """RetinaNet of each system of a round that trained it with PyTorch, the median over its runs' epochs."""
    found = ROUND.search(str(clone.resolve()))
    if not found:
        raise SystemExit(f"{clone}: the folder's path should hold the round's name, as training_results_v5.1")
    runs: dict[tuple[str, str], list[str]] = {}
    for path in _git(clone, "ls-tree", "-r", "--name-only", "HEAD").splitlines():
        if match := RETINANET.fullmatch(path):
            runs.setdefault((match[1], match[2]), []).append(path)
    commit, _, day = _git(clone, "log", "-1", "--format=%h %cs").strip().partition(" ")
    for (submitter, system), paths in runs.items():
        about = json.loads(_git(clone, "show", f"HEAD:{submitter}/systems/{system}.json"))
        model = about["accelerator_model_name"]
        card = next((name for mark, name in ACCELERATORS if re.search(mark, model, re.IGNORECASE)), None)
        number = int(about["number_of_nodes"]) * int(about["accelerators_per_node"])
        epochs, batches = list[float](), set[float]()
        for path in paths:
            seconds, batch = _epochs(_git(clone, "show", f"HEAD:{path}"))
            epochs += seconds
            batches.add(batch)
        if card is None or "tinygrad" in about["framework"] or not epochs or len(batches) != 1:
            continue
        task = f"train/mlperf-v{found[1]}/pytorch/nhwc/openimages/800px"
        speed, source = (
            IMAGES / statistics.median(epochs),
            f"training_results_v{found[1]}@{commit}:{paths[0]}",
        )
        of_one = f"{batches.pop() / number:g}"
        yield "retinanet", task, card, str(number), "amp_fp16", of_one, "img/s", f"{speed:.1f}", source, day


def _epochs(log: str) -> tuple[list[float], float]:
    """Seconds of a run's epochs without the first, which warms up, and its global batch."""
    begun, seconds, batch = 0.0, list[float](), 0.0
    for line in log.splitlines():
        _, mark, text = line.partition(":::MLLOG ")
        if not mark:
            continue
        event = json.loads(text)
        if event["key"] == "global_batch_size":
            batch = float(event["value"])
        elif event["key"] == "epoch_start":
            begun = event["time_ms"] / 1e3
        elif event["key"] == "epoch_stop":
            seconds.append(event["time_ms"] / 1e3 - begun)
    return seconds[1:], batch


def timm_networks(clone: Path) -> Iterator[tuple[str, ...]]:
    """Networks of timm's training tables, each with the sizes of its images."""
    found = set()
    for path in _git(clone, "ls-tree", "--name-only", "HEAD", "results/").splitlines():
        if path.startswith("results/benchmark-train-"):
            table = csv.DictReader(io.StringIO(_git(clone, "show", f"HEAD:{path}")))
            found |= {(row["model"], row["train_img_size"]) for row in table}
    yield from sorted(found)


def timm_rows(clone: Path) -> Iterator[tuple[str, ...]]:
    """Rows of eager inference in mixed precision, of every third counted network that all files hold."""
    tables = {}
    for path in _git(clone, "ls-tree", "--name-only", "HEAD", "results/").splitlines():
        found = NAME.fullmatch(path.removeprefix("results/"))
        if found and found[4] in CARDS:
            text = _git(clone, "show", f"HEAD:{path}")
            tables[path] = {row["model"]: row for row in csv.DictReader(io.StringIO(text))}
    counted = {key.partition(":")[2].partition("@")[0] for key in load_models() if key.startswith("timm:")}
    common = sorted(set.intersection(counted, *(set(table) for table in tables.values())))[::EVERY]
    for path, table in tables.items():
        found = NAME.fullmatch(path.removeprefix("results/"))
        assert found is not None
        version = f"{found[2]}.{found[3]}"
        commit, _, date = _git(clone, "log", "-1", "--format=%h %cs", "--", path).strip().partition(" ")
        for name in common:
            row = table[name]
            task = f"infer/timm/pytorch-{version}/{found[1]}/synthetic/{row['infer_img_size']}px"
            source = f"timm@{commit}:{path}"
            speed, batch = row["infer_samples_per_sec"], row["infer_batch_size"]
            yield name, task, CARDS[found[4]], "1", "amp_fp16", batch, "img/s", speed, source, date


def _git(clone: Path, *words: str) -> str:
    """What git says of a clone."""
    done = subprocess.run(["git", "-C", str(clone), *words], capture_output=True, check=True)
    return done.stdout.decode("utf-8", "replace")


def write(path: Path, rows: Rows, columns: tuple[str, ...] = COLUMNS) -> None:
    """A table of figures."""
    print(f"{len(rows)} rows of {len({row[0] for row in rows})} networks in {path.name}")
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
