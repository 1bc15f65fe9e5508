"""Starts `vivace` by torchrun on two hosts, network namespaces, over a link of a given rate and delay.

The global SCENE holds these (megabits a second, milliseconds), the command line's `words`, and `out`, in the
folder to work in. Launchers and ranks are forked from this process, so that none of them imports anything.

The link is two TUN devices between which this process carries packets, each when a wire would have: many
kernels have no `tc netem`. What the launches print is left in OUT.0 and OUT.1. Ends with the larger exit
code of the two, and with 77 where a namespace or a device cannot be had.
"""

import fcntl
import os
import queue
import runpy
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import vivace.profiling.ranks_drive  # noqa: F401 - for the ranks

hosts = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "scenes" / "hosts.py")))
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


def main(mbit, milliseconds, out, words):
    os.chdir(Path(out).parent)
    if not hosts.alone():
        return 77
    there = hosts.another()
    inside = ["nsenter", "--net", "--target", str(there.pid)]
    try:
        near, far = device("near"), device("far")
        subprocess.run(["ip", "link", "set", "far", "netns", str(there.pid)], check=True)
        for name, there_or_here in (("near", []), ("far", inside)):
            for setting in (
                f"link set {name} mtu {MTU} up",
                "link set lo up",
                f"addr add {ADDRESSES[name]}/24 dev {name}",
            ):
                subprocess.run([*there_or_here, "ip", *setting.split()], check=True)
    except (OSError, subprocess.CalledProcessError):
        there.kill()
        return 77
    met = ["--master-addr", ADDRESSES["near"], "--master-port", "29400"]
    launches = [
        hosts.launched(host, name, f"{out}.{rank}", [*met, "--node-rank", str(rank)], words)
        for rank, (name, host) in enumerate((("near", None), ("far", there.pid)))
    ]
    for ends in ((near, far), (far, near)):  # after the forks, in which no thread would be left
        arguments = (*ends, mbit * 1e6 / 8, milliseconds / 1e3)
        threading.Thread(target=carry, args=arguments, daemon=True).start()
    try:
        return max(os.waitstatus_to_exitcode(os.waitpid(launch, 0)[1]) for launch in launches)
    finally:
        there.kill()


sys.exit(main(**globals()["SCENE"]))
