"""Rows of published throughput as cases for the predictor: model, card, setting and the measured seconds."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

from vivace.advising.catalogue import Gpu, find_gpu
from vivace.advising.demand import Demand
from vivace.advising.formula import HALF, Setting
from vivace.errors import InputError

# PyTorch releases by date; the middle of 2022 where a row names none.
RELEASES = {
    "1.4": 2020.0, "1.5": 2020.3, "1.6": 2020.6, "1.7": 2020.8, "1.8": 2021.2, "1.9": 2021.5,
    "1.10": 2021.8, "1.11": 2022.2, "1.12": 2022.5, "1.13": 2022.8, "2.0": 2023.2, "2.1": 2023.8,
    "2.2": 2024.1, "2.3": 2024.3, "2.4": 2024.6, "2.5": 2024.8, "2.6": 2025.1, "2.7": 2025.3, "2.8": 2025.6,
    "2.9": 2025.8,
}  # fmt: skip
ROUNDS = {
    "0.7": 2020.5, "1.0": 2021.4, "1.1": 2021.9, "2.0": 2022.4, "2.1": 2022.8, "3.0": 2023.4, "3.1": 2023.8,
    "4.0": 2024.4, "4.1": 2024.8, "5.0": 2025.4, "5.1": 2025.8,
}  # fmt: skip
NO_VERSION = 2020.8  # of PyTorch, in the loops that name none
HARNESS_MARKS = (
    ("infer/", "forward"), ("timm", "timm"), ("no-optimizer", "loop"), ("ngc", "ngc"), ("mlperf", "mlperf"),
    ("dle", "examples"), ("fwd+bwd", "loop"),
)  # fmt: skip
# The sources' names for models that a library knows under another, or that `_zoo.OWN` rebuilds.
NAMES = (
    (r"^bert_base_squad$|^electra.*384", "own:bert_base_squad"),
    (r"^bert_large_squad$|^bert$", "own:bert_large_squad"),
    (r"^bert[ _-]*(large)?[ _-]*128$", "own:bert_large_128"),
    (r"^bert[ _-]*(large)?[ _-]*512$|^bert_large$", "own:bert_large_512"),
    (r"^bert-large-pretrain", "own:bert_large_packed"),
    (r"^biobert", "own:bert_base_128"),
    (r"^transformer-?_?xl[ _-]*(base)?$", "own:transformerxlbase"),
    (r"^transformer-?_?xl[ _-]*large$", "own:transformerxllarge"),
    (r"^ssd[-_]?(300)?[-_]?resnet-?34", "own:ssd_resnet34"),
    (r"^ssd", "own:ssd_resnet50"),
    (r"^retinanet", "own:retinanet"),
    (r"^gpt2_large$", "own:gpt2_large"),
    (r"^gpt3_xl$", "own:gpt3_xl"),
    (r"^gpt3_27$", "own:gpt3_27"),
    (r"^opt_13$", "own:opt_13"),
    (r"^unet3d|^3d-?unet", "own:unet3d"),
    (r"^nnunet-3d", "own:nnunet3d"),
    (r"^unet_medical$", "own:unet_medical"),
    (r"^(resnet-?50|rn50|resnet50[ _-]?v1\.?5)\b", "torchvision:resnet50@{pixels}"),
    (r"^se-?resnext-?101-?32x4d", "timm:seresnext101_32x4d@{pixels}"),
    (r"^resnext-?101-?32x4d", "timm:resnext101_32x4d@{pixels}"),
    (r"^efficientnet-(widese-|quant-)?b0", "timm:efficientnet_b0@224"),
    (r"^efficientnet-(widese-|quant-)?b4", "timm:efficientnet_b4@380"),
)
# timm's older names for networks that it still has.
RENAMED = (
    (r"^swin_v2_cr", "swinv2_cr"), (r"_sam$", ""), (r"^gluon_xception", "xception"), (r"_hnfd$", "_hnf"),
    (r"_evob$", "_evos"),
)  # fmt: skip
NEEDED = ("model", "gpu", "precision", "unit", "value")
NVIDIA_CODE = ("ngc", "examples", "mlperf")
LENGTHS = {
    "own:transformerxlbase": 192, "own:transformerxllarge": 384,
    "own:transformerxlbase_full": 192, "own:transformerxllarge_full": 256,
}  # fmt: skip
PRECISIONS = (
    (r"^fp64|double", "fp64"), (r"^tf32", "tf32"), (r"^(amp|mixed).*bf16", "amp_bf16"),
    (r"^amp|mixed", "amp_fp16"), (r"^bf16", "bf16"), (r"^(fp16|half)", "fp16"),
    (r"^(fp32|float|single)", "fp32"),
)  # fmt: skip
VARIANTS = {"V100": "V100-SXM2-16GB", "A100": "A100-SXM4-40GB", "H100": "H100-SXM5-80GB"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One usable row: its demand, card, setting and measured seconds a step, with what a split
    needs to know."""

    model: str
    key: str
    demand: Demand
    gpu: Gpu
    setting: Setting
    seconds: float
    guessed_batch: bool

    @property
    def case(self) -> tuple[Demand, Gpu, Setting]:
        """For `make_columns`."""
        return self.demand, self.gpu, self.setting

    @property
    def family(self) -> str:
        """The model's family: the letters that its name begins with."""
        return family(self.key)


