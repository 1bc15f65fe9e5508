"""Two hosts on this machine, network namespaces; launchers are forked from this process for both."""

import ctypes
import os
import subprocess
import time
from pathlib import Path

from torch.distributed.run import main as torchrun

RANK = Path(__file__).with_name("rank.py")
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def alone():
    """Be root in namespaces of one's own; False where the kernel has none for this person."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    return True


def another():
    """A process on the other host."""
    there = subprocess.Popen(["unshare", "--net", "sleep", "300"])
    while os.readlink(f"/proc/{there.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    return there


def launched(host, device, told, options, words):
    """The process id of torchrun with one rank, of the command line, which speaks over a network device.

    `host` is the id of a process there, None for this one's; `told` the file of what is printed.
    """
    if pid := os.fork():
        return pid
    try:
        if host is not None:
            with open(f"/proc/{host}/ns/net") as there:
                assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0
        written = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        for number in (1, 2):
            os.dup2(written, number)
        os.environ |= {"GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
        common = ["--nnodes", "2", "--nproc-per-node", "1", "--start-method", "fork"]
        torchrun([*common, *options, "--run-path", str(RANK), *words])
        os._exit(0)
    finally:
        os._exit(1)
