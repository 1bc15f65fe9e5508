"""torch's own CUDA code without a GPU: NVIDIA's libraries are stood in for by three small C files.

Real are torch's caching allocator, its streams, events and rules of graph capture, and everything above.
Kernels do nothing, or, where it computes, what torch's kernels for CPUs do; speeds and kernels' names are not
to be had. The libraries take the place of the true ones by LD_PRELOAD, in child processes only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LIBRARIES = (
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libtorch_cpu.so",
    "libc10_cuda.so",
)
STOOD_IN_FOR = re.compile(r" U ((?:__cuda|cuda|cublas|cupti|nccl)\w+)")
CUPTI_NOT_INITIALIZED = 15


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A machine with H100s.

    Settings, given as keywords: ``gpus`` (1), ``gib`` of memory (80), ``exclusive`` (a lock file: one process
    at a time may use the GPU), ``hides_mode`` (NVML does not tell so), ``start_error`` (the number with which
    CUDA fails to start), ``full_after`` (so many allocations of a process succeed), ``full_for`` (so many of
    the next fail; all, where it is not given), ``host_full_after`` (the same of page-locked memory),
    ``nccl_error`` (NCCL does not start), ``fastest`` (NVML's number of the only H100, which CUDA counts
    first; the others are L4s), ``capability`` (90) and ``cuda`` (13020) as NVML tells them.
    ``computes`` (False): operators compute, on the CPU; Triton's kernels and cuDNN still do not.

    Programs are forked from a process that has made their imports (server.py): one of those that compute, and
    one of the others.
    """

    libraries: Path
    servers: dict[bool, subprocess.Popen[str]] = dataclasses.field(default_factory=dict)

    def environment(self, *, computes: bool = False, **settings: object) -> dict[str, str]:
        """The environment of a child process that runs on this machine."""
        folders = [str(HERE / "computing")] if computes else []
        given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*folders, *given]),
            "LD_PRELOAD": str(self.libraries / "libstandin.so"),
            "LD_LIBRARY_PATH": str(self.libraries),
            "TRITON_LIBCUDA_PATH": str(self.libraries),
            "XDG_CACHE_HOME": str(self.libraries / "cache"),
            "TRITON_CACHE_DIR": str(self.libraries / "triton"),
            "OMP_NUM_THREADS": "1",
            **{f"STAND_IN_{name.upper()}": str(value) for name, value in settings.items()},
        }

    def run(self, code: str | None, *words: object, **settings: object) -> subprocess.CompletedProcess[str]:
        """Run a program, or ``vivace``, with these words to its end."""
        computes = bool(settings.get("computes"))
        if computes not in self.servers:
            self.servers[computes] = subprocess.Popen(
                [sys.executable, str(HERE / "server.py")],
                env=self.environment(computes=computes),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        server, given = self.servers[computes], [str(word) for word in words]
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            request = {"code": code, "words": given, "environment": self.environment(**settings)}
            request |= {"folder": os.getcwd(), "output": str(output), "errors": str(errors)}
            print(json.dumps(request), file=server.stdin, flush=True)
            ended = int(server.stdout.readline())
            return subprocess.CompletedProcess(given, ended, output.read_text(), errors.read_text())

    def vivace(self, *words: object, **settings: object) -> subprocess.CompletedProcess[str]:
        """Run ``vivace`` with these words."""
        return self.run(None, *words, **settings)

    def python(self, code: str, *arguments: object, **settings: object) -> str:
        """What a program prints; the test fails where the program does."""
        done = self.run(code, *arguments, **settings)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


class NotBuilt(Exception):
    """The stand-in cannot be built here, and why."""


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory) -> Iterator[StandIn]:
    """The libraries, compiled once for all tests."""
    try:
        with opened(tmp_path_factory.mktemp("cuda_stand_in")) as made:
            yield made
    except NotBuilt as missing:
        pytest.skip(str(missing))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[StandIn]:
    """The machine, with its libraries compiled into a folder. Raises NotBuilt."""
    compiler, symbols = shutil.which("cc"), shutil.which("nm")
    if not compiler or not symbols:
        raise NotBuilt("there is no C compiler (cc, with nm) to build the CUDA stand-in with")
    headers = _headers()
    if not torch.version.cuda or headers is None:
        raise NotBuilt("the CUDA stand-in needs a torch built for CUDA, and the headers of its wheels")
    written = "".join((HERE / name).read_text() for name in ("runtime.c", "nccl.c", "driver.c"))
    needed = _needed(symbols)
    asked = set(re.findall(r"\bcu[A-Z]\w+", (headers / "cuda.h").read_text()))
    _write_answers(folder / "other_runtime.c", {name for name in needed if not _defines(written, name)})
    _write_answers(folder / "other_driver.c", {name for name in asked if not _defines(written, name)})
    for library, sources in {
        "libstandin.so": (HERE / "runtime.c", HERE / "nccl.c", folder / "other_runtime.c"),
        "libcuda.so.1": (HERE / "driver.c", folder / "other_driver.c"),
        "libnvidia-ml.so.1": (HERE / "nvml.c",),
    }.items():
        command = [compiler, "-shared", "-fPIC", "-O1", "-w", f"-I{HERE}", f"-I{headers}"]
        subprocess.run([*command, "-o", folder / library, *sources, "-ldl", "-lpthread"], check=True)
    made = StandIn(folder)
    try:
        yield made
    finally:
        for server in made.servers.values():
            server.communicate()


def _headers() -> Path | None:
    """The folder of CUDA's headers in torch's wheels."""
    for root in sys.path:
        found = next(Path(root, "nvidia").glob("**/cuda_runtime_api.h"), None)
        if found is not None:
            return found.parent
    return None


def _needed(nm: str) -> set[str]:
    """The functions of CUDA's libraries that torch's want."""
    folder = Path(torch.__file__).parent / "lib"
    files = [folder / name for name in LIBRARIES if (folder / name).exists()]
    found = subprocess.run([nm, "-D", "--undefined-only", *files], capture_output=True, text=True, check=True)
    return set(STOOD_IN_FOR.findall(found.stdout))


def _defines(source: str, function: str) -> bool:
    return re.search(rf"\b{function}\([^;]*?\) {{", source) is not None


def _write_answers(file: Path, functions: set[str]) -> None:
    """C that answers "done" to all of these, and CUPTI's "not initialized"."""
    file.write_text(
        "".join(
            f"int {name}(void) {{ return {CUPTI_NOT_INITIALIZED if name.startswith('cupti') else 0}; }}\n"
            for name in sorted(functions)
        )
    )
