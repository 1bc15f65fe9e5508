"""A Machine as tables for the terminal, in human units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vivace.inspection.ceilings import Survey
from vivace.machine import Machine

SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def human_bytes(count: float) -> str:
    """Bytes with a binary unit and three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:  # three digits
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def unit_of(key: str) -> str:
    """The SI unit of a ceiling."""
    if key.startswith(("matmul", "convolution")):
        return "op/s" if key.endswith("int8") else "FLOP/s"
    return {"launch_seconds": "s", "jpeg_decode_per_core": "images/s"}.get(key, "B/s")


def human_ceiling(key: str, value: float) -> str:
    """A ceiling with three digits and its unit, such as ``768 TFLOP/s`` or ``1.7 µs``."""
    unit = unit_of(key)
    if unit == "s":
        return f"{value * 1e6:.3g} µs"
    if unit == "images/s":
        return f"{value:.0f} {unit}"
    scale, prefix = next(((s, p) for s, p in SCALES if value >= s), (1.0, ""))
    return f"{value / scale:.3g} {prefix}{unit}"


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


def draw(machine: Machine, console: Any) -> None:
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


def draw_ceilings(device: str, survey: Survey, figures: dict[str, float], console: Any) -> None:
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
            human_ceiling(key, fact["value"]),
            f"{fact['spread']:.1%}",
            human_ceiling(key, vendor) if vendor else "",
            f"{share:.0%}" if share else "",
        )
    dates = {ceiling.measured_at for ceiling in survey.ceilings.values()}
    if dates:
        console.print(f"\n{device}, measured {max(dates)}", style="bold", markup=False)
        console.print(table)
    for key, reason in survey.absent.items():
        console.print(
            f"not measured: {key.replace('_', ' ')}: {reason}", style="dim", markup=False, soft_wrap=True
        )


def _rows(machine: Machine) -> Iterator[tuple[str, str]]:
    for device in machine.devices:
        parts = [device.name, human_bytes(device.memory_bytes) if device.memory_bytes else ""]
        features = f" ({' '.join(device.features)})" if device.features else ""
        served = "" if device.served else "; torch cannot train on it"
        yield device.kind, ", ".join(filter(None, parts)) + features + served
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
        words = name.removesuffix("_bytes").replace("_", " ")
        yield words, human_bytes(value) if name.endswith("_bytes") else str(value)
    for reason in machine.missing:
        yield "missing", reason
    yield "fingerprint", machine.fingerprint
