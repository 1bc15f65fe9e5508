"""The answer of `vivace export`: what its model card opens with, and what the command ends with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivace import words
from vivace.events import metric_title
from vivace.exporting.result import Exported
from vivace.pages.answer import Answer, capital
from vivace.serving.forms import form_named
from vivace.serving.serve import PRECISIONS
from vivace.serving.use import unjudged

# With the file, the inputs by their order and by their names, and OpenVINO's number format. What is compiled
# ahead of time reads numbers as they lie, whatever a tensor's strides say.
CALLS = {
    "onnx": 'onnxruntime.InferenceSession("{file}").run(None, {{{named}}})',
    "openvino": 'openvino.Core().compile_model("{file}", "CPU", {{"INFERENCE_PRECISION_HINT": "{hint}"}})'
    "({{{named}}})",
    "torch": 'torch.export.load("{file}").module()({inputs})',
    "aoti": 'torch._inductor.aoti_load_package("{file}")({contiguous})',
    "inductor": 'with torch.no_grad(): torch.compile(torch.export.load("{file}").module())({inputs})',
}
FROZEN = "torch._inductor.config.freezing = True"  # without it what is compiled packs no weights
INT8 = "import torch.ao.quantization.fx._decomposed"  # without it no program that quantizes is loaded

RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO", "aoti": "AOTInductor", "torch": "PyTorch"}
COLUMNS = ("Output or layer", "Envelopes", "Largest difference", "")


def rows(found: Exported) -> list[list[str]]:
    """Every output and every layer that was compared, as the page has them."""
    return [
        [
            str(check["output"]),
            words.number(check["envelopes"]),
            words.number(check["largest"]),
            str(check["problem"] or ("" if check["kept"] else "not the model's")),
        ]
        for check in (*found.checks, *found.layers["checks"])
    ]


def answer(found: Exported) -> Answer:
    """Is the file the model, and how is it called?"""
    file = Path(found.file)
    num_bytes = sum(part.stat().st_size for part in file.parent.glob(f"{file.stem}.*"))
    size = f"{found.form}, {words.size(num_bytes)}" if num_bytes else ""
    runtime = RUNTIMES.get(found.runtime, found.runtime)
    sentence = "is your model" if found.kept else "is not your model"
    return Answer(
        command="export",
        subject=found.job,
        figure=Path(found.file).name,
        sentence=f"{sentence}, as {runtime} runs it ({size or found.form})",
        tone="good" if found.kept else "bad",
        same=_same(found),
        same_kept=found.kept,
        title_of_parts="How it is called, and how near it is",
        parts=(
            *_call(found),
            *_inputs(found),
            ("its outputs", _outputs(found.checks)),
            ("its layers", _layers(found.layers)),
        ),
        notes=(*found.notes, *filter(None, [unjudged(found.checks, found.unused) if found.kept else ""])),
        facts=tuple(_facts(found)),
        date=found.date,
        page=found.page_path,
    )


def _same(found: Exported) -> str:
    sizes = f"{found.samples:,} of your samples, in batches of {min(found.batches)} to {max(found.batches)}"
    if not found.kept:
        return f"Same model: no. {capital(found.reason)} ({sizes})"
    if found.change is None:
        return f"Same model: yes, to rounding. A fresh process without your code answered {sizes}"
    change = found.change
    return (
        f"Same {metric_title(found.trained)}: yes, within {words.number(change['margin'])}. "
        f"{words.number(change['value'])} instead of {words.number(change['reference'])} in a fresh process "
        f"without your code, which also answered {sizes}"
    )


def _call(found: Exported) -> tuple[tuple[str, str], ...]:
    if not found.kept:
        return ()
    names = [one["name"] for one in found.inputs]
    own = form_named(found.form).runtime
    call = CALLS["inductor" if own == "inductor" else found.runtime].format(
        file=Path(found.file).name,
        inputs=", ".join(names),
        contiguous=", ".join(f"{name}.contiguous()" for name in names),
        named=", ".join(f'"{name}": {name}' for name in names),
        hint=PRECISIONS[found.numbers],
    )
    if own != "inductor":
        return (("call", call),)
    before = "; ".join([INT8, FROZEN] if found.numbers == "int8" else [FROZEN])
    return (("before it", before), ("call", call))


def _inputs(found: Exported) -> tuple[tuple[str, str], ...]:
    """Which input is which, and in which lengths it is taken."""
    if not found.kept:
        return ()
    told = (f"{one['name']} is {one['in_forward']} ({_shape(one['shape'])})" for one in found.inputs)
    return (("its inputs", ", ".join(told)),)


def _shape(lengths: Sequence[int | None]) -> str:
    """``any × 3 × 224``; of a single number, what it is."""
    known = ("any" if length is None else str(length) for length in lengths)
    return " \N{MULTIPLICATION SIGN} ".join(known) or "a number"


def _outputs(checks: Sequence[dict[str, Any]]) -> str:
    """How far off the worst is; the page lists all."""
    worst = max(checks, key=lambda check: math.inf if check["problem"] else check["envelopes"])
    told = _told(worst)
    return told if len(checks) == 1 else f"{len(checks)}, the worst ({worst['output']}) {told}"


def _told(check: dict[str, Any]) -> str:
    if check["problem"]:
        return str(check["problem"])
    times = words.number(check["envelopes"])
    return f"off by {times} times what rounding alone causes, {words.number(check['largest'])} at most"


def _layers(layers: dict[str, Any]) -> str:
    if layers["reason"]:
        return f"not compared: {layers['reason']}"
    compared = f"{len(layers['checks'])} of {layers['of']} stand in the file"
    known = [one["envelopes"] for one in layers["checks"] if one["envelopes"] is not None]
    if not known:
        return compared
    return f"{compared}, the worst off by {words.number(max(known))} times what rounding alone causes"


def _facts(found: Exported) -> list[tuple[str, str]]:
    trained = found.trained
    plan = " + ".join(trained["plan"]) or f"strict {trained['numbers']}"
    facts = [("trained", f"{words.count(trained['step'], 'step')}, {plan}")]
    if found.metric is not None:
        facts.append((metric_title(trained), words.number(found.metric)))
    facts += [(package, version) for package, version in found.versions.items()]
    if found.measured.get("p50"):
        calls = f"a call of {words.count(found.measured['batch'], 'sample')}"
        facts.append((calls, words.duration(found.measured["p50"])))
    return facts
