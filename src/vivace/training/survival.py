"""Running out of memory in a step, survived: what the step had touched is put back, and a smaller plan named.

The smaller plan halves the micro-batches and keeps the batch. Where BatchNorm would then take its statistics
over other samples than the plan promises, activations are recomputed instead, which changes no bit.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch

from vivace.errors import JobError, OutOfMemory, ran_out_of_memory
from vivace.plan import Plan
from vivace.session.session import Session
from vivace.technique import Numerics, registry
from vivace.technique.registry import find
from vivace.tensors.modules import has_batch_norm, modules_of
from vivace.tensors.randomness import capture, restore
from vivace.tensors.trees import batch_size
from vivace.torch_internals.modules import RunningNorm
from vivace.torch_internals.tensors import foreach_copy, version_of
from vivace.training.ranks import Ranks


class Smaller(Exception):
    """The step must be taken again under `plan`; the message is the decision in one sentence."""

    def __init__(self, plan: Plan, text: str) -> None:
        super().__init__(text)
        self.plan = plan


class Survival:
    """Takes the steps of a run so that one that fails for lack of memory leaves no trace."""

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self.ranks = ranks
        self._observing = contextlib.ExitStack()
        self._watch(session)

    def step(self, batch: Any) -> Any:
        """One step of the session. Raises Smaller on all ranks where it must be taken again under another
        plan, and OutOfMemory where nothing smaller is left.
        """
        self._remember()
        try:
            return self.session.step(batch)
        except Exception as error:
            own = ran_out_of_memory(error)
            if not own and not self.ranks.heard():
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors, whoever keeps the error
            if own and not self._updating:
                self.ranks.cry()
            reason = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if own else "another rank did"
            )
        self._free()
        raise self._smaller(batch, reason)

    def resume(self, session: Session) -> None:
        """Put back what the failed step had touched, and go on with `session`."""
        restore(self._streams, session.build.device)
        if self._buffers:
            foreach_copy(self._buffers, self._copies)
        self._watch(session)

    def _watch(self, session: Session) -> None:
        self.session = session
        self._updating = False
        self._observing.close()
        self._observing.enter_context(session.seams.observed(update=self._update))
        norms = [n for model in session.build.models for n in modules_of(model, RunningNorm)]
        named = [b for model in session.build.models for b in model.buffers()]
        self._norms = {id(b) for norm in norms for b in norm.buffers()}
        self._versions = {id(b): version_of(b) for b in named}
        self._all_buffers = named
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def _update(self, following: Callable[[], None]) -> None:
        self._updating = True
        following()

    def _remember(self) -> None:
        """The random streams, and the buffers that steps write; before the first step, all buffers."""
        device = self.session.build.device
        self._streams = capture(device)
        self._updating = False
        self._updates = self.session.build.facts.updates_in_backward
        if not self._copies:
            self._buffers = self._all_buffers
        elif self._buffers is self._all_buffers:
            changing = [
                b for b in self._buffers if id(b) in self._norms or version_of(b) != self._versions[id(b)]
            ]
            self._buffers, self._copies = changing, []
        if not self._copies:
            self._copies = [buffer.clone() for buffer in self._buffers]
        elif self._buffers:
            foreach_copy(self._copies, self._buffers)

    def _free(self) -> None:
        for model in self.session.build.models:
            for parameter in model.parameters():
                parameter.grad = None
        gc.collect()
        if self.session.build.device.type == "cuda":
            torch.cuda.empty_cache()

    def _smaller(self, batch: Any, reason: str) -> Exception:
        """What to do about it, as an exception to raise."""
        session, samples = self.session, batch_size(batch)
        plan, build = session.plan, session.build
        where = f"the step ran out of memory ({reason})"
        if build.own_step:
            return JobError(f"{where}; your own step cannot be cut into pieces: give it a smaller batch")
        if self._updating or build.facts.updates_in_backward != self._updates:
            return OutOfMemory(
                f"{where} while the weights were being updated, which smaller pieces of a batch cannot help: "
                f"{_would_fit(session)}"
            )
        pieces = int(
            next((t.settings().get("num", 2) for t in plan.techniques if t.name == "micro_batches"), 1)
        )
        if has_batch_norm(build.models[0]) and session.promise < Numerics.SEMANTICS:
            if "checkpoint" in plan.names:
                return OutOfMemory(
                    f"{where} with activations recomputed, and pieces of a batch would change BatchNorm's "
                    f"statistics: {_would_fit(session)}"
                )
            return Smaller(
                plan.adding(find("checkpoint")()),
                f"{where}: from here on activations are recomputed (checkpoint), which changes no number",
            )
        if pieces >= samples:
            return OutOfMemory(f"{where} with one sample at a time: {_would_fit(session)}")
        num = min(2 * pieces, samples)
        text = f"{where}: from here on each batch of {samples} runs in {num} pieces (micro_batches)"
        return Smaller(plan.adding(find("micro_batches")(num=num)), text)  # type: ignore[call-arg]


def _would_fit(session: Session) -> str:
    savers = registry.savers(session.build.device.type, Numerics.EXACT)
    lacking = [cls.name for cls in savers if cls.name not in session.plan.names]
    wanted = f"a plan with {' or '.join(lacking[:2])}, " if lacking else ""
    return f"what may fit is {wanted}a smaller batch, or a device with more memory"
