"""A training step as a CUDA graph: warm-up, capture and replay."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vivace.blame import blame
from vivace.errors import Refused, ran_out_of_memory
from vivace.job import Batch
from vivace.technique.facts import Facts
from vivace.tensors.trees import map_tensors, outline, tensors
from vivace.torch_internals.modules import own_parts, own_tensors

WARM_UP_STEPS = 2  # the optimizer's first step makes its state, the second is like all others


@functools.cache
def _side(stream: Callable[[int], Any], device: int) -> Any:
    """The stream beside which steps warm up: one for a process, as cuBLAS keeps 65 MiB for each (2.11)."""
    return stream(device)


@dataclasses.dataclass
class _Recorded:
    """What was captured for batches of one shape: the graph, the memory that it reads, and its loss."""

    graph: Any
    batch: Any
    loss: torch.Tensor


class StepGraph:
    """Trains a few steps eagerly on a side stream, then records one step and replays it on static buffers.

    Learning rates are numbers on the device in every step, recorded or not, so that both round alike. The
    graphs of several shapes share one pool of memory: one runs at a time, and none reads another's.

    Args:
        optimizer: capturable, or fused with a learning rate on the device.
        facts: ``replays`` counts the steps that ran from a graph.
        notes: ``graphs`` counts the shapes that have one.
        num_shapes: so many shapes of a batch are captured, as they come; others run uncaptured.
        model: what is trained. Once other weights of it are, or they or its buffers lie elsewhere, or its
            modules are others or in other modes, all is captured afresh.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        facts: Facts,
        notes: dict[str, Any],
        num_shapes: int = 1,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.optimizer, self.facts, self.notes, self.num_shapes = optimizer, facts, notes, num_shapes
        self.rates: list[torch.Tensor] = []
        self.model = model
        self.look_again()
        self.switches: list[int] = []  # of no step yet
        self.forget()

    def forget(self) -> None:
        """Drop the graphs and their memory; the next steps warm up and capture afresh."""
        self.recorded: dict[str, _Recorded] = {}
        self.waiting: dict[str, int] = {}  # steps that a shape still has to warm up
        self.state: dict[Any, dict[str, Any]] = {}
        self.frozen: list[dict[str, Any]] = []
        self.pool: Any = None

    def step(self, following: Callable[[Any], torch.Tensor], batch: Batch) -> torch.Tensor:
        """Take one training step: replay the graph of the batch's shapes, or record it first."""
        shapes = outline(batch)
        if (self.switches, self.buffer_places) != self.seen():
            self.forget()
            self.look_again()
        with self.rates_on_device():
            if shapes not in self.recorded:
                if shapes not in self.waiting and len(self.waiting) >= self.num_shapes:
                    return following(batch)
                # The optimizer's state is there after the first shape's steps: the next need one.
                left = self.waiting.setdefault(shapes, 1 if self.recorded else WARM_UP_STEPS)
                if left:
                    self.waiting[shapes] -= 1
                    before = self.places(buffers=left == 1)  # a first step may make some
                    loss = self.beside(following, batch)
                    now = self.places(buffers=left == 1)
                    if moved := [name for name in before if now.get(name, 0) != before[name]]:
                        told = f"a step gives '{moved[0]}' other memory, which a graph does not follow"
                        raise Refused(told)
                    if not self.recorded:
                        switches = self.switches
                        self.look_again()  # at buffers: those with other memory after each step are refused
                        self.switches = switches
                    return loss
                self.capture(following, batch, shapes)
        if self.settings() != self.frozen:
            raise Refused(
                "the scheduler changes more than the learning rate: a captured step cannot follow it"
            )
        recorded = self.recorded[shapes]
        for static, tensor in zip(tensors(recorded.batch), tensors(batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        recorded.graph.replay()
        self.facts.replays = (self.facts.replays or 0) + 1
        return recorded.loss.clone()

    def seen(self) -> tuple[list[int], list[int]]:
        """What a graph is recorded for: the model's parts, their modes and weights; and where buffers lie."""
        switches: list[int] = [module.training for module in self.modules]
        switches += map(id, itertools.chain.from_iterable(self.parts))
        switches += [weight.requires_grad for weight in self.weights]
        switches += [weight.data_ptr() for weight in self.weights]
        places = list(map(id, itertools.chain.from_iterable(self.tables)))
        places += [buffer.data_ptr() for buffer in self.buffers]
        return switches, places

    def look_again(self) -> None:
        """Take the model as it is now."""
        self.modules = [] if self.model is None else list(self.model.modules())
        held = [own_tensors(module) for module in self.modules]
        # Views of the dictionaries that the modules keep: what stands in one now is looked at in each step.
        self.parts = [*map(own_parts, self.modules), *(weights.values() for weights, _ in held)]
        self.tables = [buffers.values() for _, buffers in held]
        self.weights = [w for weights, _ in held for w in weights.values() if w is not None]
        self.buffers = [buffer for table in self.tables for buffer in table if buffer is not None]
        self.switches, self.buffer_places = self.seen()

    def places(self, *, buffers: bool) -> dict[str, int]:
        """Where the model's weights, or its buffers as well, lie."""
        if self.model is None:
            return {}
        named = itertools.chain(self.model.named_parameters(), self.model.named_buffers() if buffers else ())
        return {name: tensor.data_ptr() for name, tensor in named}

    def beside(self, following: Callable[[Any], torch.Tensor], batch: Batch) -> torch.Tensor:
        """A step on the side stream, as a capture wants it to have run before."""
        side = _side(torch.cuda.Stream, torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = following(batch)
        torch.cuda.current_stream().wait_stream(side)
        return loss

    def capture(self, following: Callable[[Any], torch.Tensor], batch: Batch, shapes: str) -> None:
        """Record `following` for batches of these shapes; recording trains nothing.

        Raises Refused with torch's reason and the line of the person's code that waits for the device, and
        where the step did nothing on the current device.
        """
        static = map_tensors(batch, torch.clone)
        self.frozen = self.settings()
        self.state = {parameter: dict(state) for parameter, state in self.optimizer.state.items()}
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        recording = torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")
        try:
            with ExitStack() as stack:
                # This gives the current stream back where ending a failed capture raises. Other threads, such
                # as a DataLoader's for page-locked memory, may call CUDA while we record.
                stack.enter_context(torch.cuda.stream(torch.cuda.current_stream()))
                stack.enter_context(recording)
                loss = following(static)
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    stack.close()
        except RuntimeError as error:
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if ran_out_of_memory(cause):
                raise cause from None
            raise Refused(f"the step cannot be captured: {blame(cause)}") from error
        if told:  # that nothing was recorded: its replays would train nothing
            raise Refused(f"the step cannot be captured: {told[0].message}")
        self.recorded[shapes] = _Recorded(graph, static, loss)
        self.notes["graphs"] = len(self.recorded)

    def take_over(self, _: object = None) -> None:
        """Put a loaded optimizer state where the graph reads it; drop the graph where it has another form.

        Before there is a graph, the steps that warm up begin anew: a first step of the optimizer is not to be
        recorded as the step that is replayed.
        """
        held, loaded = self.state, self.optimizer.state
        same = held.keys() == loaded.keys() and all(held[p].keys() == loaded[p].keys() for p in held)
        if not (self.recorded and same):
            self.forget()
            return
        for parameter, state in held.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.copy_(loaded[parameter][name])
                    loaded[parameter][name] = value

    @contextmanager
    def rates_on_device(self) -> Iterator[None]:
        """Inside, each group's learning rate is a number on the device, with the group's present value."""
        groups = self.optimizer.param_groups
        own = [group["lr"] for group in groups]
        if len(self.rates) != len(groups):
            device = next(weight.device for group in groups for weight in group["params"])
            self.rates = [torch.tensor(0.0, device=device) for _ in own]
        for group, rate in zip(groups, self.rates, strict=True):
            rate.fill_(group["lr"])
            group["lr"] = rate
        try:
            yield
        finally:
            for group, value in zip(groups, own, strict=True):
                group["lr"] = value

    def settings(self) -> list[dict[str, Any]]:
        """The optimizer's settings that a graph freezes: all but the learning rate."""
        return [
            {k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups
        ]
