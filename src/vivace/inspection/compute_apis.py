"""What a device reaches through OpenCL, Vulkan and SYCL; run as a script: a broken driver may crash it.

    python compute_apis.py opencl|vulkan|sycl SECONDS

Prints one JSON line, ``{"devices": [{"name", "readings": {key: [rates]}, "absent": {key: reason}}],
"reason": ""}``. Keys as in `ceilings`: ``copy_device`` in bytes/s read plus written; ``matmul_fp32``,
``matmul_fp16`` (16-bit inputs, fp32 sums) and ``matmul_int8`` (int32 sums) in operations/s of a square
product by a small kernel, the fastest of a few shapes of what one work item computes. Inputs are small whole
numbers, so that each result must be exact, and is compared with numpy's before it counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy

SMALLEST_SIZE, LARGEST_SIZE = 256, 4096
ENOUGH_SECONDS = 0.02  # of one product, so that handing it over does not count
# Rows and columns of what one work item computes. Vectors of 16 end PoCL 3.0 on some processors with AVX-512.
SHAPES = ((1, 4), (4, 4), (4, 8), (8, 8))
COPY_BYTES = 128 * 2**20
READING_SECONDS = 0.05
KINDS = {"fp32": numpy.float32, "fp16": numpy.float16, "int8": numpy.int8}

OPENCL = """
#define WIDE_(type, width) type##width
#define WIDE(type, width) WIDE_(type, width)
#define CALL_(name, width) name##width
#define CALL(name, width) CALL_(name, width)

__kernel void product(__global const INPUT *left, __global const INPUT *right, __global SUM *result,
                      int size) {
    int column = get_global_id(0) * WIDTH, row = get_global_id(1) * ROWS;
    WIDE(SUM, WIDTH) sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = (WIDE(SUM, WIDTH))(0);
    for (int k = 0; k < size; k++) {
        WIDE(SUM, WIDTH) line = LOAD(right, k * size + column);
        for (int r = 0; r < ROWS; r++) sums[r] += LOAD_ONE(left, (row + r) * size + k) * line;
    }
    for (int r = 0; r < ROWS; r++) CALL(vstore, WIDTH)(sums[r], 0, result + (row + r) * size + column);
}
"""
OPENCL_KINDS = {
    "fp32": {
        "INPUT": "float",
        "SUM": "float",
        "LOAD(a, i)": "CALL(vload, WIDTH)(0, a + i)",
        "LOAD_ONE(a, i)": "a[i]",
    },
    "fp16": {
        "INPUT": "half",
        "SUM": "float",
        "LOAD(a, i)": "CALL(vload_half, WIDTH)(0, a + i)",
        "LOAD_ONE(a, i)": "vload_half(i, a)",
    },
    "int8": {
        "INPUT": "char",
        "SUM": "int",
        "LOAD(a, i)": "CALL(convert_int, WIDTH)(CALL(vload, WIDTH)(0, a + i))",
        "LOAD_ONE(a, i)": "(int)a[i]",
    },
}

FEW_BYTES = 16  # read to wait for all before: wgpu 0.32's own waiting fails with a TypeError
VULKAN_SHAPES = ((1, 4), (4, 4), (8, 4))
WGSL = """
@group(0) @binding(0) var<storage, read> left: array<{input}>;
@group(0) @binding(1) var<storage, read> right: array<vec4<{input}>>;
@group(0) @binding(2) var<storage, read_write> result: array<vec4<f32>>;