def family(key: str) -> str:
    """``resnet`` of ``timm:gluon_resnet50_v1d@224``: the architecture's name without its origin and size."""
    name = key.partition(":")[2].partition("@")[0]
    name = re.sub(r"^(tf|gluon|legacy|ssl|swsl|ig|jx|adv|ens|eca|ese|se|skresne|wide|dm)_+", "", name)
    return re.split(r"[\d_]", name)[0] or name


def read(path: Path, demand_of: Callable[[str], Demand | None]) -> tuple[list[Row], dict[str, int]]:
    """Usable rows, and how many were left out by reason; `demand_of` counts a key or answers None.

    Raises InputError where the file cannot be read or lacks a column without which no row can be predicted.
    """
    rows: list[Row] = []
    left_out: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a table in UTF-8") from None
    reader = csv.DictReader(lines)
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
    absent = [name for name in NEEDED if name not in reader.fieldnames]
    if lines and absent:
        raise InputError(f"{path} lacks the column {absent[0]!r}; needed are {', '.join(NEEDED)}")
    if lines:
        for raw in reader:
            try:
                rows.append(
                    _row({key: str(value or "").strip() for key, value in raw.items() if key}, demand_of)
                )
            except (LookupError, ValueError) as error:
                reason = str(error.args[0] if error.args else error)
                left_out[reason] = left_out.get(reason, 0) + 1
    return rows, left_out


def _row(raw: dict[str, str], demand_of: Callable[[str], Demand | None]) -> Row:
    task = raw.get("task", "")
    if "SUSPECT" in task or "SUSPECT" in raw.get("source", ""):
        raise ValueError("marked suspect")
    gpu = _gpu(raw["gpu"])
    value = _number(raw["value"])
    if value is None or value <= 0:
        raise ValueError("no value")
    if "fp8" in raw["precision"].lower():  # MLPerf's BERT on H100: its configurations name TransformerEngine
        raise ValueError("trained in fp8")
    num_gpus = int(_number(raw.get("n_gpus", "")) or 1)
    key = key_of(raw["model"], task)
    if key == "own:bert_large_packed" and "mlperf-v0.7" in task and num_gpus > 16:
        key = "own:bert_large_512"  # their configurations lack --unpad
    demand = demand_of(key)
    if demand is None:
        raise LookupError(f"model not counted: {raw['model']}")
    precision = _precision(raw["precision"], gpu)
    batch, guessed = _batch(raw.get("batch_per_gpu", ""), precision, num_gpus), False
    if batch is None:
        batch, guessed = likely_batch(demand, gpu, precision), True
    # Lambda's older SSD logs, those without a batch, print one GPU's rate: 8 would be slower than 1.
    alone = guessed and key == "own:ssd_resnet50" and "ngc" in task.lower()
    seconds = _seconds(raw["unit"], value, batch, 1 if alone else num_gpus, LENGTHS.get(key, 1))
    setting = _setting(task, precision, batch, num_gpus, gpu)
    if key.startswith("own:bert") and precision == "amp_fp16" and setting.harness in NVIDIA_CODE:
        setting = dataclasses.replace(setting, precision="fp16")  # apex's O2: half weights, fp32 copies
    return Row(raw["model"], key, demand, gpu, setting, seconds, guessed)


