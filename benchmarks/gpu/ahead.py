"""Triton's kernels compiled before a GPU is there, so that none of its minutes are spent on it.

    python benchmarks/gpu/ahead.py WHEELS [--capability 90]     # writes WHEELS/kernels.tar.gz
    python benchmarks/gpu/ahead.py WHEELS --unpack              # into Triton's cache; gpu.sh does it

What the part cnn launches of Vivace's kernels runs on the stand-in of tests/cuda_stand_in, which needs a C
compiler: kernels do nothing there, and Triton compiles them as for a GPU. On the GPU's machine Triton takes
what it finds where its own build, which is one for each version of Python, and the GPU's capability are the
same; so run this by the version of Python and with the torch that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ARCHIVE = "kernels.tar.gz"
NEEDED = ("torch", "torchvision", "triton", "pytest")  # the stand-in is a fixture of the tests


def main() -> int:
    """Fill the archive, or empty it into Triton's cache; exit code 2 where something for it is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheels", type=Path, metavar="WHEELS", help="the folder that gpu.sh gets by --wheels")
    parser.add_argument("--capability", type=int, default=90, help="90 is an H100 or H200")
    parser.add_argument("--unpack", action="store_true")
    chosen = parser.parse_args()
    if chosen.unpack:
        unpack(chosen.wheels / ARCHIVE)
        return 0
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        sentence = f"ahead.py: this Python lacks {', '.join(absent)}: install with python -m pip install"
        print(sentence, *absent, file=sys.stderr)
        return 2
    stand_in = _stand_in()
    try:
        with tempfile.TemporaryDirectory() as folder, stand_in.opened(Path(folder)) as machine:
            environment = machine.environment(capability=chosen.capability)
            paths = [str(HERE.parents[1] / "src"), environment["PYTHONPATH"]]
            environment |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": f"{folder}/kernels"}
            pack(chosen.wheels, environment)
    except stand_in.NotBuilt as missing:
        print(missing, file=sys.stderr)
        return 2
    return 0


def pack(wheels: Path, environment: dict[str, str], *, dry: bool = False) -> None:
    """Launch everything in a process of this environment, and archive what Triton has kept.

    Raises CalledProcessError where a launch fails.
    """
    program = f"import ahead; ahead.launch({dry})"
    command = [sys.executable, "-c", program]
    subprocess.run(command, cwd=HERE, env=environment | {"VIVACE_GPU_DRY": str(int(dry))}, check=True)
    wheels.mkdir(parents=True, exist_ok=True)
    with tarfile.open(wheels / ARCHIVE, "w:gz") as archive:
        archive.add(environment["TRITON_CACHE_DIR"], ".")
    builds = f"Python {'.'.join(platform.python_version_tuple()[:2])} and Triton {version('triton')}"
    print(f"{wheels / ARCHIVE}: {(wheels / ARCHIVE).stat().st_size / 2**20:.1f} MiB, for {builds} alone")


def unpack(archive: Path) -> None:
    """Put the kernels where Triton looks for them. It notes whole paths: they are written anew."""
    given = os.environ.get("TRITON_CACHE_DIR")
    cache = Path(given) if given else Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    with tarfile.open(archive) as file:
        file.extractall(cache, filter="data")
        names = [name for name in file.getnames() if Path(name).name.startswith("__grp__")]
    for group in (cache / name for name in names):
        parts = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        here = {"child_paths": {name: str(group.parent / name) for name in parts}}
        group.write_text(json.dumps(here), encoding="utf-8")


def launch(dry: bool) -> None:
    """What checks and ResNet-50 launch, on a stand-in that computes nothing: numbers are not looked at."""
    import torch
    import workloads
    from cnn_jobs import job_of
    from norm_kernels import NormKernels
    from norm_shapes import ALLOWED, NUM_CASES, PRODUCTS, SHAPES
    from product_kernels import ProductKernels

    from vivace import inspect
    from vivace.plan import Plan
    from vivace.session.opening import start

    torch.backends.cudnn.enabled = False  # it is not stood in for
    workloads.NUM_BATCHES = 1
    plan = {"channels_last": {}, "bf16_autocast": {}}
    for kind, shapes in ((NormKernels, SHAPES), (ProductKernels, PRODUCTS)):
        kernels = kind(None, dry)
        for dtype in ALLOWED:
            for seed in range(1 if dry else NUM_CASES):
                with contextlib.suppress(AssertionError):
                    kernels._case(seed, getattr(torch, dtype))
        for shape in list(shapes)[: 1 if dry else None]:
            kernels.ablate(shape)
        settings = {"products": True} if kind is ProductKernels and not dry else {}  # a tiny one has none
        for batch in (256, 32):
            job = job_of("resnet50", batch)
            with start(job, Plan.from_dict(plan | {"fused_batchnorm": settings}), inspect()) as session:
                session.step(next(iter(job.data())))


def _stand_in() -> ModuleType:
    """The module that builds the stand-in."""
    path = HERE.parents[1] / "tests" / "cuda_stand_in" / "conftest.py"
    spec = importlib.util.spec_from_file_location("cuda_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
