"""The formula behind every predicted time: operators against a roofline, a floor of launches, a cost of
talking.

It is written once: it predicts, and `benchmarks/advise.py --fit` fits it. All parameters are positive
numbers with a meaning, held in `coefficients.toml`:

    a kernel     ((operations / (rate x efficiency))^q + (bytes / (bandwidth x efficiency))^q)^(1/q) + latency
    one device   the kernels' sum, weights cast and updated
    one step     (device^h + host^h)^(1/h): the host issues kernels while the device works on earlier ones
    several      + what of the gradients' all-reduce outlasts the backward pass, and its last bucket; beyond
                 one machine it takes as long as the slower of what is inside of it and its adapters together

Rates and bandwidths are the catalogue's. Efficiencies belong to a kind of kernel and to a precision; an
architecture has one factor for its matrix rate and one for its bandwidth, so that a card of a known
architecture is as good as measured, and one of an unknown architecture is the mean of the known ones. A link
moves at most its nominal bytes, and of a backward pass no more can be hidden than it lasts.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vivace.advising.catalogue import Gpu
from vivace.advising.demand import Demand
from vivace.errors import InputError
from vivace.operators import KINDS, MATRIX_KINDS

COEFFICIENTS_FILE = Path(__file__).resolve().parent / "coefficients.toml"
FORMAT = 1
MODES = ("half", "tf32", "single", "double")
LAYOUTS = ("half_nchw", "half_nhwc", "single")
STREAMS = ("product", "norm", "other")  # kinds of kernels that a memory order changes alike
ARCHITECTURES = (
    "pascal", "volta", "turing", "ampere-ga100", "ampere", "ada", "hopper", "blackwell-rtx", "cdna1",
    "cdna2", "other",
)  # fmt: skip
HARNESSES = ("timm", "loop", "ngc", "examples", "mlperf", "other", "forward")
FRAMEWORKS = ("pytorch", "tensorflow", "mxnet", "other")
LINKS = ("fabric", "bus", "consumer_bus", "network")
HALF = ("amp_fp16", "amp_bf16", "fp16", "bf16")
PRECISIONS = ("fp64", "fp32", "tf32", *HALF)
BASE_YEAR, FIRST_YEAR, LAST_YEAR = 2022.5, 2017.0, 2025.8
GPUS_IN_A_NODE = 8
PCIE_BYTES = {1: 3e9, 2: 6e9, 3: 12e9, 4: 24e9, 5: 48e9, 6: 96e9}
NETWORK_BYTES = GPUS_IN_A_NODE * 25e9  # a 200 Gb/s adapter a GPU, and a ring through each
BUCKET_BYTES = 25e6  # DistributedDataParallel's own
BACKWARD_SHARE = 2 / 3  # of a step
# What handing over one tiny operator takes a server of the base year, and how much faster later ones are.
LAUNCH_SECONDS, HOST_A_YEAR = 5e-6, 1.08
# Watts per unit and GHz above which power does not hold the clock back.
FREE_WATTS = 2.4
TINY = 1e-9  # seconds, where a kernel has no operations or no bytes
RATE_UNIT, BANDWIDTH_UNIT = 3e13, 7e11  # FLOP/s and bytes/s at which the power law of returns is 1

Labels = tuple[tuple[str, ...], ...]
# Name: labels of its dimensions, start of the fit, and how strongly the fit holds it there (per squared log).
PARAMETERS: dict[str, tuple[Labels, float, float]] = {
    "matrix_efficiency": ((MATRIX_KINDS,), 0.5, 1.0),
    "mode_efficiency": ((MODES,), 1.0, 1.0),
    "channels_last": ((MATRIX_KINDS,), 1.0, 1.0),
    "memory_efficiency": ((KINDS,), 0.6, 2.0),
    "layout_memory": ((LAYOUTS, STREAMS), 1.0, 2.0),
    "architecture_matrix": ((ARCHITECTURES,), 1.0, 3.0),
    "architecture_memory": ((ARCHITECTURES,), 1.0, 3.0),
    "rate_power": ((), 1.0, 3.0),
    "bandwidth_power": ((), 1.0, 3.0),
    "exponent": ((), 1.2, 0.5),
    "latency_seconds": ((), 3e-6, 1.0),
    "host_launches": ((HARNESSES,), 2.5, 2.0),
    "host_autocast": ((), 1.2, 1.0),
    "host_exponent": ((), 4.0, 20.0),
    "tensor_launches": ((), 4.0, 1.0),
    "step_launches": ((HARNESSES,), 200.0, 1.0),
    "update_bytes": ((), 24.0, 2.0),
    "cast_bytes": ((), 12.0, 0.5),
    "power": ((), 0.2, 0.5),
    "year": ((), 1.03, 10.0),
    "framework": ((FRAMEWORKS,), 1.0, 2.0),
    "harness": ((HARNESSES,), 1.0, 2.0),
    "link_efficiency": ((LINKS,), 0.5, 3.0),
    "hop_seconds": ((), 1e-5, 3.0),
    "overlap": ((), 0.6, 3.0),
    "straggling": ((), 0.02, 0.3),
    "replicate_host": ((), 0.5, 0.3),
    "replicate_bytes": ((), 8.0, 0.3),
    "replicate_growth": ((), 0.7, 1.0),
}
STREAM_OF_KIND = np.array(
    [
        STREAMS.index("product" if k in MATRIX_KINDS else "norm" if k.endswith("_norm") else "other")
        for k in KINDS
    ]
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a step is run.

    Args:
        precision: one of `PRECISIONS`; ``amp_*`` keeps weights in fp32 and casts them each step.
        batch_size: samples per device and step.
        num_gpus: devices that train together.
        channels_last: memory order of images.
        updates: does the step update the weights?
        framework, harness: what ran it; a person's own job counts as ``pytorch`` and the plain loop of
            ``timm``.
        year: date of software and host; newer than the evidence counts as the newest evidence.
        launch_seconds: what handing over one tiny operator takes the host, as ``vivace inspect --measure``
        tells it;
            without, what a server of the year takes.
        data_parallel: replicas in one process (`nn.DataParallel`) instead of one process a device.
    """

    precision: str = "fp32"
    batch_size: float = 1
    num_gpus: int = 1
    channels_last: bool = False
    updates: bool = True
    framework: str = "pytorch"
    harness: str = "timm"
    year: float = LAST_YEAR
    launch_seconds: float | None = None
    data_parallel: bool = False

    @property
    def mode(self) -> str:
        """Which of the `MODES` the matrix kernels run in."""
        return {"fp64": "double", "fp32": "single", "tf32": "tf32"}.get(self.precision, "half")