@compute @workgroup_size(8, 8)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
    let row = id.y * {rows}u;
    var sums: array<vec4<f32>, {rows}>;
    for (var k = 0u; k < {size}u; k++) {{
        let line = vec4<f32>(right[k * {quarter}u + id.x]);
        for (var r = 0u; r < {rows}u; r++) {{
            sums[r] += f32(left[(row + r) * {size}u + k]) * line;
        }}
    }}
    for (var r = 0u; r < {rows}u; r++) {{
        result[(row + r) * {quarter}u + id.x] = sums[r];
    }}
}}
"""
WGSL_KINDS = {"fp32": "f32", "fp16": "f16"}


class Wrong(Exception):
    """A result is not what it must be."""


def opencl(seconds: float) -> tuple[list[dict[str, Any]], str]:
    """The rates of every OpenCL device within `seconds` in all, and why there is none."""
    import pyopencl

    devices = [device for platform in pyopencl.get_platforms() for device in platform.get_devices()]
    found = []
    for device in devices:
        context = pyopencl.Context([device])
        queue = pyopencl.CommandQueue(context)
        jobs = {"copy_device": partial(opencl_copy, pyopencl, context, queue)}
        for kind in KINDS:
            jobs[f"matmul_{kind}"] = partial(opencl_product, pyopencl, context, queue, kind)
        found.append({"name": device.name.strip(), **measured(jobs, seconds / len(devices))})
    return found, "" if found else "its drivers name no device"


def opencl_copy(pyopencl: Any, context: Any, queue: Any) -> tuple[Callable[[], None], float]:
    """A run that copies one buffer into another, and the bytes that it reads and writes."""
    host = numpy.arange(COPY_BYTES // 4, dtype=numpy.int32)
    flags = pyopencl.mem_flags
    source = pyopencl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=host)
    target = pyopencl.Buffer(context, flags.READ_WRITE, host.nbytes)

    def run() -> None:
        pyopencl.enqueue_copy(queue, target, source)
        queue.finish()

    run()
    back = numpy.empty_like(host)
    pyopencl.enqueue_copy(queue, back, target)
    require_equal(back, host)
    return run, 2.0 * host.nbytes


def opencl_product(pyopencl: Any, context: Any, queue: Any, kind: str) -> tuple[Callable[[], None], float]:
    """The fastest of the kernel's shapes, at a size that takes long enough."""
    flags = pyopencl.mem_flags

    def kernel(rows: int, width: int) -> Any:
        defined = {**OPENCL_KINDS[kind], "ROWS": rows, "WIDTH": width}
        head = "".join(f"#define {name} {value}\n" for name, value in defined.items())
        return pyopencl.Kernel(pyopencl.Program(context, head + OPENCL).build(), "product")

    def made(shape: tuple[int, int], size: int) -> Callable[[], None]:
        left, right, expected = factors(kind, size)
        own = flags.READ_ONLY | flags.COPY_HOST_PTR
        inputs = [pyopencl.Buffer(context, own, hostbuf=each) for each in (left, right)]
        output = pyopencl.Buffer(context, flags.WRITE_ONLY, expected.nbytes)

        def run() -> None:
            kernels[shape](
                queue, (size // shape[1], size // shape[0]), None, *inputs, output, numpy.int32(size)
            )
            queue.finish()

        run()
        back = numpy.empty_like(expected)
        pyopencl.enqueue_copy(queue, back, output)
        require_equal(back, expected)
        return run

    kernels = {shape: kernel(*shape) for shape in SHAPES}
    return fastest(made, SHAPES)


def vulkan(seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Every Vulkan device's rates, through WebGPU's shaders."""
    import wgpu

    adapters = [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] == "Vulkan"]
    found = []
    for adapter in adapters:
        halves = "shader-f16" in adapter.features
        device = adapter.request_device_sync(required_features=["shader-f16"] if halves else [])
        jobs = {"copy_device": partial(vulkan_copy, wgpu, device)}
        jobs["matmul_fp32"] = partial(vulkan_product, wgpu, device, "fp32")
        absent = {"matmul_int8": "its shading language, WGSL, has no 8-bit numbers"}
        if halves:
            jobs["matmul_fp16"] = partial(vulkan_product, wgpu, device, "fp16")
        else:
            absent["matmul_fp16"] = "the device has no 16-bit numbers in shaders (shader-f16)"
        rates = measured(jobs, seconds / len(adapters))
        rates["absent"] |= absent
        found.append({"name": adapter.info["device"], **rates})
    return found, "" if found else "its drivers name no device"


def vulkan_copy(wgpu: Any, device: Any) -> tuple[Callable[[], None], float]:
    """A run that copies one buffer into another, and the bytes that it reads and writes."""
    host = numpy.arange(COPY_BYTES // 4, dtype=numpy.int32)
    usage = wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
    source = device.create_buffer_with_data(data=host, usage=usage)
    target = device.create_buffer(size=host.nbytes, usage=usage)

    def run() -> None:
        encoder = device.create_command_encoder()
        encoder.copy_buffer_to_buffer(source, 0, target, 0, host.nbytes)
        device.queue.submit([encoder.finish()])
        device.queue.read_buffer(target, 0, FEW_BYTES)

    run()
    require_equal(numpy.frombuffer(device.queue.read_buffer(target), numpy.int32), host)
    return run, 2.0 * host.nbytes


def vulkan_product(wgpu: Any, device: Any, kind: str) -> tuple[Callable[[], None], float]:
    """The fastest of the shader's shapes, at a size that takes long enough."""
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC

    def made(shape: tuple[int, int], size: int) -> Callable[[], None]:
        left, right, expected = factors(kind, size)
        buffers = [device.create_buffer_with_data(data=each, usage=usage) for each in (left, right)]
        buffers.append(device.create_buffer(size=expected.nbytes, usage=usage))
        text = WGSL.format(input=WGSL_KINDS[kind], rows=shape[0], size=size, quarter=size // 4)
        module = device.create_shader_module(code=("enable f16;" if kind == "fp16" else "") + text)
        pipeline = device.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )
        entries = [{"binding": number, "resource": {"buffer": each}} for number, each in enumerate(buffers)]
        group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)

        def run() -> None:
            encoder = device.create_command_encoder()
            computing = encoder.begin_compute_pass()
            computing.set_pipeline(pipeline)
            computing.set_bind_group(0, group)
            computing.dispatch_workgroups(size // 4 // 8, size // shape[0] // 8)
            computing.end()
            device.queue.submit([encoder.finish()])
            device.queue.read_buffer(buffers[2], 0, FEW_BYTES)

        run()
        back = numpy.frombuffer(device.queue.read_buffer(buffers[2]), numpy.float32)
        require_equal(back.reshape(size, size), expected)
        return run

    return fastest(made, VULKAN_SHAPES)


def sycl(seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Every SYCL device's rates, through oneAPI's array library, whose product is oneMKL's."""
    import dpctl
    import dpnp

    devices = dpctl.get_devices()
    found = []
    for device in devices:
        queue = dpctl.SyclQueue(device)
        jobs = {
            "copy_device": partial(sycl_copy, dpnp, queue),
            "matmul_fp32": partial(sycl_product, dpnp, queue),
        }
        rates = measured(jobs, seconds / len(devices))
        for key, bits in (("matmul_fp16", 16), ("matmul_int8", 8)):
            rates["absent"][key] = (
                f"the library's product of {bits}-bit numbers keeps its sums in {bits} bits"
            )
        found.append({"name": device.name, **rates})
    return found, "" if found else "its drivers name no device"


def sycl_copy(dpnp: Any, queue: Any) -> tuple[Callable[[], None], float]:
    """A run that copies one array into another, and the bytes that it reads and writes."""
    host = numpy.arange(COPY_BYTES // 4, dtype=numpy.int32)
    source = dpnp.asarray(host, sycl_queue=queue)
    target = dpnp.empty_like(source)

    def run() -> None:
        target[:] = source
        queue.wait()

    run()
    require_equal(target.asnumpy(), host)
    return run, 2.0 * host.nbytes


def sycl_product(dpnp: Any, queue: Any) -> tuple[Callable[[], None], float]:
    """The library's product, at a size that takes long enough."""

    def made(shape: tuple[int, int], size: int) -> Callable[[], None]:
        left, right, expected = factors("fp32", size)
        inputs = [dpnp.asarray(each, sycl_queue=queue) for each in (left, right)]
        output = dpnp.empty_like(inputs[0])

        def run() -> None:
            dpnp.matmul(*inputs, out=output)
            queue.wait()

        run()
        require_equal(output.asnumpy(), expected)
        return run

    return fastest(made, ((1, 1),))


def factors(kind: str, size: int) -> tuple[Any, Any, Any]:
    """Two matrices of small whole numbers, and their product, which is exact in fp32 and int32."""
    draw = numpy.random.default_rng(0)
    left, right = (draw.integers(-8, 9, (size, size)).astype(numpy.float32) for _ in "ab")
    sums = numpy.int32 if kind == "int8" else numpy.float32
    return left.astype(KINDS[kind]), right.astype(KINDS[kind]), (left @ right).astype(sums)


def fastest(
    made: Callable[[tuple[int, int], int], Callable[[], None]], shapes: tuple[tuple[int, int], ...]
) -> tuple[Callable[[], None], float]:
    """The shape that is fastest on a small product, on one that takes long enough; `made` checks results."""
    times = {shape: seconds_of(made(shape, SMALLEST_SIZE)) for shape in shapes}
    shape, size = min(times, key=lambda shape: times[shape]), SMALLEST_SIZE
    run = made(shape, size)
    while seconds_of(run) < ENOUGH_SECONDS and size < LARGEST_SIZE:
        size *= 2
        run = made(shape, size)
    return run, 2.0 * size**3


def seconds_of(run: Callable[[], None]) -> float:
    """Seconds of the faster of two calls."""
    found = []
    for _ in range(2):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def require_equal(found: Any, expected: Any) -> None:
    """Raise Wrong where two arrays differ."""
    if not numpy.array_equal(found, expected):
        wrong = float((found != expected).mean())
        raise Wrong(f"wrong results: {wrong:.3g} of the numbers")


def measured(
    jobs: Mapping[str, Callable[[], tuple[Callable[[], None], float]]], seconds: float
) -> dict[str, dict[str, Any]]:
    """Readings of every job in rounds, for so long after all are ready; and why one has none."""
    ready: dict[str, tuple[Callable[[], None], float]] = {}
    absent: dict[str, str] = {}
    for key, prepare in jobs.items():
        try:
            ready[key] = prepare()
        except Exception as error:  # what a driver lacks, or computes wrongly
            lines = str(error).strip().splitlines()
            absent[key] = _once(lines[0]) if lines else type(error).__name__
    end = time.monotonic() + seconds
    readings: dict[str, list[float]] = {key: [] for key in ready}
    while ready and (time.monotonic() < end or not all(len(values) > 1 for values in readings.values())):
        for key, job in ready.items():
            readings[key].append(rate(*job))
    return {"readings": readings, "absent": absent}


def _once(line: str) -> str:
    """A sentence of a driver's, of which wrappers repeat parts."""
    return " - ".join(dict.fromkeys(line.split(" - ")))


def rate(run: Callable[[], None], work: float) -> float:
    """Work a second, over so many runs as fill a reading."""
    calls, begin = 0, time.perf_counter()
    while True:
        run()
        calls += 1
        seconds = time.perf_counter() - begin
        if seconds > READING_SECONDS:
            return work * calls / seconds


def main() -> None:
    """Measure through the API that the first argument names."""
    try:
        devices, reason = {"opencl": opencl, "vulkan": vulkan, "sycl": sycl}[sys.argv[1]](float(sys.argv[2]))
    except Exception as error:  # a missing package, a loader without a driver
        devices, reason = [], f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps({"devices": devices, "reason": reason}), flush=True)


if __name__ == "__main__":
    main()
