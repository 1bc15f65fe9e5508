"""Predictions for one subject: seconds a step on a card with an interval, what limits it, and what it needs
in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from vivace.advising.catalogue import Gpu
from vivace.advising.formula import GPUS_IN_A_NODE, Setting, load_coefficients, predict_parts
from vivace.advising.interval import case_of, circumstances, factor
from vivace.advising.source import ITEM_BYTES, WEIGHT_BYTES, StepMemory, Subject
from vivace.errors import InputError, nearest
from vivace.machine import CONTEXT_BYTES

FRAGMENTATION = 1.1
FORWARD_SHARE = 1 / 3
MOST_MICRO_BATCHES = 64
SEEN_SHARE = 0.1  # of a measured step: a card that worked for less tells nothing of its speed
CHOICES = ("auto", "profiled", "fp32", "tf32", "fp64", "amp", "amp_fp16", "amp_bf16")
NEEDED = ("bf16", "fp64")  # number formats that a card without units of their own does not train in
LIMITS = {
    "compute": "arithmetic",
    "bandwidth": "memory bandwidth",
    "launch": "kernel launches",
    "host": "the input pipeline",
    "communication": "gradients between GPUs",
    "memory": "memory size",
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One step of a subject on a number of cards.

    Args:
        gpu, num_gpus, precision, batch_size: where and how; the batch is that of one card.
        seconds, low, high: of a step, with its 80 % interval.
        limit: a key of `LIMITS`.
        shares: parts of the step: compute, bandwidth, launch, communication, and host, the waiting for data.
        needed_bytes: memory of one card for the whole batch.
        how: what makes it fit, empty where it fits as it is.
        slowdown: what fitting costs, already in `seconds`.
        fits: does it fit at all?
        case: one of `interval.CASES`: what of card and model the evidence holds.
        doubts: the circumstances that widen the interval.
        scaled: measured over predicted on the card where the subject was profiled, already in `seconds`.
    """

    gpu: Gpu
    num_gpus: int
    precision: str
    batch_size: int
    seconds: float
    low: float
    high: float
    limit: str
    shares: dict[str, float]
    needed_bytes: float
    how: str
    slowdown: float
    fits: bool
    case: str
    doubts: tuple[str, ...]
    scaled: float = 1.0

    @property
    def samples_per_second(self) -> float:
        """Samples a second of all cards together."""
        return self.batch_size * self.num_gpus / self.seconds

    @property
    def headroom_bytes(self) -> float:
        """Memory left of what the driver leaves of a card; negative where the whole batch does not fit."""
        return self.gpu.usable_bytes - self.needed_bytes


def precision_on(gpu: Gpu, precision: str) -> str:
    """What a card computes in where `precision` is asked for: ``amp`` is bf16 where it has that, else fp16;
    without units of its own for them ``amp`` and ``tf32`` are fp32."""
    if precision == "amp":
        return "amp_bf16" if "bf16" in gpu.rates else "amp_fp16" if "fp16" in gpu.rates else "fp32"
    return "fp32" if precision == "tf32" and "tf32" not in gpu.rates else precision


def lacks(gpu: Gpu, precision: str) -> str:
    """The number format of `precision` in which a card does not train; empty where it does."""
    dtype = precision.removeprefix("amp_")
    return "" if dtype not in NEEDED or any(rate.startswith(dtype) for rate in gpu.rates) else dtype


