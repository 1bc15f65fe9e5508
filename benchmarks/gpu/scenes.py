"""Scenes that only a GPU can play, one process each: a method returns what it found, or an assertion fails.

In a dry run they are smaller, and what only a true GPU can show is not asserted.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace.errors import Refused, VivaceError
from vivace.inspection import inspect
from vivace.job import Job
from vivace.measuring.paired import Contestant
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.session.opening import start, training_device
from vivace.technique import registry
from vivace.techniques.cuda_graph_step.graph import WARM_UP_STEPS
from vivace.tensors.randomness import Streams, capture, restore
from vivace.testing import TINY_JOBS, contract
from vivace.training.training import train

GRAPH: dict[str, Any] = {"fused_optimizer": {}, "cuda_graph_step": {}}
Found = dict[str, Any]


class Scenes:
    """Serves `vivace.processes.launch.Child`."""

    def __init__(self, job: Job, dry: bool) -> None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = (
            ":4096:8"  # before CUDA starts: what torch asks for repeatability
        )
        self.dry = dry
        self.machine, self.device = inspect(), training_device(inspect())

    def children_see_the_gpu(self) -> Found:
        """A forked child can start CUDA: nothing before the fork has."""
        bad = torch.cuda._is_in_bad_fork()
        assert not bad, "CUDA was started before the fork"
        assert self.device.type == "cuda", "torch finds no GPU"
        assert (
            float(torch.ones(8, 8, device=self.device).mm(torch.ones(8, 8, device=self.device)).sum()) == 512
        )
        return {
            "device": str(self.device),
            "inspected": self.machine.device.name,
            "name": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }

    def strict_fp32_is_strict(self) -> Found:
        """Products and convolutions of the reference are as exact as fp32 is."""
        with self._open("mlp", {}):
            found = self._errors()
        assert max(found.values()) < 1e-5, found
        return found

    def tf32_acts_and_is_undone(self) -> Found:
        """TF32's error inside, the flags of before outside; the older switches can be read all along."""
        before = contract.process_flags()
        with self._open("mlp", {"tf32": {}}):
            found = self._errors()
            found["older switches"] = [
                torch.backends.cuda.matmul.allow_tf32,
                torch.backends.cudnn.allow_tf32,
            ]
        assert contract.process_flags() == before
        assert min(found["matmul"], found["convolution"]) > 1e-5, found
        return found

    def randomness_is_captured_and_restored(self) -> Found:
        """The GPU's stream is saved, restored, and left alone by streams of our own."""
        ones = torch.ones(1000, device=self.device)
        state = capture(self.device)
        first = functional.dropout(ones)
        second = functional.dropout(ones)
        restore(state, self.device)
        assert torch.equal(functional.dropout(ones), first)
        with Streams(5, self.device):
            own = functional.dropout(ones)
        assert torch.equal(functional.dropout(ones), second)
        assert not torch.equal(own, second)
        return {"keys": sorted(state)}

    def graph_follows_shapes_and_scheduler(self) -> Found:
        """Odd batches run uncaptured, learning rates reach the graph: the losses are the reference's."""
        sizes = [16] * 5 + [7] + [16] * 4
        found: Found = {}
        for name, make in _OPTIMIZERS.items():
            job = dataclasses.replace(TINY_JOBS["cnn"](), optimizer=make, data=lambda: _batches(sizes))
            (wanted, _), (seen, notes) = (
                self._scheduled(job, {"fused_optimizer": {}}),
                self._scheduled(job, GRAPH),
            )
            gap = max(abs(a - b) / abs(a) for a, b in zip(wanted, seen, strict=True))
            found[name] = {"largest relative difference": gap, "replays": notes["replays"]}
            assert gap < 1e-4, (name, wanted, seen)
            assert notes["replays"] == sizes.count(16) - WARM_UP_STEPS, notes
        return found

    def graph_takes_loaded_states(self) -> Found:
        """Weights and optimizer state that are loaded between replays are the ones that train on."""
        batches = _batches([16] * 8)
        job = TINY_JOBS["cnn"]()
        with self._open_job(job, GRAPH) as session:
            for batch in batches[:5]:
                session.step(batch)
            model, optimizer = session.build.model, session.build.optimizer
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            first = [float(session.step(batch)) for batch in batches[5:]]
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            again = [float(session.step(batch)) for batch in batches[5:]]
            notes = session.build.notes | session.build.facts.to_dict()
        gap = max(abs(a - b) / abs(a) for a, b in zip(first, again, strict=True))
        assert gap < 1e-4, (first, again)
        return {"largest relative difference": gap, **notes}

    def graph_leaves_evidence_of_precision(self) -> Found:
        """What a graph hides, a step beside it shows: every technique of the plan proves that it acted."""
        plan = Plan.from_dict({"bf16_autocast": {}, **GRAPH})
        reference = self._observed("cnn", Plan())
        seen = self._observed("cnn", plan)
        return {technique.name: technique.confirm(seen, reference) for technique in plan.techniques}

    def graph_memory_is_counted(self) -> Found:
        """The memory that a graph keeps for itself counts into the peak."""
        job = Job(
            model=lambda: nn.Sequential(
                *[nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.Flatten(1)],
                nn.AdaptiveAvgPool1d(4),
            ),
            data=lambda: _batches([4 if self.dry else 64] * 6, 8 if self.dry else 96),
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=_OPTIMIZERS["SGD"],
        )
        eager, graph = (
            self._observed(job, Plan.from_dict(p)).peak_bytes for p in ({"fused_optimizer": {}}, GRAPH)
        )
        assert graph > 0.8 * eager, (eager, graph)
        return {"eager_bytes": eager, "graph_bytes": graph}

    def scaler_skips_a_planted_overflow(self) -> Found:
        """A batch that overflows float16 changes no weight; the next one trains again."""
        batches = _batches([16] * 8)
        batches[4] = (batches[4][0] * 1e8, batches[4][1])
        with self._open_job(TINY_JOBS["cnn"](), {"fp16_autocast": {}}) as session:
            skipped, moved = [], []
            for batch in batches:
                before = [p.detach().clone() for p in session.build.model.parameters()]
                count = session.build.facts.skipped_steps
                session.step(batch)
                skipped.append(session.build.facts.skipped_steps - count)
                after = list(session.build.model.parameters())
                moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
                assert all(bool(torch.isfinite(p).all()) for p in after)
        assert skipped[4] == 1, skipped
        assert [bool(s) for s in skipped] == [not m for m in moved], (skipped, moved)
        assert moved[-1], moved
        return {"skipped": skipped}

    def prefetched_batches_live_long_enough(self) -> Found:
        """Batches copied ahead are not overwritten while a slow step still reads them."""
        job = TINY_JOBS["mlp"]()
        size = 1000 if self.dry else 4_000_000
        source = [torch.full((size,), float(index)) for index in range(24)]
        seen = []
        with self._open_job(job, {"pinned_prefetch": {}}) as session:
            for batch in session.batches(source):
                torch.cuda._sleep(20_000_000)  # cycles: the host runs ahead
                seen.append(torch.stack([batch.min(), batch.max()]))
                del batch
                torch.full((size,), -1.0, device=self.device)
        wanted = [[float(index)] * 2 for index in range(24)]
        assert [value.tolist() for value in seen] == wanted
        return {"batches": len(seen)}

    def training_resumes_bit_for_bit(self) -> Found:
        """Stopped, resumed and uninterrupted runs end with equal bits, with deterministic algorithms."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        job = dataclasses.replace(TINY_JOBS["cnn"](), epochs=3)
        plans: list[dict[str, Any]] = [{}, {"bf16_autocast": {}, "fused_optimizer": {}}, GRAPH]
        plans += [{"pinned_prefetch": {}}, {"fp16_autocast": {}}]
        different = []
        for plan in plans:
            with tempfile.TemporaryDirectory() as folder:
                whole, parts = Path(folder, "whole"), Path(folder, "parts")
                train(job, Plan.from_dict(plan), out=whole)
                train(job, Plan.from_dict(plan), out=parts, max_steps=5)
                train(job, Plan.from_dict(plan), out=parts, resume=True)
                a, b = (torch.load(path / "model.pt", map_location="cpu") for path in (whole, parts))
                if not all(torch.equal(a[key], b[key]) for key in a):
                    different.append(str(Plan.from_dict(plan)))
        assert not different, f"not bit for bit: {different}"
        return {"plans": len(plans)}

    def flags_come_back(self) -> Found:
        """After each technique alone the process is as before; the GPU memory that it left is recorded."""
        found: Found = {}
        for cls in registry.everything():
            if "cuda" not in cls.card.devices or cls.card.stage.name == "COMPILE":
                continue
            before = contract.process_flags()
            held = self._held()
            try:
                with self._open("cnn", {cls.name: {}}) as session:
                    for batch in _batches([16] * 4):
                        session.step(batch)
                del session
            except Refused as refused:
                found[cls.name] = str(refused)
            assert contract.process_flags() == before, cls.name
            found.setdefault(cls.name, f"{self._held() - held} bytes left")
        return found

    def _held(self) -> int:
        """Bytes of the GPU's memory in use, once garbage is gone."""
        gc.collect()
        return int(torch.cuda.memory_allocated())

    def compiled_code_runs_on_the_gpu(self) -> Found:
        """torch.compile finds Triton here, and its kernels run."""
        seen = self._observed("transformer", Plan() if self.dry else Plan.from_dict({"compile": {}}))
        kernels = [name for name in seen.kernels if "triton" in name]
        assert self.dry or kernels, sorted(seen.kernels)[:10]
        return {"triton_kernels": len(kernels), "graphs": seen.compiled_graphs, "breaks": seen.graph_breaks}

    def float8_trains_as_it_is_emulated(self) -> Found:
        """Layers on float8 units lose what their emulation says; refused where the GPU has none."""
        layers = (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        job = dataclasses.replace(TINY_JOBS["mlp"](), model=lambda: nn.Sequential(*copy.deepcopy(layers)))
        ways = {"fp32": {}, "emulated": {"emulate": True}, "float8": {"emulate": False}}
        losses: dict[str, list[float]] = {}
        for way, settings in ways.items():
            plan = Plan.from_dict({"fp8_linear": settings} if settings else {})
            with start(job, plan, self.machine) as session:
                losses[way] = [float(session.step(batch)) for batch in job.data()]
                seen = observe(session, list(job.data()))
                evidence = [technique.confirm(seen, seen) for technique in plan.techniques]
        apart = max(abs(a / b - 1) for a, b in zip(losses["float8"], losses["emulated"], strict=True))
        assert losses["emulated"] != losses["fp32"], "the emulation rounds nothing"
        assert apart < 0.01, losses
        return {"losses": losses, "apart": apart, "evidence": evidence}

    def exhausted_memory_is_named(self) -> Found:
        """A job too large for the device says so in one sentence, and the next one runs."""
        count = self.machine.device.memory_bytes
        greedy = dataclasses.replace(
            TINY_JOBS["mlp"](), loss=lambda model, batch: model(batch[0]).new_ones(count).sum()
        )
        contestant = Contestant(Source(greedy), self.machine, timeout=60)
        try:
            contestant.open(Plan())
            raise AssertionError("it ran")
        except VivaceError as error:
            sentence = str(error)
        finally:
            contestant.close()
        assert "out of memory" in sentence, sentence
        contestant = Contestant(Source(TINY_JOBS["mlp"]()), self.machine, timeout=60)
        try:
            contestant.open(Plan(), warm_seconds=0.1)
        finally:
            contestant.close()
        return {"sentence": sentence[:200]}

    def _open(self, name: str, plan: dict[str, Any]) -> vivace.Session:
        return self._open_job(TINY_JOBS[name](), plan)

    def _open_job(self, job: Job, plan: dict[str, Any]) -> vivace.Session:
        return start(job, Plan.from_dict(plan), self.machine)

    def _observed(self, job: Job | str, plan: Plan) -> Any:
        job = TINY_JOBS[job]() if isinstance(job, str) else job
        with start(job, plan, self.machine) as session:
            batches = list(job.data())
            for batch in batches[: WARM_UP_STEPS + 1]:
                session.step(batch)
            return observe(session, batches)

    def _scheduled(self, job: Job, plan: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
        with self._open_job(job, plan) as session:
            scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, 1, gamma=0.5)
            losses = []
            for batch in job.data():
                losses.append(float(session.step(batch)))
                scheduler.step()
            return losses, session.build.facts.to_dict()

    def _errors(self) -> Found:
        """Relative errors of a product and a convolution against float64."""
        numbers = torch.Generator().manual_seed(0)
        size = 64 if self.dry else 512
        left, right = (torch.randn(size, size, generator=numbers).to(self.device) for _ in range(2))
        pixels = torch.randn(4, 64, 16, 16, generator=numbers).to(self.device)
        kernel = torch.randn(64, 64, 3, 3, generator=numbers).to(self.device)
        pairs = {
            "matmul": (left @ right, left.double() @ right.double()),
            "convolution": (
                functional.conv2d(pixels, kernel),
                functional.conv2d(pixels.double(), kernel.double()),
            ),
        }
        return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


class Contract:
    """Serves `vivace.processes.launch.Child`: the contract of techniques, on the tiny jobs."""

    def __init__(self, job: Job, dry: bool) -> None:
        self.dry = dry
        classes = [cls for cls in registry.everything() if "cuda" in cls.card.devices and cls.name != "ddp"]
        self.classes = [cls for cls in classes if not (dry and cls.card.stage.name == "COMPILE")]

    def variants(self) -> list[Found]:
        """The plans of every technique that acts on one GPU, with each setting that it proposes."""
        return [Plan([variant]).to_dict() for cls in self.classes for variant in contract.variants(cls)]

    def check(self, plan: dict[str, Any], job: str) -> Found:
        """``{}`` where the contract is kept; a refusal or a broken promise with its reason."""
        try:
            reason = contract.check(Plan.from_dict(plan), job)
        except AssertionError as error:
            return {"status": "broken", "reason": str(error)}
        return {"status": "refused", "reason": reason} if reason else {}


def _batches(sizes: list[int], pixels: int = 8) -> list[Any]:
    numbers = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 3, pixels, pixels, generator=numbers),
            torch.randint(4, (size,), generator=numbers),
        )
        for size in sizes
    ]


_OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}
