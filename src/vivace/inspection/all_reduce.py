"""The gauge of the exchange between ranks: processes that wait for a line, then time an all-reduce.

`python -m` of this module is one rank; imported, it starts them and imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO

from vivace.inspection.reading import Reading, Unmeasured

MIB = 2**20
BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB}
CALLS = 3
START_SECONDS, ANSWER_SECONDS = 60.0, 20.0


def all_reduce(kind: str, num_ranks: int, cleanup: ExitStack) -> Reading:
    """Start `num_ranks` processes on the CPU (gloo) or one a GPU (NCCL); a reading lets all exchange at once.

    The rate is that of the bus, 2 (n - 1) / n times size / time, so that the number of ranks does not matter.
    """
    if num_ranks < 2:
        raise Unmeasured("one rank: nothing to exchange")
    folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="vivace-"))
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if kind == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, kind, str(rank), str(num_ranks), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which ends them
        )
        for rank in range(num_ranks)
    ]
    cleanup.callback(_end, ranks)
    _answer(ranks, START_SECONDS)

    def read() -> float:
        for rank in ranks:
            _input(rank).write("\n")
            _input(rank).flush()
        return float(_answer(ranks, ANSWER_SECONDS))

    return read


def _answer(ranks: list[subprocess.Popen[str]], seconds: float) -> str:
    """One line of every rank; the first rank's. All ranks are ended when one takes too long."""
    clock = threading.Timer(seconds, _end, [ranks])
    clock.start()
    try:
        lines = [rank.stdout.readline().strip() if rank.stdout else "" for rank in ranks]
    finally:
        clock.cancel()
    failed = next((line for line in lines if not line or line.startswith("failed")), None)
    if failed is not None:
        raise Unmeasured(failed.removeprefix("failed: ") or "a rank died or did not answer")
    return lines[0]


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()
        for stream in (rank.stdin, rank.stdout):
            if stream is not None and threading.current_thread() is threading.main_thread():
                with contextlib.suppress(OSError):
                    stream.close()


def _input(rank: subprocess.Popen[str]) -> IO[str]:
    assert rank.stdin is not None
    return rank.stdin


def run_rank(kind: str, rank: int, num_ranks: int, folder: str) -> None:
    """One rank: join, say so, and answer every line with the bus rate of a few exchanges."""
    import torch
    import torch.distributed as dist

    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=num_ranks,
    )
    data = torch.ones(BYTES[kind] // 4, device=device)
    wait: Callable[[], None] = torch.cuda.synchronize if kind == "cuda" else (lambda: None)
    dist.all_reduce(data)
    wait()
    print("ready", flush=True)
    for _ in sys.stdin:
        dist.barrier()
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(data)
        wait()
        seconds = (time.perf_counter() - begin) / CALLS
        print(2 * (num_ranks - 1) / num_ranks * BYTES[kind] / seconds, flush=True)


if __name__ == "__main__":
    try:
        run_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    except Exception as error:
        print(f"failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
