"""Waiting for pipes and sockets, whatever the numbers of their descriptors are.

`select.select` takes none above 1023, and a person's process may have thousands of files open.
"""

from __future__ import annotations

import select
from collections.abc import Iterable

_MOST_MILLISECONDS = 2**31 - 1  # which the kernel takes


def ready(reads: Iterable[int], writes: Iterable[int] = (), seconds: float | None = None) -> set[int]:
    """The descriptors that can be read from, or written to, or whose other end is closed; none where that
    takes longer than `seconds`, or 24 days. With None it waits until there is one.
    """
    poll = select.poll()
    for descriptor in reads:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writes:
        poll.register(descriptor, select.POLLOUT)
    return {found for found, _ in poll.poll(None if seconds is None else _milliseconds(seconds))}


def is_closed(descriptor: int) -> bool:
    """Is the other end of a socket closed, as it is once its process has died?"""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _milliseconds(seconds: float) -> float:
    return min(1000.0 * seconds, _MOST_MILLISECONDS)
