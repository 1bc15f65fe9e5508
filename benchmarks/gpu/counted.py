"""Bytes, operations and bounds of the waterfall's networks, counted in a child process on meta tensors."""

from __future__ import annotations

from typing import Any

import torch
from cnn_jobs import BUILDERS, SIZE, UNET_SIZE
from traffic import traffic

from vivace.job import Job

COUNTED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Counted:
    """Serves `vivace.processes.launch.Child`."""

    def __init__(self, job: Job, dry: bool) -> None:
        self.dry = dry

    def traffic(self, name: str, bandwidth: float, rates: dict[str, float]) -> dict[str, Any]:
        """Bytes and operations of one image, and the bound in images/s, by dtype and by whether BatchNorm is
        fused, and 1x1 convolutions leave its statistics; `rates` are operations/s by dtype.
        """
        size = UNET_SIZE if name == "unet" else SIZE
        size, batch = (64, 2) if self.dry else (size, 64)
        found = {}
        for dtype, kind in COUNTED.items():
            for way in ("", " fused", *([" products"] if kind == torch.bfloat16 else [])):
                how: Any = {"fused": bool(way), "products": way == " products"}
                counted = traffic(BUILDERS[name], size, kind, batch=batch, **how)
                found[f"{dtype}{way}"] = {
                    "bytes": counted.bytes,
                    "flops": counted.flops,
                    "bound": counted.bound(bandwidth, rates[dtype]),
                }
        return found
