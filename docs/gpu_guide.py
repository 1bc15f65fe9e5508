"""Write the tables of the guide to GPUs from the catalogue, the prices and docs/measured.csv."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

from vivace.advising.catalogue import Gpu, find_gpu, load_catalogue
from vivace.advising.prices import Prices, load_prices

DOCS = Path(__file__).resolve().parent
OUT = DOCS / "generated"

Row = dict[str, str]
CARDS = (
    "GTX 1080 Ti",
    "T4",
    "V100-SXM2-16GB",
    "RTX 3090",
    "A10",
    "L4",
    "RTX 4090",
    "L40S",
    "RTX 5090",
    "A100-SXM4-80GB",
    "H100-SXM5-80GB",
    "H200-SXM-141GB",
    "B200-SXM-180GB",
    "RX 7900 XTX",
    "MI300X",
    "Arc B580",
    "M2 Ultra",
)
LANGUAGE = "Transformer-XL large"
LANGUAGE_VERSION = "1.13"
BERT_PARAMETERS = 110e6  # BERT base, Devlin et al. 2018
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # bytes/s, one direction


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; an absent value is a dash."""
    heads = list(heads)
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    lines += [
        "| " + " | ".join("-" if cell in (None, "") else str(cell) for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def number(value: float | None, unit: float = 1.0) -> str:
    """Three digits of a value in a unit; empty for an unknown one."""
    if not value:
        return ""
    scaled = value / unit
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"


def matrix_rate(gpu: Gpu) -> float | None:
    """The rate of 16-bit matrix products in FLOP/s: bf16, or fp16 where there is no bf16."""
    return gpu.rates.get("bf16") or gpu.rates.get("fp16")


def measured(model: str, precision: str = "amp_fp16", version: str = "", num_gpus: int = 1) -> list[Row]:
    """The rows of docs/measured.csv for one model."""
    with (DOCS / "measured.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {"model": model, "precision": precision, "n_gpus": str(num_gpus)}
    return [
        row
        for row in rows
        if all(row[key] == value for key, value in wanted.items()) and row["pytorch"].startswith(version)
    ]


def cards_table() -> str:
    """Cards of several kinds with the numbers that the guide explains."""
    heads = ["card", "units", "GHz", "fp32", "16-bit", "memory GiB", "GB/s", "cache MiB", "link GB/s", "W"]
    rows = []
    for gpu in map(find_gpu, CARDS):
        rates = [number(gpu.rates.get("fp32"), 1e12), number(matrix_rate(gpu), 1e12)]
        memory = [number(gpu.memory_bytes, 2**30), number(gpu.bandwidth, 1e9), number(gpu.cache_bytes, 2**20)]
        clock = f"{gpu.boost_clock / 1e9:.2f}" if gpu.boost_clock else ""
        rows.append(
            [
                gpu.name,
                gpu.num_units,
                clock,
                *rates,
                *memory,
                number(gpu.link_bandwidth, 1e9),
                gpu.power_watts,
            ]
        )
    return table(heads, rows) + "\nRates in TFLOP/s, dense; clock: boost; link: both directions.\n"


def widths_table() -> str:
    """How units, clock and width make the rates of a few cards."""
    rows = []
    for name in ("GTX 1080 Ti", "V100-SXM2-16GB", "RTX 3090", "RTX A6000", "A100-SXM4-80GB", "RTX 4090"):
        gpu = find_gpu(name)
        sixteen = gpu.per_clock.get("fp16")
        product = f"{gpu.num_units} x {gpu.boost_clock / 1e9:.3f} GHz x " if gpu.boost_clock else ""
        rows.append(
            [
                name,
                f"{product}{gpu.per_clock['fp32']} = {number(gpu.rates['fp32'], 1e12)}",
                f"{product}{sixteen} = {number(gpu.rates['fp16'], 1e12)}" if sixteen else "",
            ]
        )
    return table(["card", "fp32, TFLOP/s", "16-bit matrix, TFLOP/s"], rows)


def ridge_table() -> str:
    """Operations a card can do in the time in which it moves a byte."""
    names = ("T4", "L4", "RTX 4090", "V100", "A100", "H100", "H200", "MI300X")
    rows = []
    for gpu in map(find_gpu, names):
        rates = (gpu.rates["fp32"], gpu.rates.get("tf32"), matrix_rate(gpu))
        rows.append([gpu.name, *(number(rate / gpu.bandwidth) if rate else "" for rate in rates)])
    return table(["card", "fp32", "TF32", "16-bit"], rows)


def ratios_table() -> str:
    """What a step from one card to another promises by rate and by bandwidth, and what was measured."""
    pairs = (
        ("V100-SXM2-16GB", "RTX 3090"),
        ("RTX 3090", "RTX A6000"),
        ("RTX A6000", "RTX 6000 Ada"),
        ("RTX 6000 Ada", "A100-SXM4-40GB"),
        ("A100-SXM4-40GB", "A100-SXM4-80GB"),
        ("A100-SXM4-80GB", "H100-PCIe-80GB"),
        ("A100-SXM4-80GB", "H100-SXM5-80GB"),
    )
    speed = {row["gpu"]: row for row in measured(LANGUAGE, version=LANGUAGE_VERSION)}
    rows = []
    for before, after in pairs:
        old, new = find_gpu(before), find_gpu(after)
        rows.append(
            [
                f"{before} to {after}",
                f"{new.rates['fp16'] / old.rates['fp16']:.2f}",
                f"{new.bandwidth / old.bandwidth:.2f}",
                f"{float(speed[after]['value']) / float(speed[before]['value']):.2f}",
                f"{speed[before]['batch_per_gpu']} to {speed[after]['batch_per_gpu']}",
            ]
        )
    return table(["step", "fp16 rate", "bandwidth", "measured", "batch"], rows)


def precision_table() -> str:
    """What mixed precision brought on cards with and without matrix units."""
    mixed = {row["gpu"]: row for row in measured("BERT base")}
    rows = []
    for full in measured("BERT base", "fp32") + measured("BERT base", "tf32"):
        gpu, half = find_gpu(full["gpu"]), mixed[full["gpu"]]
        if half["pytorch"] != full["pytorch"]:
            half = next(r for r in measured("BERT base", version=full["pytorch"]) if r["gpu"] == full["gpu"])
        before = gpu.rates["tf32" if full["precision"] == "tf32" else "fp32"]
        rows.append(
            [
                gpu.name,
                full["precision"],
                f"{(gpu.rates.get('fp16') or gpu.rates['fp32']) / before:.1f}",
                f"{float(half['value']) / float(full['value']):.1f}",
            ]
        )
    return table(["card", "from", "ratio of the rates", "measured gain"], rows)


def memory_table() -> str:
    """One chip with different amounts of memory, and one card under two versions of PyTorch."""
    rows = []
    for row in measured(LANGUAGE):
        if row["gpu"].startswith(("Quadro", "A100")):
            memory = number(find_gpu(row["gpu"]).memory_bytes, 2**30)
            rows.append(
                [row["gpu"], memory, row["batch_per_gpu"], row["pytorch"], number(float(row["value"]))]
            )
    rows.sort(key=lambda row: (row[0], float(row[3])))
    return table(["card", "memory GiB", "batch", "PyTorch", "tokens/s"], rows)


def scaling_table() -> str:
    """How BERT base scaled over one machine's cards, beside the least time that its gradients need."""
    rows = []
    for one in measured("BERT base"):
        many = [
            row
            for n in (2, 4, 8)
            for row in measured("BERT base", version=one["pytorch"], num_gpus=n)
            if (row["gpu"], row["batch_per_gpu"]) == (one["gpu"], one["batch_per_gpu"])
        ]
        if not many:
            continue
        gpu = find_gpu(one["gpu"])
        step = float(one["batch_per_gpu"]) / float(one["value"])
        switched = gpu.form == "sxm"
        per_direction = (
            gpu.link_bandwidth / 2 if switched else PCIE_LANE[gpu.pcie_generation or 3] * gpu.pcie_lanes
        )
        exchange = 2 * 7 / 8 * 4 * BERT_PARAMETERS / per_direction
        gains = [f"{float(row['value']) / float(one['value']):.1f}" for row in many]
        link = gpu.link if switched else f"PCIe {gpu.pcie_generation}"
        rows.append([gpu.name, link, f"{step * 1e3:.0f}", f"{exchange * 1e3:.0f}", *gains])
    return table(
        ["card", "through", "step ms", "exchange ms, at least", "2 cards", "4 cards", "8 cards"], rows
    )


def value_table(prices: Prices) -> str:
    """Tokens for a dollar and for a joule, by card."""
    rows = []
    for row in measured(LANGUAGE, version=LANGUAGE_VERSION):
        gpu, speed = find_gpu(row["gpu"]), float(row["value"])
        hour = prices.hourly(gpu.name)
        energy = f"{speed / gpu.power_watts:.0f}" if gpu.power_watts else ""
        cells = ["", "", ""]
        if hour:
            cells = [f"{hour.typical:.2f}", str(hour.oldest), f"{speed * 3600 / hour.typical / 1e6:.0f}"]
        rows.append([gpu.name, number(speed), energy, *cells])
    return table(["card", "tokens/s", "tokens/J", "$/h", "price seen", "million tokens/$"], rows)


def catalogue_page() -> str:
    """Every device of the catalogue, by vendor."""
    parts = [
        "# The catalogue of GPUs\n",
        "Every number names its document in `src/vivace/advising/gpus.toml`; a test checks them against each",
        "other and against other lists. Rates are dense, in TFLOP/s. *Italic*: computed from units, clock",
        "and width, because no document quotes it. A dash: the device has no unit for it, or nobody says.",
        "What one module shows to PyTorch as two devices stands here as one of the two.\n",
    ]
    heads = ["device", "released", "fp32", "TF32", "fp16", "bf16", "fp8", "GiB", "GB/s", "link", "W"]
    gpus = load_catalogue().values()
    for vendor in dict.fromkeys(gpu.vendor for gpu in gpus):
        rows = []
        for gpu in (gpu for gpu in gpus if gpu.vendor == vendor):
            rates = []
            for dtype in ("fp32", "tf32", "fp16", "bf16", "fp8"):
                text = number(gpu.rates.get(dtype), 1e12)
                rates.append(f"*{text}*" if text and dtype in gpu.derived else text)
            memory = [number(gpu.memory_bytes, 2**30), number(gpu.bandwidth, 1e9)]
            rows.append(
                [gpu.name, gpu.release, *rates, *memory, number(gpu.link_bandwidth, 1e9), gpu.power_watts]
            )
        parts += [f"## {vendor}\n", table(heads, rows)]
    return "\n".join(parts)


def drivers_table() -> str:
    """Which build of PyTorch and which compute APIs serve which architecture."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for gpu in load_catalogue().values():
        key = (f"{gpu.vendor} {gpu.architecture}", gpu.pytorch, ", ".join(gpu.apis))
        rows.setdefault(key, []).append(gpu.name)
    cells = [
        [key[0], ", ".join(dict.fromkeys((names[0], names[-1]))), *key[1:]] for key, names in rows.items()
    ]
    return table(["architecture", "such as", "PyTorch build", "compute APIs"], cells).replace("---:", "---")


TABLES: dict[str, Callable[[], str]] = {
    "gpu-cards.inc": cards_table,
    "gpu-widths.inc": widths_table,
    "gpu-ridge.inc": ridge_table,
    "gpu-ratios.inc": ratios_table,
    "gpu-precision.inc": precision_table,
    "gpu-memory.inc": memory_table,
    "gpu-scaling.inc": scaling_table,
    "gpu-value.inc": lambda: value_table(load_prices()),
    "gpu-drivers.inc": drivers_table,
    "gpus.md": catalogue_page,
}


def main() -> None:
    """Write every table."""
    OUT.mkdir(exist_ok=True)
    for name, make in TABLES.items():
        (OUT / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
