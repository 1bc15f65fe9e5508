"""Searches time and verify as shortly as what is planted in their jobs needs to show; for one process."""

from vivace.measuring import paired
from vivace.profiling import ranks_drive
from vivace.tuning import bench, times


def hurry(put=setattr):
    """``put(owner, name, value)`` sets each part: in all of the process, or as long as a test lasts."""
    opened = paired.Contestant.open

    def opening(self, plan, *, warm_seconds=1.0, **more):
        opened(self, plan, warm_seconds=min(0.2, warm_seconds), **more)

    for module in (paired, times, ranks_drive):
        put(module, "BLOCK_SECONDS", 0.1)
    put(paired.Contestant, "open", opening)
    put(times.Times, "comparing", lambda self, plan, left: 1.0)
    put(times.Times, "ruling", lambda self: 3.0)
    put(bench, "LAW_SECONDS", 0.5)
