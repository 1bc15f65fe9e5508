"""How many CPU threads an operator of the step runs on."""

from __future__ import annotations

from typing import Any


def run_on(build: Any, count: int, setting: str) -> None:
    """Let the step run on `count` threads until the build is closed; nothing to do where it does already.

    Refused, naming `setting`: more threads than there are cores to use.
    """
    import torch

    before, cores = torch.get_num_threads(), build.machine.num_cores
    build.require(build.device.type == "cpu", f"{setting} is for steps on a CPU")
    build.require(build.facts.threads is None, "cpu_threads sets the step's threads already")
    build.require(count <= cores, f"{setting} = {count}, but only {cores} cores can be used")
    if count == before:
        return
    torch.set_num_threads(count)
    build.on_close(lambda: torch.set_num_threads(before))
    build.facts.threads = before, torch.get_num_threads()
