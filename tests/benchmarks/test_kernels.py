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
BARRIERS = {"statistics_mm": 6}  # in a loop: for the inputs in shared memory, and the result's way out


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_kernels_keep_to_what_a_processor_has(monkeypatch, target):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kernels

    wanted = [kernel for kernel in kernels.KERNELS if kernel.__name__ in MOST_REGISTERS]
    monkeypatch.setattr(kernels, "KERNELS", wanted)
    found = {k: v for k, v in kernels.built(target).items() if "odd_width" not in k}
    for name in ("kernels", "_record"):
        sys.modules.pop(name, None)
    assert "batch_norm_backward_sums two_norms_relu_read_twice" in found
    for name, facts in found.items():
        assert "error" not in facts, (name, facts)
        assert facts["spilled_bytes"] == 0, (name, facts)
        assert facts["registers"] <= MOST_REGISTERS[name.partition(" ")[0]], (name, facts)
        assert facts["barriers_in_loops"] <= BARRIERS.get(name.partition(" ")[0], 0), (name, facts)
        if name.startswith("statistics_mm"):
            assert {"LDGSTS128", "STG128"} <= set(facts["accesses_by_bits"]), (name, facts)
            continue
        wide = {"LDG128"} | ({"STG128"} if "apply" in name else set())
        assert wide <= set(facts["accesses_by_bits"]), (name, facts)
        # Bits of masks and numbers of a channel are the only others.
        assert set(facts["accesses_by_bits"]) <= {"LDG128", "STG128", "LDG8", "STG8", "STG32"}, (name, facts)