def matrix_rate(gpu: Gpu, setting: Setting) -> tuple[float, str]:
    """The rate of matrix kernels in FLOP/s and the mode it belongs to; a card without matrix units falls to
    fp32."""
    rates = gpu.rates
    if setting.mode == "double":
        return max(rates.get("fp64", 0.0), rates.get("fp64_matrix", 0.0), 1e9), "double"
    wanted = {"tf32": "tf32", "single": "fp32_matrix"}.get(
        setting.mode, setting.precision.removeprefix("amp_")
    )
    single = max(rates.get("fp32", 0.0), rates.get("fp32_matrix", 0.0) if setting.mode == "single" else 0.0)
    if setting.mode != "single" and wanted in rates:
        return rates[wanted], setting.mode
    if single <= 0:
        single = max(rates.values(), default=1e12) / 8
    return single, "single"


def architecture(gpu: Gpu) -> str:
    """The entry of `ARCHITECTURES` for a card; ``other`` without evidence."""
    family = gpu.family.removesuffix("-l40").removesuffix("-gp100")
    family = "blackwell-rtx" if family == "blackwell-geforce" else family.removesuffix("-geforce")
    return family if family in ARCHITECTURES else "other"


def link(gpu: Gpu, num_gpus: int) -> tuple[str, float]:
    """Over what gradients travel inside of a machine and its nominal bytes/s per device in one direction."""
    inside = min(num_gpus, GPUS_IN_A_NODE)
    fabric = gpu.form in ("sxm", "oam") or (inside <= gpu.link_group and gpu.form != "laptop")
    if gpu.link_bandwidth > 0 and fabric:
        return "fabric", gpu.link_bandwidth / 2
    return ("consumer_bus" if gpu.form in ("consumer", "laptop") else "bus"), bus(gpu)


def bus(gpu: Gpu) -> float:
    """Nominal bytes/s between host and device in one direction."""
    return PCIE_BYTES.get(gpu.pcie_generation or 3, 12e9) * gpu.pcie_lanes / 16


Case = tuple[Demand, Gpu, Setting]


