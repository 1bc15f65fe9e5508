"""A tap between a session and the job's own functions: sees what reaches them, and can dictate the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from vivace.job import Batch, Job
from vivace.session.session import Session
from vivace.tensors.randomness import derive, host_state
from vivace.tensors.shards import whole
from vivace.tensors.trees import batch_size, map_tensors, tensors
from vivace.torch_internals.tensors import in_backward
from vivace.verifying.facts import Facts, facts_of_modules

Dictate = Callable[[nn.Module, Any], torch.Tensor]


class Tap:
    """Stands where the job's loss (or own step) and `on_gradients` stood.

    It notes the random stream's state after each evaluation of the loss, the modules' settings at the first,
    and the gradients, while it is asked to. Where the job has no `on_gradients` it gets none, as techniques
    ask for it: then the gradients are those that the optimizer is called with. While `dictated` is set
    it stands for the loss, an own step does nothing, `pieces` holds the batches that came, and `asked` says
    that any did, be it while a CUDA graph was captured.
    """

    def __init__(self, job: Job) -> None:
        self.person = job
        self.dictated: Dictate | None = None
        self.pieces: list[Any] = []
        self.asked = False
        self.streams: list[int] = []
        self.modules: Facts | None = None
        self.gradients: dict[str, torch.Tensor] = {}
        self.watching = False
        self.overflows = False  # then `on_gradients` is left out: what a job keeps would not recover
        own: dict[str, Any] = {"step": self._step} if job.step else {"loss": self._loss}
        own |= {"on_gradients": self._on_gradients} if job.on_gradients else {}
        self.job = dataclasses.replace(job, **own)

    def attach(self, session: Session) -> None:
        """Hear of the session's updates, each of all parameters or of some."""
        if self.person.step is None and self.person.on_gradients is None:
            (model,), (optimizer,) = session.build.models, session.optimizers
            names = {id(p): name for name, p in model.named_parameters()}

            def note(updating: torch.optim.Optimizer, *_: object) -> None:
                updated = [p for group in updating.param_groups for p in group["params"]]
                self._note_gradients((names[id(p)], p) for p in updated if id(p) in names)

            session.build.on_close(optimizer.register_step_pre_hook(note).remove)

    def watch(self) -> None:
        """Look at a step, until `watching` is unset: its random streams, module settings and gradients."""
        self.watching, self.streams, self.modules, self.gradients = True, [], None, {}

    def _loss(self, model: nn.Module, batch: Batch) -> Any:
        assert self.person.loss is not None
        if self.dictated is not None:
            self._note_piece(batch)
            return self.dictated(model, batch)
        if not self.watching or recomputing() or capturing():
            return self.person.loss(model, batch)
        self.modules = self.modules or facts_of_modules([model])
        loss = self.person.loss(model, batch)
        self.streams.append(derive(*every_random_state().tolist()))
        return loss

    def _step(self, models: object, optimizer: torch.optim.Optimizer, batch: Batch) -> Any:
        assert self.person.step is not None
        if self.dictated is not None:
            self._note_piece(batch)
            return torch.zeros(())
        return self.person.step(models, optimizer, batch)

    def _on_gradients(self, model: nn.Module) -> None:
        self._note_gradients(model.named_parameters())
        assert self.person.on_gradients is not None
        if self.overflows:
            return
        self.person.on_gradients(model)

    def _note_gradients(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        if self.watching and not capturing():
            for name, p in parameters:
                if p.grad is not None:
                    self.gradients.setdefault(name, whole(p.grad).to_dense().clone())

    def _note_piece(self, batch: Batch) -> None:
        self.asked = True
        if not (recomputing() or capturing()):
            self.pieces.append(map_tensors(batch, torch.Tensor.clone))


def recomputing() -> bool:
    """Does the backward pass run this (activation checkpointing)?"""
    return in_backward()


def capturing() -> bool:
    """Is a CUDA graph being captured, in which nothing may be copied to the host?"""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def random_state() -> torch.Tensor:
    """The states of torch's random streams, of the CPU and of the GPU in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def every_random_state() -> torch.Tensor:
    """The states of torch's random streams, and a digest of Python's and NumPy's."""
    state = host_state()
    name, keys, *rest = state["numpy"]
    digest = derive(state["python"], name, keys.tobytes(), rest).to_bytes(8, "big")
    return torch.cat([random_state(), torch.tensor(list(digest), dtype=torch.uint8)])


def same_data(pieces: list[Any], batch: Batch, roundoff: float) -> bool:
    """Do the pieces of a batch, one after the other, hold what the batch holds? Floats may be rounded."""
    parts = [list(tensors(piece)) for piece in pieces]
    whole = list(tensors(batch))
    if not parts or any(len(part) != len(whole) for part in parts):
        return False
    samples = batch_size(batch)
    for index, theirs in enumerate(whole):
        found = [part[index] for part in parts]
        if len(parts) > 1 and theirs.dim() and theirs.shape[0] == samples:
            if any(f.shape[1:] != theirs.shape[1:] for f in found):
                return False
            found = [torch.cat(found)]
        if not all(_same_tensor(f, theirs.to(f.device), roundoff) for f in found):
            return False
    return True


def _same_tensor(mine: torch.Tensor, theirs: torch.Tensor, roundoff: float) -> bool:
    if mine.shape != theirs.shape:
        return False
    if not (mine.is_floating_point() and theirs.is_floating_point()):
        return torch.equal(mine, theirs)
    gap = torch.finfo(mine.dtype).tiny
    return torch.allclose(mine.double(), theirs.double(), rtol=roundoff, atol=gap, equal_nan=True)
