"""Private names of process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from vivace.torch_internals import attribute, later

_number = attribute(
    dist.ProcessGroup,
    "_get_sequence_number_for_group",
    lost="it is not seen which rank is behind in a step that hangs",
)


def num_exchanges() -> int:
    """How many exchanges this rank has begun in the group of all ranks; 0 without one."""
    group = dist.group.WORLD
    return int(_number(group)()) if group is not None else 0


_default_store = later(
    "torch.distributed.distributed_c10d._get_default_store",
    lost="several processes that a script trains in are left as they are",
)


def default_store() -> Any:
    """The store by which the script's processes found each other. Raises Refused where torch has none."""
    return _default_store()()
