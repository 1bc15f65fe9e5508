"""What a gauge is, and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

Reading: TypeAlias = Callable[[], float]
"""Measures once, and returns the rate (or the seconds, for a key named so)."""


class Unmeasured(Exception):
    """This gauge cannot be read here; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Gauge:
    """One key and how to get ready for it: allocate, choose the size, warm up."""

    key: str
    prepare: Callable[[], Reading]
