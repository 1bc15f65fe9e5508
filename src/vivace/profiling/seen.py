"""What a profile saw, with the few figures that several rules need. Torch-free."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from pathlib import Path
from typing import Any

from vivace.machine import Machine

ALSO_UPDATE = ("threads", "double")  # experiments on forward and backward that act on the update too
UNNAMED = "job"  # what a Job is called that was handed over in Python
LARGE_WAIT = 0.15  # of the step; below, the loader keeps up
BY_SECONDS = ("anomaly",)  # experiments whose copy suffers more from the setting than the loop does


@dataclasses.dataclass(frozen=True)
class Seen:
    """The recorder's document, the trace's facts, and the machine they are from; the `job`, where it is one,
    else the `command` of a script.
    """

    record: dict[str, Any]
    trace: dict[str, Any]
    machine: Machine
    job: str | None = None
    command: str = ""

    @property
    def faster(self) -> str:
        """The command that measures what is faster and needs nothing else of the person."""
        return self._tune_job if self.job else f"vivace run -- {self.command}"

    @property
    def tune(self) -> str:
        """The command that measures also what feeds the data; a script is written as a Job first."""
        return self._tune_job if self.job else "vivace tune, once the script is written as a Job,"

    @property
    def _tune_job(self) -> str:
        """In Python a Job has no reference that a command could take."""
        return "vivace.tune(job)" if self.job == UNNAMED else f"vivace tune {shlex.quote(self.job or '')}"

    def measured(self, what: str) -> str:
        """Behind advice on what feeds the data: the command that measures it; none does for a stream, which
        its workers cut."""
        return "" if self.loader.get("stream") else f"; {self.tune} measures {what}"

    @property
    def step_seconds(self) -> float:
        """Mean seconds a step, over the undisturbed steps."""
        return float(self.record["step_seconds"])

    @property
    def device(self) -> str:
        """Where the weights are: ``cpu`` or ``cuda``."""
        return str(self.record["device"])

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the step by phase, which sum to 1.

        Collectives inside of the backward pass, as DDP starts them, count as communication where nothing
        else ran meanwhile.
        """
        seconds = self._phase_seconds()
        exposed = self.trace.get("communication_seconds", 0.0) * self.stretch
        moved = min(max(0.0, exposed - seconds["communication"]), seconds["backward"])
        seconds["backward"] -= moved
        seconds["communication"] += moved
        seconds["idle"] += max(0.0, self.step_seconds - sum(seconds.values()))
        total = sum(seconds.values()) or 1.0
        return {phase: value / total for phase, value in seconds.items()}

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds by phase. On a GPU, the synchronised steps say what the device does in each phase; what is
        left of the undisturbed step is data and idle, as the host spent its time.
        """
        seconds = dict(self.record["seconds"])
        device = self.record.get("device_seconds")
        if not device:
            return seconds
        busy = {phase: device[phase] for phase in ("place", "forward", "backward", "update", "communication")}
        scale = min(1.0, self.step_seconds / max(sum(busy.values()), 1e-12))
        left = self.step_seconds - scale * sum(busy.values())
        waiting = seconds["data"] / max(seconds["data"] + seconds["idle"], 1e-12)
        rest = {"data": left * waiting, "idle": left * (1 - waiting)}
        return {**{phase: value * scale for phase, value in busy.items()}, **rest}

    @property
    def operator_seconds(self) -> dict[str, float]:
        """Seconds by operator class, without what the profiler added to the traced step."""
        return {name: value * self.stretch for name, value in self.trace.get("operators", {}).items()}

    @property
    def stretch(self) -> float:
        """What a second of the traced step is of the undisturbed one."""
        traced = self.trace.get("step_seconds") or self.step_seconds
        return min(1.0, self.step_seconds / traced)

    @property
    def busy_share(self) -> float:
        """Share of the traced step in which the device worked; 1 where that is not known."""
        busy = self.trace.get("busy_seconds")
        return 1.0 if busy is None else min(1.0, busy / self.trace["step_seconds"])

    @property
    def loader(self) -> dict[str, Any]:
        """Facts of the DataLoader; empty where the loop has none."""
        return self.record.get("loader") or {}

    @property
    def waits_for_workers(self) -> bool:
        """Does a GPU wait in spite of workers? On a processor the step slows its workers down, and says
        nothing of them."""
        waits = self.device != "cpu" and self.shares["data"] >= LARGE_WAIT
        return bool(waits and self.loader.get("num_workers"))

    @property
    def loading_seconds(self) -> float:
        """The least time in which the loop gets a batch, however fast the device is.

        Workers that are waited for take the whole step for one; else it is what the loop itself spends on it.
        """
        return self.step_seconds if self.waits_for_workers else self.record["seconds"]["data"]

    @property
    def flags(self) -> dict[str, Any]:
        """Threads, cores and process flags."""
        return dict(self.record.get("flags") or {})

    @property
    def cores(self) -> int:
        """Cores that the profiled process might use."""
        return min(int(self.flags.get("cores") or 1), self.machine.num_cores)

    @property
    def precision(self) -> dict[str, Any]:
        """What was seen of autocast, scaling and clipping."""
        return dict(self.record.get("precision") or {})

    @property
    def batches_at_once(self) -> int:
        """Ranks that train on samples of their own; those that read the same batch count once."""
        world = int((self.record.get("ranks") or {}).get("world_size") or 1)
        ranks = [self.record, *(self.record.get("other_ranks") or [])]
        sums = {(rank.get("ranks") or {}).get("batch_sum") for rank in ranks}
        return len(sums) if len(ranks) == world and None not in sums else world

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together, in undisturbed steps."""
        return self.batches_at_once * float(self.record["samples"]) / self.step_seconds

    @property
    def samples_per_second_in_all(self) -> float:
        """The same over all steps, with validation and starting workers between them."""
        walls = self.record.get("walls") or [self.step_seconds]
        samples = float(self.record.get("samples_in_all") or self.record["samples"])
        return self.batches_at_once * samples / statistics.fmean(walls)

    @property
    def computes_in_float16(self) -> bool:
        """Are two bytes a number float16, and not bfloat16?"""
        return "float16" in [
            *(self.precision.get("autocast_dtypes") or ()),
            *(self.record.get("parameter_dtypes") or ()),
        ]

    @property
    def narrows_gradients(self) -> bool:
        """Do backward passes multiply numbers of two bytes, or is that not known, as of compiled parts? Else
        what does so is a teacher, or validation.
        """
        known = self.record.get("item_bytes") and not self.record.get("silent_modules")
        return not known or "backward" in self.record.get("narrow_phases", ["backward"])

    @property
    def model_share(self) -> float:
        """Fraction of the step in forward and backward, on which the experiments act."""
        return self.shares["forward"] + self.shares["backward"]

    def experiment(self, name: str) -> tuple[float, float, float] | None:
        """Low, median and high speed ratio of the whole step without a setting; None where it was not tried.

        The ratio was measured on forward and backward of a copy. The update follows it where the setting acts
        there too; the rest of the step stays as it is.
        """
        picked = self.ratios(name)
        if picked is None:
            return None
        if name in BY_SECONDS:
            return self._by_seconds(name, picked)
        share = self.model_share + (self.shares["update"] if name in ALSO_UPDATE else 0.0)
        low, middle, high = (1 / (1 - share + share / ratio) for ratio in picked)
        return low, middle, high

    def _by_seconds(self, name: str, ratios: tuple[float, float, float]) -> tuple[float, float, float]:
        """The same from the seconds that the copy took without the setting, where the copy is slower with it
        than the loop is: anomaly detection notes the whole stack, which is deeper here.
        """
        seconds = self.record["experiments"][name]["seconds"]
        rest = (1 - self.model_share) * self.step_seconds
        low, middle, high = (self.step_seconds / (rest + seconds / ratio) for ratio in ratios)
        return 0.85 * low, middle, 1.1 * high

    def ratios(self, name: str) -> tuple[float, float, float] | None:
        """Low, median and high speed ratio of what an experiment ran, without the tails."""
        ratios = sorted(((self.record.get("experiments") or {}).get(name) or {}).get("ratios") or [])
        if not ratios:
            return None
        cut = len(ratios) // 5
        return ratios[cut], statistics.median(ratios), ratios[-1 - cut]

    def larger_batch(self, times: float) -> float:
        """Samples a second with twice the batch, over those now, where forward and backward then take so many
        times as long; data and placing take twice, the update and what lies between as long as before.
        """
        shares = self.shares
        growing = 2 * (shares["data"] + shares["place"]) + times * self.model_share
        return 2 / (growing + shares["update"] + shares["communication"] + shares["idle"])

    def short(self, site: str) -> str:
        """``train.py:12`` of a file and line."""
        path, _, line = site.rpartition(":")
        return f"{Path(path).name}:{line}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A cause with its evidence, the speed-up that removing it brings, as an interval, and the next step."""

    cause: str
    evidence: str
    low: float
    high: float
    next: str

    def to_dict(self) -> dict[str, Any]:
        """The verdict as ``--json`` prints it."""
        gain = {"low": round(self.low, 3), "high": round(max(self.low, self.high), 3)}
        return {"cause": self.cause, "evidence": self.evidence, "gain": gain, "next": self.next}
