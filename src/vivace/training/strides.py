"""The steps of a run, batch after batch: all that each costs, so that `tune` times what `train` runs."""

from __future__ import annotations

import math
from typing import Any

import torch

from vivace.job import Batch
from vivace.session.session import Session
from vivace.tensors.trees import batch_size
from vivace.training.checkpoints import Position
from vivace.training.finite import FAR, Growth
from vivace.training.ranks import Ranks
from vivace.training.survival import Survival
from vivace.training.watch import Watch

GLANCE_STEPS = 16


class Strides:
    """Takes steps of a session and keeps their accounts; what fails in a step is raised as it is.

    Args:
        session, ranks: of the run.
        watch: stands around every step.
    """

    survival: Survival
    growth: Growth

    def __init__(self, session: Session, ranks: Ranks, watch: Watch) -> None:
        self.session, self.ranks, self.watch = session, ranks, watch
        self.position = Position()
        self.samples = 0  # of this rank
        self.last_loss: Any = None
        self.glanced_at = self.looked_at_step = 0

    def begin(self) -> None:
        """Called once the session's weights and the position are those with which the steps begin."""
        self.survival, self.growth = Survival(self.session, self.ranks), Growth(self.session)
        self.looked_at_step = self.position.step

    def fetches(self) -> None:
        """Called before a batch is asked for."""
        position = self.position
        what = f"its data (batch {position.batch} of epoch {position.epoch + 1})"
        self.ranks.at(what, position.step)
        self.survival.own.fetches()

    def stride(self, batch: Batch) -> None:
        """The step of a batch that has come."""
        position = self.position
        self.survival.own.fetched()
        self.ranks.at(f"step {position.step + 1}", position.step + 1)
        loss = self.take(batch)
        self.last_loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self.samples += batch_size(batch)
        position.step += 1
        position.batch += 1

    def take(self, batch: Batch) -> Any:
        """One step of the session; its loss."""
        return self.watch.step(self.session, self.position, batch, self.survival.attempt)

    def glance(self) -> bool:
        """Between two looks: does what all ranks have alike call for one now?"""
        build = self.session.build
        alike = self.ranks.world_size == 1 or build.facts.ranks is not None
        if not alike or self.position.step - max(self.glanced_at, self.looked_at_step) < GLANCE_STEPS:
            return False
        self.glanced_at = self.position.step
        loss = float(self.last_loss)
        weights = self.growth.of_weights(self.session) if build.shards is None else 1.0
        return not math.isfinite(loss) or self.growth.judge(loss, weights)[0] > FAR
