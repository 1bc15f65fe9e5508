"""The zygote: a process that has imported torch and done nothing else, from which every child is forked.

Importing torch and its compiler takes longer than most trials; a fork takes milliseconds. The zygote
computes nothing and touches no GPU, so that every child starts from the same clean state.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from vivace.job import importing
from vivace.processes.pipes import ready
from vivace.torch_internals.compiler import DYNAMO

PRELOADED = ("torch", DYNAMO, "vivace.session.opening")


def main(channel: int, parent: int) -> None:
    """Serve requests on the socket `channel` until its other end closes: preload modules, or fork a child.

    A request is JSON. ``{"preload": [names]}`` imports modules. ``{"fork": true}`` comes with five file
    descriptors: commands, answers, log, a pipe for the child's process id and wait status, and the payload.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import(PRELOADED)
    imported = time.process_time()  # not the clock: others import at the same time
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    signal.signal(signal.SIGTERM, partial(_end, os.getpid(), statuses))
    die_with_parent(parent, signal.SIGTERM)
    with socket.socket(fileno=channel) as requests:
        while True:
            found = ready([requests.fileno(), wake_read])
            if wake_read in found:
                os.read(wake_read, 512)
                _report_the_dead(statuses)
            if requests.fileno() in found:
                data, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 5)
                if not data:
                    _end(os.getpid(), statuses)
                request = json.loads(data)
                if "preload" in request:
                    _import(request["preload"])
                    requests.sendall(b"\n")
                else:
                    _fork(descriptors, statuses, imported, (requests, wake_read, wake_write))


def _fork(descriptors: list[int], statuses: dict[int, int], imported: float, own: tuple[Any, ...]) -> None:
    commands, answers, log, status, payload = descriptors
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        statuses[pid] = status
        try:
            os.write(status, struct.pack("i", pid))
        except BrokenPipeError:  # who asked was interrupted meanwhile, and knows nothing of this child
            os.kill(pid, signal.SIGKILL)
        for descriptor in (commands, answers, log, payload):
            os.close(descriptor)
        return
    code = 1
    try:
        os.setsid()
        die_with_parent(zygote)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for thing in (*own, status, *statuses.values()):
            os.close(thing if isinstance(thing, int) else thing.detach())
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from vivace.processes.child import serve

        serve(payload, commands, answers, imported)
        code = 0
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end(zygote: int, statuses: Iterable[int], *_: object) -> None:
    """End with all children and what they have started, which may be halted, and would stay so for ever."""
    if os.getpid() != zygote:  # a child that has just been forked
        return
    for pid in statuses:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _report_the_dead(statuses: dict[int, int]) -> None:
    for pid in list(statuses):
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            continue
        for number in (signal.SIGTERM, signal.SIGCONT):  # to what it had started and left, halted or not
            with contextlib.suppress(ProcessLookupError, PermissionError):  # mostly there is nothing
                os.killpg(pid, number)
        with contextlib.suppress(BrokenPipeError):
            os.write(statuses[pid], struct.pack("i", status))
        os.close(statuses.pop(pid))


def _import(names: Iterable[str]) -> None:
    with importing():
        for name in names:
            with contextlib.suppress(Exception):  # a child that needs it will say so
                importlib.import_module(name)
    gc.freeze()  # children look for garbage among their own objects alone, and share these in memory


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)
    if os.getppid() != parent:
        os._exit(1)
