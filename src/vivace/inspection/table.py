"""A Machine as tables for the terminal, in human units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vivace import words
from vivace.inspection.ceilings import Survey
from vivace.machine import NOT_YET, Machine

if TYPE_CHECKING:
    from rich.console import Console

API_KEYS = ("copy_device", "matmul_fp32", "matmul_fp16", "matmul_int8")


def unit_of(key: str) -> str:
    """The SI unit of a ceiling."""
    if key.startswith(("matmul", "convolution")):
        return "op/s" if key.endswith("int8") else "FLOP/s"
    return {"launch_seconds": "s", "jpeg_decode_per_core": "images/s"}.get(key, "B/s")


def ceiling_in_words(key: str, value: float) -> str:
    """A ceiling with its unit, such as ``768 TFLOP/s`` or ``1.70 µs``."""
    unit = unit_of(key)
    if unit == "s":
        return words.duration(value)
    if unit == "images/s":
        return f"{words.number(value)} {unit}"
    return words.quantity(value, unit)


def facts_of(survey: Survey, figures: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Each ceiling with its unit, spread, readings, date, and the vendor's figure with the share reached."""
    found = {}
    for key, ceiling in survey.ceilings.items():
        figure = figures.get(key)
        found[key] = {
            "value": ceiling.value,
            "unit": unit_of(key),
            "spread": ceiling.spread,
            "num_readings": ceiling.num_readings,
            "measured_at": ceiling.measured_at,
            "vendor": figure,
            "share": ceiling.value / figure if figure else None,
        }
    return found


def draw(machine: Machine, console: Console) -> None:
    """Print devices, what serves them, versions, limits, what is missing and what to do next."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(machine):
        table.add_row(name, text.replace("[", r"\["))
    console.print(table)
    for finding in machine.findings:
        console.print(f"\n{finding.problem}", style="bold yellow", markup=False, soft_wrap=True)
        console.print(f"  next: {finding.next}", markup=False, soft_wrap=True)


def draw_ceilings(device: str, survey: Survey, figures: dict[str, float], console: Console) -> None:
    """Print the measured ceilings of a device, each beside the vendor's figure, and what is absent."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("ceiling", no_wrap=True)
    for title in ("measured", "spread", "vendor", "reached"):
        table.add_column(title, justify="right", no_wrap=True)
    for key, fact in facts_of(survey, figures).items():
        vendor, share = fact["vendor"], fact["share"]
        table.add_row(
            key.replace("_", " ").removesuffix(" seconds"),
            ceiling_in_words(key, fact["value"]),
            words.percent(fact["spread"]),
            ceiling_in_words(key, vendor) if vendor else "",
            words.percent(share) if share else "",
        )
    dates = {ceiling.measured_at for ceiling in survey.ceilings.values()}
    if dates:
        console.print(f"\n{device}, measured {max(dates)}", style="bold", markup=False)
        console.print(table)
    for key, reason in survey.absent.items():
        what = "not stored" if key in ("store", "steady") else f"not measured: {key.replace('_', ' ')}"
        console.print(f"{what}: {reason}", style="dim", markup=False, soft_wrap=True)


def draw_apis(
    surveys: dict[str, Survey], of_torch: dict[str, Survey], next_steps: dict[str, str], console: Any
) -> None:
    """Print what each compute API reaches beside torch, and of those that reach nothing the next step."""
    from rich.table import Table

    columns = {f"torch: {kind}": survey for kind, survey in of_torch.items()} | surveys
    if surveys:
        table = Table(box=None, pad_edge=False)
        table.add_column("through", overflow="fold")
        keys = [key for key in API_KEYS if any(key in survey.ceilings for survey in surveys.values())]
        for key in keys:
            table.add_column(key.replace("_", " "), justify="right")
        for name, survey in columns.items():
            held = survey.ceilings
            cells = [ceiling_in_words(key, held[key].value) if key in held else "" for key in keys]
            table.add_row(name.replace("[", r"\["), *cells)
        console.print(
            "\nwhat each compute API reaches (a small kernel; torch has its vendor's library)", style="bold"
        )
        console.print(table)
    for name, survey in surveys.items():
        for key, reason in survey.absent.items():
            console.print(f"not measured: {name}, {key}: {reason}", style="dim", markup=False, soft_wrap=True)
    for name, text in next_steps.items():
        console.print(f"through {name} nothing: {text}", style="dim", markup=False, soft_wrap=True)


def _rows(machine: Machine) -> Iterator[tuple[str, str]]:
    for device in machine.devices:
        parts = [device.name, words.size(device.memory_bytes) if device.memory_bytes else ""]
        features = f" ({' '.join(device.features)})" if device.features else ""
        unserved = "" if device.served else f"; {NOT_YET.get(device.kind, 'torch cannot train on it')}"
        yield device.kind, ", ".join(filter(None, parts)) + features + unserved
        state = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in device.state.items())
        if state:
            yield "", state
    for link in machine.links:
        yield "link", f"GPU {link.first} and GPU {link.second}: {link.by}"
    for backend in machine.backends:
        what = ", ".join(backend.devices) or backend.reason
        notes = [backend.version, "torch trains on it" if backend.torch else "", backend.reason]
        told = "; ".join(note for note in notes if note and note != what)
        yield f"by {backend.name}", " - ".join(filter(None, (what, told)))
    yield "cores", str(machine.num_cores)
    yield "versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    for name, value in machine.limits.items():
        title = name.removesuffix("_bytes").replace("_", " ")
        yield title, words.size(value) if name.endswith("_bytes") else str(value)
    for reason in machine.missing:
        yield "missing", reason
    yield "fingerprint", machine.fingerprint