def _gpu(name: str) -> Gpu:
    short = name.partition("(")[0].strip()
    try:
        gpu = find_gpu(VARIANTS.get(short, short))
    except InputError:
        raise LookupError(f"card not in the catalogue: {name}") from None
    if gpu.elsewhere:
        raise LookupError(f"not predicted: {gpu.name}")
    return gpu


def key_of(model: str, task: str) -> str:
    """The key under which a row's model is counted: its library, name and image size."""
    found = re.search(r"(\d{2,4})\s*px", task)
    pixels = int(found.group(1)) if found else 224
    if task.startswith("infer/timm"):
        return f"timm-forward:{model}@{pixels}"
    if "timm" in task:
        for pattern, new in RENAMED:
            model = re.sub(pattern, new, model)
        return f"timm:{model}@{pixels}"
    name = model.strip().lower()
    for pattern, key in NAMES:
        if re.search(pattern, name):
            whole = "_full" if key.startswith("own:transformerxl") and "ngc" in task.lower() else ""
            return key.format(pixels=pixels) + whole
    return f"torchvision:{name.replace('-', '_')}@{pixels}"


def _precision(text: str, gpu: Gpu) -> str:
    found = next((name for pattern, name in PRECISIONS if re.search(pattern, text.lower())), None)
    if found is None:
        raise ValueError(f"precision not known: {text}")
    return "fp32" if found == "tf32" and "tf32" not in gpu.rates else found


def _batch(text: str, precision: str, num_gpus: int) -> float | None:
    """The batch of one device: of ``128 (TF) / 256 (AMP)`` and ``64 , 32`` the half precision's comes as its
    own."""
    if "global" in text:
        whole = _number(text)
        return whole / num_gpus if whole else None
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(\d+)k\b", lambda match: str(int(match.group(1)) * 1024), text)
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]
    if not numbers:
        return None
    if len(numbers) == 1:
        return numbers[0]
    return max(numbers) if precision in HALF else min(numbers)


def likely_batch(demand: Demand, gpu: Gpu, precision: str) -> float:
    """The power of two that fills about half of the card's memory: what a benchmark without a word ran."""
    width = 0.5 if precision in HALF else 1.0
    room = 0.6 * gpu.memory_bytes - 16 * demand.num_parameters
    fits = room / max(demand.saved_bytes * width, 1.0)
    return float(2 ** max(0, min(9, round(math.log2(max(fits, 1.0)) - 0.3))))


def _seconds(unit: str, value: float, batch: float, num_gpus: int, length: int) -> float:
    unit = unit.lower()
    if unit.startswith("ms"):
        return value / 1e3
    if re.match(r"s/(iter|step)", unit):
        return value
    if not re.match(r"(img|images|seq|sequences|tok|tokens|samples|volumes|items)/s", unit):
        raise ValueError(f"unit not known: {unit}")
    samples = batch * (1 if unit.endswith("/gpu") else num_gpus)
    return samples * (length if unit.startswith("tok") else 1) / value


def _setting(task: str, precision: str, batch: float, num_gpus: int, gpu: Gpu) -> Setting:
    lower = task.lower()
    version = re.search(r"pytorch-(\d+\.\d+)", lower)
    round_ = re.search(r"mlperf-v(\d\.\d)", lower)
    year = RELEASES.get(version.group(1), 2024.8) if version else 2022.5
    year = ROUNDS.get(round_.group(1), 2024.4) if round_ else year
    harness = next((name for mark, name in HARNESS_MARKS if mark in lower), "other")
    if "no-optimizer" in lower:
        year = NO_VERSION
    month = int(gpu.release[:4]) + (int(gpu.release[5:]) - 1) / 12
    year = max(year, month)  # no figure is older than its card
    framework = next((name for name in ("tensorflow", "mxnet") if name in lower), "pytorch")
    if not re.search("pytorch|tensorflow|mxnet", lower):
        framework = "other"
    fast_layout = harness == "mlperf" or framework == "mxnet"
    return Setting(
        precision=precision,
        batch_size=batch,
        num_gpus=num_gpus,
        channels_last="nhwc" in lower or (fast_layout and "nchw" not in lower),
        updates="fwd+bwd" not in lower and harness != "forward",
        framework=framework,
        harness=harness,
        year=year,
        data_parallel="dataparallel" in lower.replace("distributeddataparallel", ""),
    )


def _number(text: str) -> float | None:
    found = re.search(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", text.replace(",", ""))
    return float(found.group()) if found else None
