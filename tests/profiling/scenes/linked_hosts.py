"""Starts `vivace` by torchrun on two hosts, network namespaces, over a link of a given rate and delay.

    unshare --map-root-user --net python linked_hosts.py MBIT MILLISECONDS OUT WORD ...

Launchers and ranks are forked from this process, so that none of them imports anything.

The link is two TUN devices between which this process carries packets, each when a wire would have: many
kernels have no `tc netem`. What the launches print is left in OUT.0 and OUT.1. Ends with the larger exit
code of the two, and with 77 where a namespace or a device cannot be had.
"""

import ctypes
import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch._dynamo  # noqa: F401 - for the ranks, as are Vivace's
from torch.distributed.run import main as torchrun

import vivace.command.cli
import vivace.profiling.ranks_drive  # noqa: F401

RANK = Path(__file__).parents[2] / "scenes" / "rank.py"
CLONE_NEWNET = 0x40000000

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
AHEAD_SECONDS = 0.02  # of packets that are on the wire: the others wait in the kernel, as behind a slow card
ADDRESSES = {"near": "10.9.0.1", "far": "10.9.0.2"}


def device(name):
    """The file of a new network device: what is read from it was sent, what is written arrives."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


def carry(source, target, rate, delay):
    """Bring all packets of one direction over the wire, for ever."""
    wire = queue.SimpleQueue()

    def arrive():
        while True:
            at, packet = wire.get()
            time.sleep(max(0.0, at - time.monotonic()))
            os.write(target, packet)

    threading.Thread(target=arrive, daemon=True).start()
    free_at = 0.0
    while True:
        packet = os.read(source, MTU)
        free_at = max(free_at, time.monotonic()) + len(packet) / rate
        wire.put((free_at + delay, packet))
        time.sleep(max(0.0, free_at - time.monotonic() - AHEAD_SECONDS))


def launched(rank, host, name, told, words):
    """The process id of torchrun with one rank; `host` is the id of a process there, None for this one's."""
    if pid := os.fork():
        return pid
    try:
        if host is not None:
            with open(f"/proc/{host}/ns/net") as there:
                assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0
        written = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        for number in (1, 2):
            os.dup2(written, number)
        os.environ["GLOO_SOCKET_IFNAME"] = name
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
        options += ["--master-addr", ADDRESSES["near"], "--master-port", "29400", "--start-method", "fork"]
        torchrun([*options, "--run-path", str(RANK), *words])
        os._exit(0)
    finally:
        os._exit(1)


def main(mbit, milliseconds, out, *words):
    there = subprocess.Popen(["unshare", "--net", "sleep", "300"])
    inside = ["nsenter", "--net", "--target", str(there.pid)]
    try:
        while os.readlink(f"/proc/{there.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        near, far = device("near"), device("far")
        subprocess.run(["ip", "link", "set", "far", "netns", str(there.pid)], check=True)
        for name, there_or_here in (("near", []), ("far", inside)):
            for setting in (
                f"link set {name} mtu {MTU} up",
                "link set lo up",
                f"addr add {ADDRESSES[name]}/24 dev {name}",
            ):
                subprocess.run([*there_or_here, "ip", *setting.split()], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"two linked hosts cannot be had: {error}", file=sys.stderr)
        there.kill()
        return 77
    hosts = (("near", None), ("far", there.pid))
    launches = [launched(rank, host, name, f"{out}.{rank}", words) for rank, (name, host) in enumerate(hosts)]
    for ends in ((near, far), (far, near)):  # after the forks, in which no thread would be left
        arguments = (*ends, float(mbit) * 1e6 / 8, float(milliseconds) / 1e3)
        threading.Thread(target=carry, args=arguments, daemon=True).start()
    try:
        return max(os.waitstatus_to_exitcode(os.waitpid(launch, 0)[1]) for launch in launches)
    finally:
        there.kill()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
