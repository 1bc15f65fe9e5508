"""Page-locked memory of the host, which a GPU copies from and to while it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vivace.errors import NoPageLockedMemory, ran_out_of_memory


@contextlib.contextmanager
def page_locking() -> Iterator[None]:
    """Where the host has no such memory left, NoPageLockedMemory says so: CUDA's error reads as the GPU's."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        raise NoPageLockedMemory("the host has no memory left that can be page-locked") from error