def make_columns(cases: Sequence[Case]) -> dict[str, Any]:
    """The cases as arrays: one entry a case, and for the bins one entry a bin with its case's number."""
    rows = [_row(*case) for case in cases]
    columns = {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else {})}
    bins = [(number, b) for number, (demand, _, _) in enumerate(cases) for b in demand.bins]
    of = columns["case"] = np.array([number for number, _ in bins], dtype=np.int64)
    kind = columns["kind"] = np.array([KINDS.index(b.kind) for _, b in bins], dtype=np.int64)
    count, flops, moved, constant = (
        np.array([getattr(b, name) for _, b in bins], dtype=np.float64)
        for name in ("count", "flops", "bytes", "constant_bytes")
    )
    if not rows:
        return columns
    columns["kernels"] = np.bincount(of, weights=count, minlength=len(rows))
    columns["matrix"] = (kind < len(MATRIX_KINDS)).astype(np.float64)
    columns["place"] = np.where(kind < len(MATRIX_KINDS), kind, 0)
    columns["depthwise"] = kind == MATRIX_KINDS.index("depthwise")
    columns["nhwc"] = columns["channels_last"][of] > 0
    wide = (kind == KINDS.index("layer_norm")) | (kind == KINDS.index("softmax"))  # of autocast, in fp32
    width = np.where(wide & (columns["autocast"][of] > 0), 1.0, columns["width"][of])
    columns["flops_step"] = flops * columns["batch"][of]
    columns["bytes_step"] = (moved * columns["batch"][of] + constant) * width
    return columns


def _row(demand: Demand, gpu: Gpu, setting: Setting) -> dict[str, Any]:
    rate, mode = matrix_rate(gpu, setting)
    half = setting.precision in HALF
    kind, link_bytes = link(gpu, setting.num_gpus)
    clock = (gpu.boost_clock or 1.5e9) / 1e9
    watts = (gpu.power_watts or 250.0) / ((gpu.num_units or 80) * clock)
    layout = "single" if not half else "half_nhwc" if setting.channels_last else "half_nchw"
    wide = 0.5 if setting.precision in ("fp16", "bf16") else 1.0
    gradients = 4 * wide * demand.num_updated
    around = 2 * (1 - 1 / setting.num_gpus) * gradients  # what a ring moves of them
    year = max(min(setting.year, LAST_YEAR), FIRST_YEAR) - BASE_YEAR
    return {
        "rate": rate,
        # Fast algorithms take fp32 past the quoted rate on older cards, as published; of strict fp32 on cards
        # with TF32 nothing was published, and an H200 reached a third of the rate.
        "most": rate if mode == "single" and "tf32" in gpu.rates else math.inf,
        "vector_rate": gpu.rates.get("fp64" if mode == "double" else "fp32") or rate / 8,
        "bandwidth": gpu.bandwidth,
        "clock": clock / 1.5,
        "mode": MODES.index(mode),
        "layout": LAYOUTS.index(layout),
        "architecture": ARCHITECTURES.index(architecture(gpu)),
        "width": 2.0 if setting.precision == "fp64" else 0.5 if half else 1.0,
        "autocast": float(setting.precision.startswith("amp")),
        "channels_last": float(setting.channels_last and half),
        "batch": float(setting.batch_size),
        "updates": float(setting.updates),
        "parameters": float(demand.num_updated),
        "tensors": float(demand.num_tensors),
        "framework": FRAMEWORKS.index(setting.framework),
        "harness": HARNESSES.index(setting.harness),
        "years": year,
        "launch": LAUNCH_SECONDS * HOST_A_YEAR**-year
        if setting.launch_seconds is None
        else setting.launch_seconds,
        "power": min(math.log(watts / FREE_WATTS), 0.0),
        "gpus": float(setting.num_gpus),
        "replicas": float(setting.num_gpus - 1 if setting.data_parallel else 0),
        "processes": float(1 if setting.data_parallel else setting.num_gpus),
        "link": LINKS.index(kind),
        "link_seconds": around / link_bytes,
        "network_seconds": around / NETWORK_BYTES if setting.num_gpus > GPUS_IN_A_NODE else 0.0,
        "buckets": max(math.ceil(gradients / BUCKET_BYTES), 1),
        "bus_seconds": gradients / bus(gpu),
    }


