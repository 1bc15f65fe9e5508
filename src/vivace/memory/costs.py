"""What a step's parts hold for the backward pass, and what each block costs under each decision.

One step is followed: which storages it saves before, in and after which block. Then each kind of block runs
alone, forward and backward, under each decision in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from vivace.errors import Refused
from vivace.job import Batch
from vivace.mechanisms.blocks import Block, find_blocks, foreign_hook, forwards
from vivace.mechanisms.recompute import autocasts
from vivace.memory.planner import KEEP, Choice, Option
from vivace.observing.observe import now, peak_of
from vivace.session.session import Session
from vivace.technique import Numerics, Way
from vivace.technique.registry import asked, savers
from vivace.tensors.modules import patched
from vivace.tensors.randomness import capture, restore
from vivace.tensors.trees import bytes_of, map_tensors, tensors
from vivace.torch_internals.tensors import dense_parts, storage_id, storage_ids, tree_leaves

FEWEST, MOST = 3, 15  # timed rounds
ENOUGH_SECONDS = 0.6  # for the rounds of one kind of block
LEAST = 0.01  # of a block's time: noise makes nothing free

Around = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of the forward pass and what can be decided on it: a block, or what lies between two blocks.

    `name` is empty for the latter, which can only be kept.
    """

    name: str
    options: list[Option]


def measure(session: Session, batch: Batch, allow: Numerics) -> list[Part]:
    """The parts of a step in the order in which they run, with their options; keeping comes first.

    Blocks of one kind on inputs of one shape share a measurement. The session's step runs once; what the
    blocks' own runs would change is as that step leaves it: weights, the optimizer's state, buffers and
    random streams. Empty where the model has no blocks.
    """
    tape = _Tape(session, batch)
    with tape.following():
        session.step(batch)
    known: dict[str, list[Option]] = {}
    for call in tape.calls.values():
        if call.kind not in known:
            known[call.kind] = call.options(allow)
    parts: list[Part] = []
    gradients = 0  # of the blocks that come later: their backward passes are over
    for stretch in reversed(tape.stretches):
        options = [Option(KEEP, stretch.held_bytes, stretch.held_bytes, 0.0)]
        if stretch.name:
            call = tape.calls[stretch.name]
            options = [_times(option, call.count) for option in known[call.kind]]
        options = [dataclasses.replace(o, working_bytes=o.working_bytes + gradients) for o in options]
        parts.append(Part(stretch.name, options))
        gradients += stretch.gradient_bytes
    return parts[::-1] if tape.calls else []


def _times(option: Option, count: int) -> Option:
    """The option for a block that runs `count` times in a step."""
    held = count * option.held_bytes
    working = option.working_bytes + held - option.held_bytes
    return Option(option.name, held, working, count * option.seconds)


@dataclasses.dataclass
class _Stretch:
    """`held_bytes`: what lies between blocks is the first to save; `gradient_bytes`: of a block's weights."""

    name: str = ""
    held_bytes: int = 0
    gradient_bytes: int = 0


