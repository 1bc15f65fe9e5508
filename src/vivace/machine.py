"""Machine: the facts under which a measurement is valid. Gathered by `vivace.inspect`; imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from vivace import words
from vivace.pages.answer import Answer

CONTEXT_BYTES = 600 * 2**20  # of a process on a GPU beside its tensors: an allowance, not measured here
DRIVER_SHARE = 0.03  # of a card's nominal memory, which the driver keeps
TRAINED_ON = ("cuda", "cpu")  # kinds of devices; ROCm's are called cuda too
NOT_YET = {  # kinds that torch can train on
    "xpu": "Vivace does not train on Intel GPUs yet",
    "mps": "Vivace does not train on Apple GPUs yet",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """One processor: its kind as torch calls it, name, memory in bytes (0: unknown), and features.

    `served` is false where no job can train on it; a `Finding` says why. `state` holds what
    may change while the machine runs, such as a power limit, and is no part of the fingerprint.
    """

    kind: str
    name: str
    memory_bytes: int
    features: tuple[str, ...] = ()
    served: bool = True
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to reach devices (``cuda``, ``opencl``, ...): which it reaches, or why none."""

    name: str
    devices: tuple[str, ...] = ()
    version: str = ""
    torch: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Link:
    """How two GPUs reach each other: their places among those that a process sees, and by what."""

    first: int
    second: int
    by: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that keeps a device from training, or slows it down, and the next step."""

    problem: str
    next: str


def trained_first(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Those that torch trains on before the others, else in their order."""
    return tuple(sorted(devices, key=lambda device: not (device.served and device.kind in TRAINED_ON)))


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices (the training device first), usable cores, versions and container limits."""

    devices: tuple[Device, ...]
    num_cores: int
    versions: dict[str, str]
    limits: dict[str, Any]
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)
    missing: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    backends: tuple[Backend, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def device(self) -> Device:
        """The device that a job trains on."""
        return self.devices[0]

    @property
    def passed_over(self) -> str:
        """Why a job trains on the processor although there is a GPU; empty where there is nothing to say."""
        idle = [device for device in self.devices if device.kind != "cpu"]
        if self.device.kind != "cpu" or not idle:
            return ""
        if idle[0].kind in NOT_YET:
            return f"{NOT_YET[idle[0].kind]}; it uses the processor"
        why = f": {self.findings[0].problem}" if self.findings and not idle[0].served else ""
        return f"training on the processor, not on the {idle[0].name}{why} (vivace inspect says more)"

    @property
    def idle_gpu(self) -> str:
        """What is to be said of a script that trains on the processor; empty where there is no GPU."""
        if self.device.kind == "cpu":
            return self.passed_over
        return (
            f"the script trains on the processor, not on the {self.device.name}: it puts neither model nor "
            "batches there"
        )

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits over what changes a measurement: devices, cores and versions."""
        devices = [[d.kind, d.name, list(d.features)] for d in self.devices]
        text = json.dumps([devices, self.num_cores, self.versions], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def measured_as(self) -> str:
        """The fingerprint under which its measured ceilings are kept: of the device that a job trains on and
        the processor, as other GPUs, shown or hidden, do not change them.
        """
        processors = (device for device in self.devices[1:] if device.kind == "cpu")
        return dataclasses.replace(self, devices=(self.device, *processors)).fingerprint

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from vivace.pages.render import card  # only then: a template engine

        device = self.device
        memory = [("of the device", words.size(device.memory_bytes))] if device.memory_bytes else []
        answer = Answer(
            command="inspect",
            subject=self.fingerprint,
            sentence=f"{device.name}, on which jobs train ({device.kind})",
            tone="open" if self.findings else "plain",
            title_of_parts="Other devices",
            parts=tuple((other.kind, other.name) for other in self.devices[1:]),
            notes=tuple(f"{found.problem}; next: {found.next}" for found in self.findings) + self.missing,
            facts=(*memory, ("cores", str(self.num_cores)), *self.versions.items()),
        )
        return card(answer)

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace inspect --json`` prints."""
        return {**dataclasses.asdict(self), "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Machine:
        """Rebuild a Machine from `to_dict`'s document."""
        fields = {key: value for key, value in document.items() if key != "fingerprint"}
        kinds = {"devices": Device, "findings": Finding, "backends": Backend, "links": Link}
        for name, kind in kinds.items():
            fields[name] = tuple(kind(**_with_tuples(entry)) for entry in fields.get(name, ()))
        return cls(**{**fields, "missing": tuple(fields.get("missing", ()))})


def _with_tuples(entry: dict[str, Any]) -> dict[str, Any]:
    """`entry` as a frozen dataclass takes it: JSON knows lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
