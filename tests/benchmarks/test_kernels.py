"""What compilers make of the Triton kernels for a GPU that need not be there: registers, spills, accesses."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Registers of a thread that leave room for that many programs on a processor's 65,536; and see
# `tiles.GRADIENT_PROGRAMS`. Rows of a width that is no multiple of eight are read number by number.
MOST_REGISTERS = {
    "batch_norm_statistics": 64,
    "batch_norm_apply": 102,
    "batch_norm_backward_sums": 128,
    "batch_norm_backward_apply": 112,
    "statistics_mm": 255,  # one program: its numbers on the way hide what memory takes
}
# On newer chips three programs of the statistics fit, not four.
MORE_REGISTERS = {"sm_100": {"batch_norm_statistics": 80}, "sm_120": {"batch_norm_statistics": 72}}
# In a loop: for the inputs in shared memory, and the result's way out, on sm_100 through a memory of its own.
BARRIERS = {"sm_100": 55}
PRODUCT_BARRIERS = 6
LENT = "sm_90"  # all variants are compiled for it, and for the others those that need most, and the plainest
MOST_DEMANDING = {"two_norms_relu_read_twice", "silu", "eight_channels"}
MOST_ISSUED = 0.95  # of the time that an H200's memory takes; beyond, instructions would set the pace


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_kernels_keep_to_what_a_processor_has(monkeypatch, target):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kernels

    wanted = [kernel for kernel in kernels.KERNELS if kernel.__name__ in MOST_REGISTERS]
    monkeypatch.setattr(kernels, "KERNELS", wanted)
    monkeypatch.delitem(kernels.VARIANTS, "odd_width")
    for label in set(kernels.VARIANTS) - MOST_DEMANDING if target != LENT else ():
        monkeypatch.delitem(kernels.VARIANTS, label)
    found = kernels.built(target)
    for name in ("kernels", "_record"):
        sys.modules.pop(name, None)
    assert "batch_norm_backward_sums two_norms_relu_read_twice" in found
    most = MOST_REGISTERS | MORE_REGISTERS.get(target, {})
    for name, facts in found.items():
        kernel = name.partition(" ")[0]
        assert "error" not in facts, (name, facts)
        assert facts["spilled_bytes"] == 0, (name, facts)
        assert facts["registers"] <= most[kernel], (name, facts)
        bits = set(facts["accesses_by_bits"])
        if kernel == "statistics_mm":
            assert {"LDG128"} <= bits or {"LDGSTS128", "STG128"} <= bits, (name, facts)
            assert facts.get("barriers_in_loops", 0) <= BARRIERS.get(target, PRODUCT_BARRIERS), (name, facts)
            continue
        assert not facts.get("barriers_in_loops"), (name, facts)
        assert facts.get("issue_share", 0) <= MOST_ISSUED, (name, facts)
        wide = {"LDG128"} | ({"STG128"} if "apply" in name else set())
        # Bits of masks and numbers of a channel are the only others.
        assert wide <= bits <= {"LDG128", "STG128", "LDG8", "STG8", "STG32"}, (name, facts)
