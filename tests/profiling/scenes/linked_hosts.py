"""Starts a command by torchrun on two hosts, network namespaces, over a link of a given rate and delay.

    unshare --map-root-user --net python linked_hosts.py MBIT MILLISECONDS OUT COMMAND ...

The link is two TUN devices between which this process carries packets, each when a wire would have: many
kernels have no `tc netem`. What the launches print is left in OUT.0 and OUT.1. Ends with the larger exit
code of the two, and with 77 where a namespace or a device cannot be had.
"""

import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time

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


def main(mbit, milliseconds, out, *command):
    there = subprocess.Popen(["unshare", "--net", "sleep", "300"])
    inside = ["nsenter", "--net", "--target", str(there.pid)]
    try:
        while os.readlink(f"/proc/{there.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        near, far = device("near"), device("far")
        subprocess.run(["ip", "link", "set", "far", "netns", str(there.pid)], check=True)
        for name, words in (("near", []), ("far", inside)):
            for setting in (
                f"link set {name} mtu {MTU} up",
                "link set lo up",
                f"addr add {ADDRESSES[name]}/24 dev {name}",
            ):
                subprocess.run([*words, "ip", *setting.split()], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"two linked hosts cannot be had: {error}", file=sys.stderr)
        there.kill()
        return 77
    for ends in ((near, far), (far, near)):
        arguments = (*ends, float(mbit) * 1e6 / 8, float(milliseconds) / 1e3)
        threading.Thread(target=carry, args=arguments, daemon=True).start()
    launches = []
    for rank, (name, words) in enumerate((("near", []), ("far", inside))):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        meeting = ["--master-addr", ADDRESSES["near"], "--master-port", "29400"]
        words = [*words, *torchrun, *meeting, "--node-rank", str(rank), *command]
        with open(f"{out}.{rank}", "wb") as told:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": name}
            launches.append(subprocess.Popen(words, stdout=told, stderr=told, env=environment))
    try:
        return max(launch.wait() for launch in launches)
    finally:
        for process in (*launches, there):
            process.kill()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