class Predictor:
    """The shipped coefficients, applied to a subject.

    Precision ``auto`` is mixed, which is what cards are bought for, and that of the weights where they are
    not in fp32; ``profiled`` the subject's own.
    `launch_seconds` is what handing over one tiny operator takes the host.
    """

    def __init__(
        self,
        subject: Subject,
        precision: str = "auto",
        channels_last: bool = False,
        launch_seconds: float | None = None,
    ) -> None:
        if precision not in CHOICES:
            raise InputError(
                f"there is no precision {precision!r}{nearest(precision, CHOICES)} ({', '.join(CHOICES)})"
            )
        self.subject, self.channels_last, self.launch_seconds = subject, channels_last, launch_seconds
        usual = subject.precision if subject.precision in WEIGHT_BYTES else "amp"
        self.precision = {"auto": usual, "profiled": subject.precision}.get(precision, precision)
        self.theta, self.rest = load_coefficients()
        self.scaled = 1.0

    def learn(self, gpu: Gpu) -> float:
        """Scale all predictions by what the subject's profile measured on `gpu`, in its own precision and
        memory order; returns measured over predicted. Waiting for data or for other ranks is no speed of the
        card, and where nearly all of the step was that, nothing is scaled."""
        subject = self.subject
        worked = subject.worked_seconds
        if worked is not None and worked > SEEN_SHARE * (subject.step_seconds or math.inf):
            profiled = Predictor(subject, "profiled", subject.channels_last, self.launch_seconds)
            case = subject.demand, gpu, profiled._setting(gpu, 1)
            self.scaled = worked / float(predict_parts(self.theta, [case])["seconds"][0])
        return self.scaled

    def one(self, gpu: Gpu, num_gpus: int = 1) -> Prediction:
        """The prediction for a card."""
        return self.many([(gpu, num_gpus)])[0]

    def many(self, places: Sequence[tuple[Gpu, int]]) -> list[Prediction]:
        """Predictions for cards and their numbers, in order."""
        if not places:
            return []
        tried = [
            (place, gpu, setting, fit)
            for place, (gpu, number) in enumerate(places)
            for setting in [self._setting(gpu, number)]
            for fit in self._fits(gpu, setting)
        ]
        cases = [
            (self.subject.demand, gpu, dataclasses.replace(setting, batch_size=setting.batch_size / fit[1]))
            for _, gpu, setting, fit in tried
        ]
        parts = predict_parts(self.theta, cases)
        bare = [(demand, gpu, dataclasses.replace(s, updates=False)) for demand, gpu, s in cases]
        parts["piece"] = predict_parts(self.theta, bare)["single"]
        found: dict[int, Prediction] = {}
        for n, (place, gpu, setting, fit) in enumerate(tried):
            own = {name: float(values[n]) for name, values in parts.items()}
            prediction = self._prediction(gpu, setting, fit, own)
            if place not in found or prediction.seconds < found[place].seconds:
                found[place] = prediction
        return [found[place] for place in range(len(places))]

    def _setting(self, gpu: Gpu, num_gpus: int) -> Setting:
        return Setting(
            precision_on(gpu, self.precision),
            self.subject.batch_size,
            num_gpus,
            self.channels_last,
            launch_seconds=self.launch_seconds,
        )

    def needed_bytes(self, setting: Setting) -> float:
        """Memory of one card, with the context; several cards hold their gradients once more, to sum them."""
        updated = self.subject.demand.num_updated if setting.num_gpus > 1 else 0
        share = setting.batch_size / self.subject.batch_size
        summed = updated * WEIGHT_BYTES.get(setting.precision, 4)
        return sum(self._memory(setting).at_peak(share)) + summed + CONTEXT_BYTES

    def _memory(self, setting: Setting) -> StepMemory:
        """What the subject's batch takes in the setting's precision: as `vivace.memory` predicts it where the
        job was counted. Without, weights, also frozen ones, gradients, optimizer and activations, and nothing
        that a step holds for a moment.

        Autocast keeps a narrow copy of each weight until the backward pass, also of one that is frozen behind
        trained ones, as beside low-rank adapters. Where it is the job's own, only what is kept is as narrow.
        """
        subject, demand = self.subject, self.subject.demand
        if setting.precision.startswith("amp_") and subject.mixed_memory is not None:
            return subject.mixed_memory
        was, now = (ITEM_BYTES.get(name, 2) for name in (subject.precision, setting.precision))
        before, wide = (WEIGHT_BYTES.get(name, 4) for name in (subject.precision, setting.precision))
        copied = (2 if now < wide else 0) * (demand.num_updated + subject.frozen_bytes / before)
        if subject.step_memory is not None:
            copied = copied if was >= before else 0.0  # else they are there
            spared, wider = subject.step_memory.spared_bytes, wide / before
            most = spared if subject.precision == "amp" else math.inf
            found = [
                (a * wider + copied, b * wider + min(b, most) * (now / was - wider))
                for a, b in subject.step_memory.lines
            ]
            return StepMemory(tuple(found), spared * now / was)
        state = (subject.optimizer_bytes + subject.frozen_bytes) * wide / before
        kept = FRAGMENTATION * subject.activation_bytes * now / was
        fixed = (demand.num_parameters + demand.num_updated) * wide + state + copied
        return StepMemory(((fixed, kept),), kept)

    def _fits(self, gpu: Gpu, setting: Setting) -> list[tuple[str, int, float]]:
        """Ways in which the batch fits: in words, micro-batches, and the share of activations computed again.

        Micro-batches change what BatchNorm sees: with it they are a way only where there is no other.
        """
        whole = self.needed_bytes(setting)
        kept = self.needed_bytes(dataclasses.replace(setting, batch_size=0.0))
        room = gpu.usable_bytes
        if whole <= room:
            return [("", 1, 0.0)]
        memory, of_all = self._memory(setting), setting.batch_size / self.subject.batch_size
        spared, (_, growing) = memory.spared_bytes * of_all, memory.at_peak(of_all)
        share = (whole - room) / max(spared, 1.0)
        found = [("recompute", 1, share)] if kept < room and share <= 0.75 else []
        if found and self.subject.demand.count_of("batch_norm"):
            return found
        for pieces in (2, 4, 8, 16, 32, MOST_MICRO_BATCHES):
            if setting.batch_size / pieces >= 1 and kept + growing / pieces <= room:
                found.append((f"{pieces} micro-batches", pieces, 0.0))
                break
        return found or [("does not fit", 1, 0.0)]

    def _prediction(
        self, gpu: Gpu, setting: Setting, fit: tuple[str, int, float], parts: dict[str, float]
    ) -> Prediction:
        how, pieces, again = fit
        update = parts["single"] - parts["piece"]  # once a step, however many pieces
        work = parts["piece"] * pieces * (1 + FORWARD_SHARE * again) + update
        straggling = float(self.theta["straggling"]) * math.log(setting.num_gpus)
        talk = parts["communication"] + straggling * (work - parts["single"])  # of one piece, and of the rest
        working = work * self.scaled + talk
        whole = parts
        if pieces > 1:
            columns = predict_parts(self.theta, [(self.subject.demand, gpu, setting)])
            whole = {name: float(values[0]) for name, values in columns.items()}
        seconds = self._fed(working, setting)
        at_once = self._fed(whole["single"] * self.scaled + whole["communication"], setting)
        slowdown = seconds / at_once if how else 1.0
        shares = {
            "compute": parts["compute"] / parts["device"],
            "bandwidth": parts["bandwidth"] / parts["device"],
            "launch": min(parts["host"] / parts["device"], 1.0),
            "communication": talk / working,
            "host": 1.0 - working / seconds,
        }
        waits = self._fed(working / 2, setting) > 0.75 * seconds  # a card twice as fast would bring little
        limit = "host" if waits and how != "does not fit" else _limit(shares, parts, how)
        share = parts["host"] / parts["device"]
        evidence = self.rest["evidence"]
        found = circumstances(self.subject.demand, setting, share, evidence, has_tf32="tf32" in gpu.rates)
        new_model = self.subject.name not in evidence["models"]
        case = case_of(gpu, evidence, new_model=new_model)
        width = factor(case, found, self.rest["interval"], new_model=new_model)
        return Prediction(
            gpu,
            setting.num_gpus,
            setting.precision,
            int(setting.batch_size),
            seconds,
            self._fed(working / width, setting),
            self._fed(working * width, setting),
            limit,
            shares,
            self.needed_bytes(setting),
            "" if how == "does not fit" else how,
            slowdown,
            how != "does not fit",
            case,
            tuple(sorted(found)),
            self.scaled,
        )

    def _fed(self, working: float, setting: Setting) -> float:
        """Seconds of a step that works for so long: no card shortens the waiting for data, and the cards of a
        host share the workers that give it, as those did that were profiled. Without workers, each loads for
        itself."""
        subject = self.subject
        waiting = subject.waiting_seconds_per_sample * setting.batch_size
        least = (subject.host_seconds_per_sample or 0.0) * setting.batch_size
        more = min(setting.num_gpus, GPUS_IN_A_NODE) / min(subject.batches_at_once, GPUS_IN_A_NODE)
        return max(working + waiting, least * (max(more, 1.0) if subject.waits_for_workers else 1.0))

    def evidence(self, gpu: Gpu) -> int:
        """Published rows of this card behind the coefficients."""
        rows: Any = self.rest["evidence"]["cards"].get(gpu.name, 0)
        return int(rows)


def _limit(shares: dict[str, float], parts: dict[str, float], how: str) -> str:
    if how == "does not fit":
        return "memory"
    if shares["communication"] > 0.4:
        return "communication"
    if parts["host"] > parts["device"]:
        return "launch"
    return "compute" if shares["compute"] >= shares["bandwidth"] else "bandwidth"