def step_parts(theta: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a step and of its parts, one entry a case, for parameters by name and the columns of
    `make_columns`."""
    c, t = columns, theta
    of, kind, cases = c["case"], c["kind"], len(c["batch"])

    def total(values: Any) -> Any:
        return np.bincount(of, weights=values, minlength=cases)

    efficiency = t["mode_efficiency"][c["mode"]] * t["architecture_matrix"][c["architecture"]]
    efficiency = efficiency * np.exp(t["power"] * c["power"])
    lessened = t["rate_power"] - 1
    rate = c["rate"] * (c["rate"] / RATE_UNIT) ** lessened * efficiency
    vector = c["vector_rate"] * (c["vector_rate"] / RATE_UNIT) ** lessened * efficiency
    by_kind = np.where(
        c["nhwc"],
        (t["matrix_efficiency"] * t["channels_last"])[c["place"]],
        t["matrix_efficiency"][c["place"]],
    )
    reached = np.minimum(np.where(c["depthwise"], vector[of], rate[of]) * by_kind, c["most"][of])
    compute = c["matrix"] * c["flops_step"] / reached + TINY
    speed = c["bandwidth"] * (c["bandwidth"] / BANDWIDTH_UNIT) ** (t["bandwidth_power"] - 1)
    table = t["layout_memory"][:, STREAM_OF_KIND] * t["memory_efficiency"]
    bandwidth = (speed * t["architecture_memory"][c["architecture"]])[of]
    memory = c["bytes_step"] / (bandwidth * table[c["layout"][of], kind]) + TINY
    busy = _joined(compute, memory, t["exponent"])
    kernels = c["kernels"]
    weights = c["parameters"] * (t["update_bytes"] * c["updates"] + t["cast_bytes"] * c["autocast"]) / speed
    device = total(busy) + kernels * t["latency_seconds"] / c["clock"] + weights
    calls = kernels * t["host_autocast"] ** c["autocast"] * t["host_launches"][c["harness"]]
    tensors = c["updates"] * c["tensors"] * t["tensor_launches"]
    host = (calls + tensors + t["step_launches"][c["harness"]]) * c["launch"]
    replicas = (c["replicas"] + 1e-6) ** t["replicate_growth"]
    host = host * (1 + t["replicate_host"] * replicas)
    single = _joined(device, host, t["host_exponent"])
    copied = c["bus_seconds"] * t["replicate_bytes"] / 8 * replicas
    shown = np.where(c["replicas"] > 0, copied, _talk(t, c, single))
    together = single * (1 + t["straggling"] * np.log(c["processes"])) + shown
    age = t["framework"][c["framework"]] * t["harness"][c["harness"]] * t["year"] ** (-c["years"])
    return {
        "seconds": together * age,
        "single": single * age,
        "compute": total(np.where(compute > memory, busy, 0.0)) * age,
        "bandwidth": (total(np.where(compute > memory, 0.0, busy)) + weights) * age,
        "device": device * age,
        "host": host * age,
        "communication": (together - single) * age,
    }


def _talk(t: Mapping[str, Any], c: Mapping[str, Any], single: object) -> Any:
    """Seconds of the all-reduce that the backward pass does not hide; the last bucket is ready when it
    ends."""
    hops = 2 * c["buckets"] * np.log2(c["gpus"]) * t["hop_seconds"]
    reached = np.minimum(t["link_efficiency"], 1.0)
    outside = c["network_seconds"] / reached[LINKS.index("network")]
    talk = np.maximum(c["link_seconds"] / reached[c["link"]], outside) + hops
    hidden = BACKWARD_SHARE * np.minimum(t["overlap"], 1.0) * single
    return talk - np.minimum(talk * (1 - 1 / c["buckets"]), hidden)


def _joined(one: Any, other: Any, power: Any) -> Any:
    """``(one^power + other^power)^(1/power)`` without powers of small numbers: 1 adds, a large one takes
    the larger."""
    large, small = np.maximum(one, other), np.minimum(one, other)
    return large * (1 + (small / large) ** power) ** (1 / power)


def predict_parts(theta: Mapping[str, Any], cases: Sequence[Case]) -> dict[str, Any]:
    """`step_parts` of a list of cases, whose columns are made here."""
    return step_parts(theta, make_columns(cases))


def load_coefficients() -> tuple[dict[str, Any], dict[str, Any]]:
    """The fitted parameters as arrays, and the rest of the file: evidence and intervals."""
    document = tomllib.loads(COEFFICIENTS_FILE.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        raise InputError(
            f"{COEFFICIENTS_FILE} has format {document.get('format')!r}; this Vivace reads format = {FORMAT}"
        )
    theta: dict[str, Any] = {}
    for name, (labels, start, _) in PARAMETERS.items():
        table = document["parameters"].get(name, {} if labels else start)
        if not labels:
            theta[name] = np.float64(table)
        elif len(labels) == 1:
            theta[name] = np.array([table.get(key, start) for key in labels[0]])
        else:
            theta[name] = np.array([[table.get(a, {}).get(b, start) for b in labels[1]] for a in labels[0]])
    return theta, {key: value for key, value in document.items() if key != "parameters"}
