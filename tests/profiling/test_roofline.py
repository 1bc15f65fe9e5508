from vivace.profiling import pictures
from vivace.profiling.roofline import bound_of, roofline

CEILINGS = {"matmul_fp32": 100.0, "matmul_bf16": 400.0, "convolution_fp32_nhwc": 200.0, "copy_device": 10.0}
WORK = {
    "matmul": {"flops": 1000, "bytes": 10, "count": 2},
    "convolution": {"flops": 1000, "bytes": 100, "count": 1},
    "elementwise": {"flops": 0, "bytes": 50, "count": 5},
}
SECONDS = {"matmul": 20.0, "convolution": 10.0, "elementwise": 10.0}
SIZES = {"matmul:4": 1000, "convolution:4": 1000}


def test_each_class_is_bounded_by_the_slower_of_its_operations_and_bytes():
    rows = {row.operator: row for row in roofline(WORK, SECONDS, SIZES, CEILINGS)}
    assert (rows["matmul"].bound_seconds, rows["matmul"].bound_by) == (10.0, "compute")
    assert (rows["convolution"].bound_seconds, rows["convolution"].bound_by) == (10.0, "memory")
    assert (rows["elementwise"].bound_seconds, rows["elementwise"].bound_by) == (5.0, "memory")
    assert rows["matmul"].share == 0.5
    assert bound_of(list(rows.values())) == 25.0


def test_what_is_faster_than_its_ceiling_has_no_share_and_makes_the_limit_no_slower():
    rows = {row.operator: row for row in roofline(WORK, {**SECONDS, "elementwise": 4.0}, SIZES, CEILINGS)}
    assert rows["elementwise"].share is None
    assert rows["convolution"].share == 1.0
    assert bound_of(list(rows.values())) == 24.0


def test_sixteen_bit_numbers_have_their_own_ceiling():
    rows = roofline(WORK, SECONDS, {"matmul:2": 1000}, CEILINGS)
    assert next(row for row in rows if row.operator == "matmul").bound_seconds == 2.5


def test_float16_and_tf32_have_theirs():
    ceilings = {"matmul_fp16": 50.0, "matmul_tf32": 800.0, "copy_device": 1e3}
    work, seconds = {"matmul": WORK["matmul"]}, {"matmul": 20.0}
    (row,) = roofline(work, seconds, {"matmul:2": 1000}, ceilings, "fp16")
    assert row.bound_seconds == 20.0
    (row,) = roofline(work, seconds, {"matmul:4": 1000}, ceilings, tf32=["matmul"])
    assert row.bound_seconds == 1.25


def test_without_a_ceiling_there_is_no_bound():
    rows = roofline(WORK, SECONDS, SIZES, {"matmul_fp32": 100.0})
    assert bound_of(rows) is None
    assert next(row for row in rows if row.operator == "elementwise").bound_by == "not measured"


def test_operators_that_took_time_without_counted_work_are_shown():
    rows = roofline({}, {"other": 3.0}, {}, CEILINGS)
    assert [(row.operator, row.seconds) for row in rows] == [("other", 3.0)]
    assert bound_of(rows) is None


def drawn(precision):
    row = {"operator": "matmul", "flops": 1e12, "bytes": 1e9, "seconds": 0.1}
    ceilings = {"matmul_fp32": 2e13, "matmul_tf32": 9e13, "copy_device": 1e12}
    document = {"machine": {"ceilings": ceilings}, "work": {"precision": precision}, "roofline": [row]}
    return str(pictures.roofline(document))


def test_the_roof_is_that_of_the_steps_precision():
    assert "matmul tf32 90.0 TFLOP/s" in drawn("tf32")
    assert "tf32" not in drawn("float32")


def test_a_peak_outside_of_all_operators_is_told_without_one():
    at = {"seconds": 1e-3, "phase": "data", "operator": None, "module": None}
    memory = {"curve": [[0.0, 0], [1e-3, 2048]], "held_bytes": 2048, "peak_bytes": 4096, "peak_at": at}
    told = str(pictures.memory({"memory": memory, "traced_seconds": 2e-3}))
    assert "at most 4.00 KiB<" in told
    assert "4.00 KiB, in" not in told
