"""Trains a job on one rank on each of two hosts, network namespaces, and cuts the link between them.

The global SCENE holds the words of `vivace train`, and its folder `out`. What the launches print is left in
OUT.0 and OUT.1. Ends with the first one's exit code, and with 77 where a namespace or a device cannot be had.
"""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil

from vivace.training import meeting, verdict

meeting.LINK_SECONDS, verdict.SILENT_SECONDS = 6, 4.0  # until the link is known to be cut

hosts = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "scenes" / "hosts.py")))
scene = globals()["SCENE"]
out = scene["out"]
os.chdir(Path(out).parent)
if not hosts.alone():
    sys.exit(77)
there = hosts.another()
inside = f"nsenter --net --target {there.pid}"
made = f"""ip link add near type veth peer name far && ip link set far netns {there.pid} &&
ip addr add 10.9.0.1/24 dev near && ip link set lo up && ip link set near up &&
{inside} ip addr add 10.9.0.2/24 dev far && {inside} ip link set lo up && {inside} ip link set far up"""
if subprocess.run(["sh", "-c", made], check=False).returncode:
    there.kill()
    sys.exit(77)
options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.9.0.1:29400", "--rdzv-id", "hosts"]
launches = [
    hosts.launched(
        host,
        device,
        f"{out}.{number}",
        [*options, "--local-addr", f"10.9.0.{number + 1}", "--rdzv-conf", f"is_host={1 - number}"],
        scene["words"],
    )
    for number, (host, device) in enumerate(((None, "near"), (there.pid, "far")))
]
try:
    log = Path(out, "metrics.jsonl")
    while not (log.exists() and '"step"' in log.read_text()):
        assert not any(os.waitpid(launch, os.WNOHANG)[0] for launch in launches), "a launch has ended"
        time.sleep(0.05)
    subprocess.run(["ip", "link", "set", "near", "down"], check=True)
    code = os.waitstatus_to_exitcode(os.waitpid(launches[0], 0)[1])
    deadline = time.monotonic() + 60
    while "cannot reach the launch" not in Path(f"{out}.1").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
finally:
    for process in psutil.Process().children(recursive=True):
        process.kill()
sys.exit(code)