class _Tape:
    """Follows one forward pass; the pieces of a batch after the first are not followed."""

    def __init__(self, session: Session, batch: Batch) -> None:
        self.session = session
        self.blocks = find_blocks(session.build.models)
        self.calls: dict[str, _Call] = {}
        self.stretches = [_Stretch()]
        own = [t for model in session.build.models for t in (*model.parameters(), *model.buffers())]
        self.seen: dict[int, StorageWeakRef | None] = {
            storage_id(part.untyped_storage()): None
            for tensor in (*own, *tensors(batch))
            for part in dense_parts(tensor)
        }
        self.inside: dict[int, int] | None = None  # storages that the running block was the first to save
        self.over = False

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow what runs inside: the first forward pass of a step, or the whole of an own step."""
        modules = [module for block in self.blocks for module in block.modules]
        instead = [function for block in self.blocks for function in forwards(block, self._around)]
        if self.session.build.own_step:
            watching: contextlib.AbstractContextManager[Any] = saved_tensors_hooks(
                self._save, lambda tensor: tensor
            )
        else:
            watching = self.session.seams.observed(forward=self._forward)
        with patched(modules, "forward", instead), watching:
            yield

    def _forward(self, following: Callable[[Any], Any], batch: Batch) -> Any:
        if self.over:
            return following(batch)
        with saved_tensors_hooks(self._save, lambda tensor: tensor):
            result = following(batch)
        self.over = True
        return result

    def _around(
        self, block: Block, own: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        called_by_itself = self.inside is not None
        if self.over or called_by_itself or not torch.is_grad_enabled():
            return own(*arguments, **keywords)
        for tensor in tensors((arguments, keywords)):
            self._save(tensor)
        if block.name in self.calls:
            self.calls[block.name].count += 1
        else:
            known = {call.kind for call in self.calls.values()}
            self.calls[block.name] = _Call(block, own, (arguments, keywords), self.session, known)
            weights = [p for m in block.modules for p in m.parameters() if p.requires_grad]
            size = bytes_of(weights) if self._gradients_pile_up else 0
            self.stretches += [_Stretch(block.name, gradient_bytes=size), _Stretch()]
        self.inside = {}
        result = own(*arguments, **keywords)
        inside, self.inside = self.inside, None
        returned = storage_ids(_leaves(result))
        flowing = sum(inside[storage] for storage in inside.keys() & returned)
        self.stretches[-1].held_bytes += flowing
        self.calls[block.name].held_bytes = sum(inside.values()) - flowing
        return result

    @property
    def _gradients_pile_up(self) -> bool:
        """Do gradients appear in the backward pass, and stay until the update?"""
        facts = self.session.build.facts
        return facts.pieces is None and facts.updates_in_backward is None

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        for storage in (part.untyped_storage() for part in dense_parts(tensor)):
            key = storage_id(storage)
            if key not in self.seen:
                # The reference keeps the storage's address from being used again, and its memory not alive.
                self.seen[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if self.inside is not None:
                    self.inside[key] = storage.nbytes()
                else:
                    self.stretches[-1].held_bytes += storage.nbytes()
        return tensor.detach()


class _Call:
    """A call of one block. The first of its kind can be repeated alone: it has copies of its inputs, which
    the block, or what comes after it, may change in place.
    """

    def __init__(
        self, block: Block, own: Callable[..., Any], inputs: object, session: Session, known: set[str]
    ) -> None:
        self.block, self.own, self.session, self.device = block, own, session, session.build.device
        self.count, self.held_bytes = 1, 0
        self.autocasts = autocasts(self.device)
        shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors(inputs)]
        self.kind = f"{block.kind} {shapes} {foreign_hook(block)}"
        self.inputs: Any = None
        if self.kind not in known:
            self.inputs = map_tensors(inputs, lambda t: t.detach().clone().requires_grad_(t.requires_grad))

    def options(self, allow: Numerics) -> list[Option]:
        """Keep, and whatever techniques offer that this device and promise allow."""
        build, name = self.session.build, self.block.name
        ways = {KEEP: Way(lambda block, own, arguments, keywords: own(*arguments, **keywords), {})}
        for cls in savers(build.device.type, allow):
            ask = partial(cls.ways, build, name)
            offered: dict[str, Way] = (
                asked(cls, "what it can do to a block", ask, {}) if cls.card.by_block else {}
            )
            ways |= {Choice(cls.name, word): way for word, way in offered.items()}
        peaks: dict[Choice, int] = {}
        for choice, way in ways.items():
            with contextlib.suppress(Refused):  # then the block cannot do that
                peaks[choice] = peak_of(partial(self._run, way.around, self._fresh()), build.device)
        seconds = self._seconds({choice: ways[choice].around for choice in peaks})
        found = []
        for choice, peak in peaks.items():
            held = max(0, self.held_bytes - ways[choice].spared.get(name, 0))
            found.append(Option(choice, held, max(held, peak), seconds[choice]))
        return [found[0], *(option for option in found[1:] if option.held_bytes < self.held_bytes)]

    def _seconds(self, ways: dict[Choice, Around]) -> dict[Choice, float]:
        """Median seconds that each way takes more than keeping, over rounds in which all take turns."""
        rounds: list[list[float]] = []
        begin = now(self.device)
        while len(rounds) < FEWEST or (len(rounds) < MOST and now(self.device) - begin < ENOUGH_SECONDS):
            times = []
            for around in ways.values():
                inputs = self._fresh()
                before = now(self.device)
                self._run(around, inputs)
                times.append(now(self.device) - before)
            rounds.append(times)
        least = LEAST * statistics.median(times[0] for times in rounds)
        more = [statistics.median(times[at] - times[0] for times in rounds) for at in range(1, len(ways))]
        return dict(zip(ways, [0.0, *(max(least, seconds) for seconds in more)], strict=True))

    def _fresh(self) -> Any:
        """Inputs for one run. They are no leaves, which the block could not change in place."""
        return map_tensors(self.inputs, torch.Tensor.clone)

    def _run(self, around: Around, inputs: Any) -> None:
        """The block's forward and backward pass, which leaves nothing behind."""
        streams = capture(self.device)
        buffers = [(b, b.clone()) for m in self.block.modules for b in m.buffers()]
        weights = [p for m in self.block.modules for p in m.parameters()]
        arguments, keywords = inputs
        try:
            with contextlib.ExitStack() as stack:
                for settings in self.autocasts:
                    stack.enter_context(torch.autocast(**settings))
                result = around(self.block, self.own, arguments, keywords)
            ends = [leaf for leaf in _leaves(result) if leaf.requires_grad]
            if ends:
                with self._for_nobody(weights):
                    torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        finally:
            restore(streams, self.device)
            for buffer, before in buffers:
                buffer.data.copy_(before)
            for tensor in (*tensors(self.inputs), *weights):
                tensor.grad = None

    @contextlib.contextmanager
    def _for_nobody(self, weights: list[torch.nn.Parameter]) -> Iterator[None]:
        """A backward pass whose gradients nobody updates by or exchanges; they go when an update would let
        them go.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.session.seams.accumulating())
            updates = self.session.build.facts.updates_in_backward is not None
            for weight in weights if updates else ():
                if weight.requires_grad:
                    hook = weight.register_post_accumulate_grad_hook(_let_go)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            yield


def _let_go(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _leaves(result: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
