"""A Machine as a table for the terminal."""

from __future__ import annotations

from typing import Any

from vivace.machine import Machine


def human_bytes(count: float) -> str:
    """Bytes with a binary unit and three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def draw(machine: Machine, console: Any) -> None:
    """Print devices, versions, limits and what is missing."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for device in machine.devices:
        features = f" ({' '.join(device.features)})" if device.features else ""
        table.add_row(device.kind, f"{device.name}, {human_bytes(device.memory_bytes)}{features}")
    table.add_row("cores", str(machine.num_cores))
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    for name, value in machine.limits.items():
        words = name.removesuffix("_bytes").replace("_", " ")
        table.add_row(words, human_bytes(value) if name.endswith("_bytes") else str(value))
    for reason in machine.missing:
        table.add_row("missing", reason)
    table.add_row("fingerprint", machine.fingerprint)
    console.print(table)
