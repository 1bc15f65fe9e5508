"""Compile Vivace's Triton kernels ahead of time for GPUs that need not be there: what each takes of a chip.

    scripts/bench kernels [sm_80 sm_90 sm_100 sm_120 gfx942 ...]

Registers, spills and shared memory come from the assembler's own report, the width of memory accesses from
its machine code. `issue_share` is a model: of the time that an H200's memory takes for a kernel's bytes, at
the rate measured there, the share in which instructions are issued, one a clock and scheduler. Near 1 they
set the pace, and not the memory. Writes a record; exit code 1 where a kernel does not compile, or spills.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import _record

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what every Triton up to 3.9 does, said aloud
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import vivace
from vivace.techniques.fused_batchnorm.kernels import (
    batch_norm_backward,
    batch_norm_forward,
    product_forward,
    splits,
    tiles,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WIDTHS = {"64", "128", "U8", "S8", "U16", "S16"}  # of an access in NVIDIA's machine code; the others have 32
# An H200: processors by schedulers, the clock that its 989 TFLOP/s are told for, bytes/s as measured there.
ISSUED_A_SECOND, BYTES_A_SECOND = 132 * 4 * 1.83e9, 4.3e12
LANES = 32
OBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
HALF = ("x_ptr", "residual_ptr", "y_ptr", "gradient_ptr", "residual_gradient_ptr", "x_gradient_ptr")
HALF += ("again_ptr", "other_ptr", "other_gradient_ptr")
SETTINGS = {  # a ResNet's: the last BatchNorm of a block, at a width that is a multiple of 8
    "ALIGNED": True,
    "AFFINE": True,
    "TRACKED": True,
    "RESIDUAL": True,
    "ACTIVATION": "relu",
    "ROWS": tiles.TILE // 64,
    "COLUMNS": 64,
}
ALONE = dict.fromkeys(("again_ptr", "other_ptr", "other_mean_ptr", "residual_gradient_ptr"), None)
ADDED = {k: v for k, v in ALONE.items() if k != "residual_gradient_ptr"}
JOINED = {"residual_gradient_ptr": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "relu": {"RESIDUAL": False, **ALONE},
    "add_relu": ADDED,
    "add_relu_read_twice": {k: v for k, v in ADDED.items() if k != "again_ptr"},
    "two_norms_relu": JOINED | {"again_ptr": None},
    "two_norms_relu_read_twice": JOINED,
    "silu": {"RESIDUAL": False, "ACTIVATION": "silu", **ALONE},
    "odd_width": {"ALIGNED": False, **ADDED},
    "eight_channels": {  # what is absent, and a number that is one, reach a kernel as constants
        "AFFINE": False,
        "TRACKED": False,
        "RESIDUAL": False,
        "ACTIVATION": "none",
        "COLUMNS": 16,
        "ROWS": tiles.TILE // 16,
        "eighths": 1,
        "num_splits": 1,
        **ALONE,
        **dict.fromkeys(("weight_ptr", "bias_ptr", "residual_ptr", "running_mean_ptr"), None),
    },
}
PRODUCTS: dict[str, dict[str, Any]] = {  # by the columns of the result's tile and what it computes in
    "wide": {"COLUMNS": splits.MOST_COLUMNS},
    "64_channels": {"COLUMNS": 64},
    "16_channels": {"COLUMNS": 16},
    "tf32": {"COLUMNS": splits.MOST_COLUMNS, "PRECISION": "tf32"},
}
KERNELS = [
    batch_norm_forward.batch_norm_statistics,
    batch_norm_forward.batch_norm_finish,
    batch_norm_forward.batch_norm_apply,
    batch_norm_backward.batch_norm_backward_sums,
    batch_norm_backward.batch_norm_backward_finish,
    batch_norm_backward.batch_norm_backward_apply,
    product_forward.statistics_mm,
]


def main() -> int:
    """Compile every kernel in each of its variants for each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    targets = parser.parse_args().targets or list(TARGETS)
    if unknown := sorted(set(targets) - set(TARGETS)):
        parser.error(f"there is no target '{unknown[0]}'; there are: {', '.join(TARGETS)}")
    record = _record.opened("kernels", "scripts/bench kernels", vivace.inspect())
    record["versions"]["triton"] = triton.__version__
    record["kernels"] = {target: built(target) for target in targets}
    if set(targets) == set(TARGETS):  # else the whole record would give way to a part
        _record.write(record)
    bad = [
        f"{target}: {name}"
        for target, found in record["kernels"].items()
        for name, facts in found.items()
        if facts.get("error") or facts["spilled_bytes"]
    ]
    print("\n".join(["does not compile, or spills:", *bad]) if bad else "all compile, and none spills")
    return 1 if bad else 0


def built(target: str) -> dict[str, dict[str, Any]]:
    """Facts by ``kernel variant``; a variant that is a kernel's earlier one again is left out."""
    found: dict[str, dict[str, Any]] = {}
    for kernel in KERNELS:
        name, seen = kernel.__name__, list[dict[str, Any]]()
        is_product = kernel is product_forward.statistics_mm
        for label, changed in (PRODUCTS if is_product else VARIANTS).items():
            constants = {k: v for k, v in {**SETTINGS, **changed}.items() if k in kernel.arg_names}
            if is_product:
                item = 4 if constants.setdefault("PRECISION", "ieee") == "tf32" else 2
                constants["DEPTH"] = product_forward.DEPTH_BYTES // item
                constants["ROWS"], _ = splits.tile_of(constants["COLUMNS"])
            if name.endswith("finish"):
                constants |= {"COLUMNS": tiles.FINISH_COLUMNS, "SPLITS": tiles.FINISH_SPLITS}
            if constants in seen:
                continue
            seen.append(constants)
            key = f"{name} {label}"
            found[key] = facts_of(kernel, constants, target)
            print(f"{target}: {key}: {found[key]}", flush=True)
    return found


