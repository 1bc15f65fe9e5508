"""The whole step as one CUDA graph: hundreds of kernel launches become one."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

from pydantic import Field

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique

# Of an operator, forward and backward, from Python: a step of 978 whose arithmetic takes less than 5 ms took
# 17.5 ms on an H200's host.
LAUNCH_SECONDS = 18e-6


@dataclasses.dataclass(frozen=True)
class CudaGraphStep(Technique):
    """Forward, backward and update recorded once and replayed.

    The first steps train on a side stream as warm-up. A second shape of batches (the last of an epoch) gets a
    graph of its own when it comes again; more than `num_shapes` run uncaptured. Once weights are frozen or
    set free, buffers or modules are replaced, or modules are in another mode, graphs are recorded afresh;
    numbers that are no tensors, such as a temperature, stay those of the recorded step until
    ``session.forget()``. Learning rates are copied into the graph at each replay; other optimizer settings
    are frozen in it, so a change of them is refused.
    SGD runs in its fused implementation, the only one that reads its rate on the device; so does every
    optimizer under fp16 loss scaling, where it skips a step on the device. The loss returned is a copy that
    later replays leave alone. Code that waits for the device is refused with its line.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.CAPTURE,
        numerics=Numerics.ROUNDING,
        summary="forward, backward and update replayed as one CUDA graph",
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs",
        slot="capture",
        captures=True,
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        devices=("cuda",),
        measured_on=("cuda",),
    )

    num_shapes: Annotated[int, Field(ge=1)] = 2

    def apply(self, build: Build) -> None:
        """Wrap the step: warm up, capture, replay."""
        import torch
        import torch.distributed as dist

        from vivace.techniques.cuda_graph_step.graph import StepGraph
        from vivace.tensors.optimizers import switch_optimizer

        build.require(build.model, "there is no model to capture")
        optimizer: Any = build.optimizer
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        build.require(ranks == 1, "the exchange of gradients between processes is not captured")
        name = type(optimizer).__name__
        scaled = build.facts.skipped_steps is not None
        settings = {"fused": True, "foreach": False} if name == "SGD" or scaled else {}
        settings |= {} if name == "SGD" else {"capturable": True}
        scaling = " under fp16 loss scaling" if scaled else ""
        build.require(settings.keys() <= optimizer.defaults.keys(), f"{name} cannot be captured{scaling}")
        dampened = name == "SGD" and any(g["momentum"] and g["dampening"] for g in optimizer.param_groups)
        reason = "fused SGD cannot begin with dampening behind a step that is skipped"
        build.require(not (scaled and dampened), reason)
        build.on_close(switch_optimizer(optimizer, settings))
        if scaled:
            build.facts.skipped_steps = torch.zeros((), device=build.device)
        build.facts.replays = 0
        captured = StepGraph(optimizer, build.facts, build.notes, self.num_shapes, build.model)
        build.wrap(Seam.STEP, captured.step)
        build.on_close(optimizer.register_load_state_dict_post_hook(captured.take_over).remove)
        build.on_forget(captured.forget)
        build.on_close(captured.forget)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Evidence: the number of steps that were replayed from the graph."""
        if not seen.facts.get("replays"):
            raise Refused("it changed nothing: no step was replayed from the graph")
        graphs = seen.notes["graphs"]
        return f"{seen.facts['replays']} steps replayed from {graphs} graph{'s'[: graphs != 1]}"

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """What launching is of the step, a graph can save."""
        share = min(0.8, profile.num_operators * LAUNCH_SECONDS / max(profile.step_seconds, 1e-9))
        return (0.98, 1 / (1 - share)) if machine.device.kind == "cuda" else (1.0, 1.0)
