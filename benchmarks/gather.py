"""Extract figures that others published from local copies of their public repositories into our own tables.

    scripts/bench gather --timm FOLDER       a checkout of huggingface/pytorch-image-models

Writes benchmarks/figures/timm_inference.csv, with the columns of the published throughput table: images a
second of networks whose training is counted already, forward alone, on cards that were measured with the
same software. What is copied are figures with their source and its date, never a file.
"""

from __future__ import annotations

import argparse
import csv
import re
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


def main() -> None:
    """Write the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--timm", type=Path, required=True, help="checkout of huggingface/pytorch-image-models"
    )
    given = parser.parse_args()
    rows = list(timm_rows(given.timm))
    write(FIGURES / "timm_inference.csv", rows)
    print(f"{len(rows)} rows of {len({row[0] for row in rows})} networks")


def timm_rows(folder: Path) -> Iterator[tuple[str, ...]]:
    """Rows of eager inference in mixed precision, of every third counted network that all files hold."""
    tables = {}
    for path in sorted((folder / "results").glob("benchmark-infer-amp-*.csv")):
        found = NAME.fullmatch(path.name)
        if found and found[4] in CARDS:
            with path.open(encoding="utf-8", newline="") as file:
                tables[path] = {row["model"]: row for row in csv.DictReader(file)}
    counted = {key.partition(":")[2].partition("@")[0] for key in load_models() if key.startswith("timm:")}
    common = sorted(set.intersection(counted, *(set(table) for table in tables.values())))[::EVERY]
    for path, table in tables.items():
        found = NAME.fullmatch(path.name)
        assert found is not None
        version = f"{found[2]}.{found[3]}"
        commit, date = _commit(folder, path)
        for name in common:
            row = table[name]
            task = f"infer/timm/pytorch-{version}/{found[1]}/synthetic/{row['infer_img_size']}px"
            source = f"timm@{commit}:results/{path.name}"
            speed, batch = row["infer_samples_per_sec"], row["infer_batch_size"]
            yield name, task, CARDS[found[4]], "1", "amp_fp16", batch, "img/s", speed, source, date


def _commit(folder: Path, path: Path) -> tuple[str, str]:
    """Short hash and day of the commit that last changed a file."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h %cs", "--", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    commit, _, day = done.stdout.strip().partition(" ")
    return commit, day


def write(path: Path, rows: list[tuple[str, ...]]) -> None:
    """A table of figures."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