def facts_of(kernel: Any, constants: dict[str, Any], target: str) -> dict[str, Any]:
    """What one compiled kernel takes, or why it does not compile."""
    signature, attributes = {}, {}
    warps = tiles.APPLY_WARPS
    if kernel.__name__.endswith(("statistics", "sums")):
        warps = tiles.SUM_WARPS
    elif "other_mean_ptr" in kernel.arg_names and "other_mean_ptr" not in constants:
        warps = tiles.JOINED_WARPS
    half: tuple[str, ...] = HALF
    if kernel is product_forward.statistics_mm:
        warps, half = product_forward.WARPS, (*HALF, "weight_ptr")
    if constants.get("PRECISION") == "tf32":
        half = ()
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            kind = "bf16" if name in half else "u8" if name == "mask_ptr" else "fp32"
            signature[name] = f"*{kind}"
            attributes[(place,)] = [["tt.divisibility", 16]]  # what torch's allocator gives
        else:
            signature[name] = "fp32" if name in ("epsilon", "momentum") else "i32"
    try:
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
    except Exception as error:  # the next kernel must come
        return {"error": str(error).strip().splitlines()[-1][:300]}
    facts = {"shared_bytes": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    if not target.startswith("sm"):
        return facts | of_amd(compiled.asm["amdgcn"])
    modelled = target == "sm_90"  # an H200 is one
    return facts | of_nvidia(compiled.asm["cubin"], bytes_of_tile(kernel, constants) / warps * modelled)


def bytes_of_tile(kernel: Any, constants: dict[str, Any]) -> float:
    """What a tile of a large kernel reads and writes of feature maps and their masks; 0 for other kernels."""
    absent = {name for name, value in constants.items() if value is None}
    absent |= set() if constants.get("RESIDUAL", True) else {"residual_ptr"}
    absent |= {"other_gradient_ptr"} if "other_ptr" in absent else set()
    maps = [name for name in kernel.arg_names if name in HALF and name not in absent]
    masked = "mask_ptr" in kernel.arg_names and constants["ACTIVATION"].startswith("relu")
    is_large = maps and kernel is not product_forward.statistics_mm
    return tiles.TILE * (2 * len(maps) + masked / 8) if is_large else 0.0


def of_nvidia(cubin: bytes, moved: float) -> dict[str, Any]:
    """Registers, local memory (where spills go), and how many global accesses of each width there are.

    Where a warp moves so many bytes of a tile, and not 0, also `issue_share`.
    """
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        usage, code = (
            subprocess.run([OBJDUMP, option, binary], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    every = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", code)]
    jumps = [(at, re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)) for at, text in every]
    loops = [range(int(to[1], 16), at + 1) for at, to in jumps if to and int(to[1], 16) < at]
    whole, looped = [text for _, text in every], [t for at, t in every if any(at in loop for loop in loops)]
    found = {
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "barriers_in_loops": sum("BAR.SYNC" in text for text in looped),
        "spilled_bytes": int(re.findall(r"STACK:(\d+)", usage)[-1]),
        "accesses_by_bits": dict(sorted(_accesses(whole).items())),
    }
    if moved:
        # A loop may do several tiles at a turn; what belongs to channels is read outside of it.
        again = sum(int(re.sub(r"\D", "", key)) / 8 * LANES * n for key, n in _accesses(looped).items())
        issued = len(looped if again else [text for text in whole if "NOP" not in text])
        share = issued / ISSUED_A_SECOND * BYTES_A_SECOND / (again or moved)
        found["issue_share"] = round(share, 2)
    return found


def _accesses(lines: Iterable[str]) -> collections.Counter[str]:
    """Global accesses by kind and bits."""
    found = re.findall(r"\b(LDGSTS|LDG|STG)\.E((?:\.\w+)*)", "\n".join(lines))  # the first into shared memory
    bits = [(kind, WIDTHS.intersection(options.split("."))) for kind, options in found]
    return collections.Counter(f"{kind}{min(one).lstrip('US') if one else 32}" for kind, one in bits)


def of_amd(code: str) -> dict[str, Any]:
    """Vector and scalar registers, spills, and global accesses by width, from the assembly."""
    numbers = {k: int(v) for k, v in re.findall(r"\.(\w+_count):\s+(\d+)", code)}
    sizes = {"dwordx4": 128, "dwordx2": 64, "dwordx3": 96, "dword": 32, "ushort": 16, "short": 16}
    sizes |= {"short_d16": 16, "short_d16_hi": 16, "ubyte": 8, "byte": 8, "sbyte": 8}
    sizes |= {"ubyte_d16": 8, "ubyte_d16_hi": 8}
    widths = collections.Counter(
        f"{'LDG' if kind == 'load' else 'STG'}{sizes.get(width, width)}"
        for kind, width in re.findall(r"(?:global|buffer)_(load|store)_(\w+)", code)
    )
    return {
        "registers": numbers["vgpr_count"],
        "scalar_registers": numbers["sgpr_count"],
        "spilled_bytes": 4 * numbers["vgpr_spill_count"] + 4 * numbers["sgpr_spill_count"],
        "accesses_by_bits": dict(sorted(widths.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
