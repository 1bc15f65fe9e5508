"""What the techniques that compute in half precision share: their condition, proof and prediction."""

from __future__ import annotations

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build


def require_bfloat16(build: Build) -> None:
    """Raise Refused where no weight is float32, or the GPU has no bfloat16 units."""
    import torch

    from vivace.surgery import has_float32

    build.require(has_float32(build.models), "no weight is float32")
    if build.device.type == "cuda":
        build.require(
            torch.cuda.get_device_capability(build.device) >= (8, 0),
            "this GPU has no bfloat16 units (they came with compute capability 8.0): try fp16_autocast",
        )


def share_in(dtype: str, seen: Observation) -> str:
    """The share of matrix and convolution inputs that were `dtype`. Raises Refused where none was."""
    count = seen.dtypes.get(dtype, 0)
    if not count:
        raise Refused(f"it changed nothing: no matrix product or convolution ran in {dtype}")
    return f"{count} of {sum(seen.dtypes.values())} matrix and convolution inputs in {dtype}"


def bfloat16_gain(profile: Profile, machine: Machine, casts: float) -> tuple[float, float]:
    """Products at up to 4x (with AMX 8x), memory traffic at up to 2x; without hardware only slower.

    At worst the products take half as long and the rest `casts` of its time.
    """
    shares = profile.operator_shares
    products = sum(shares.get(name, 0.0) for name in ("matmul", "convolution", "attention", "recurrent"))
    device = machine.device
    if device.kind == "cpu" and not {"avx512_bf16", "amx_bf16", "bf16"} & set(device.features):
        return (1 / (1 + 4 * products), 1.0)
    faster, rest = (8 if "amx_bf16" in device.features else 4), 1 - products
    return (1 / (1 + 0.5 * products + casts * rest), 1 / (products / faster + rest / 2))
