"""Runs `vivace.train` in a child process; the global SCENE says how, and what befalls it.

Keys: job, arguments (of train), plan, answer (a file for the result), environment, kill_in_step (SIGKILL to
itself inside the loss of the n-th step of this process), file_bytes (RLIMIT_FSIZE), threads,
address_space_mib (RLIMIT_AS: so much more than the process has in its first step).
"""

import dataclasses
import json
import multiprocessing
import os
import resource
import signal
import sys
from pathlib import Path

import torch

import vivace
from vivace.job import load

scene = globals()["SCENE"]
os.environ.update(scene.get("environment", {}))
multiprocessing.set_start_method("fork", force=True)  # what the fork server set is for itself
torch.set_num_threads(scene.get("threads", 1))
if "file_bytes" in scene:
    resource.setrlimit(resource.RLIMIT_FSIZE, (scene["file_bytes"], resource.RLIM_INFINITY))
job = load(scene["job"])
if "kill_in_step" in scene:
    steps, inner = iter(range(1, 10**6)), job.loss

    def loss(model, batch):
        if next(steps) == scene["kill_in_step"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(model, batch)

    job = dataclasses.replace(job, loss=loss)
if "address_space_mib" in scene:
    first, own_loss = iter([True]), job.loss

    def limited(model, batch):
        if next(first, False):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + scene["address_space_mib"] * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        return own_loss(model, batch)

    job = dataclasses.replace(job, loss=limited)
plan = vivace.Plan.loads(scene["plan"]) if scene.get("plan") else None
try:
    run = vivace.train(job, plan, **scene["arguments"])
    answer, code = run.to_dict(), run.exit_code
except vivace.VivaceError as error:
    answer, code = {"error": {"kind": error.kind, "message": str(error)}}, error.exit_code
except KeyboardInterrupt:
    answer, code = {}, 130
Path(scene["answer"]).write_text(json.dumps(answer))
sys.exit(code)
