"""Machine: the facts under which a measurement is valid. Gathered by `vivace.inspect`; imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Device:
    """One processor that can train: its kind (``cpu`` or ``cuda``), name, memory in bytes, and features."""

    kind: str
    name: str
    memory_bytes: int
    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices (the training device first), usable cores, versions and container limits."""

    devices: tuple[Device, ...]
    num_cores: int
    versions: dict[str, str]
    limits: dict[str, Any]
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        """The device that a job trains on."""
        return self.devices[0]

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits over what changes a measurement: devices, cores and versions."""
        devices = [[d.kind, d.name, list(d.features)] for d in self.devices]
        text = json.dumps([devices, self.num_cores, self.versions], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace inspect --json`` prints."""
        return {**dataclasses.asdict(self), "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Machine:
        """Rebuild a Machine from `to_dict`'s document."""
        fields = {key: value for key, value in document.items() if key != "fingerprint"}
        devices = tuple(Device(**{**d, "features": tuple(d["features"])}) for d in fields.pop("devices"))
        return cls(devices=devices, **{**fields, "missing": tuple(fields.get("missing", ()))})
