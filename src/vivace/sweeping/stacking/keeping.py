"""Checkpoints of rows: those that `train` writes, so that a run which a kill has ended goes on in a stack or
alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from vivace.errors import Refused
from vivace.files import own_folder
from vivace.sweeping.folder import CHECKPOINTS, PLAN, can_go_on
from vivace.sweeping.stacking.rows import Row
from vivace.sweeping.stacking.stack import Stack
from vivace.tensors.randomness import from_plain, to_plain
from vivace.tensors.trees import map_tensors
from vivace.training.beside import Beside
from vivace.training.checkpoints import Checkpoints, Found, Position
from vivace.training.course import course_of
from vivace.training.folder import LEDGER
from vivace.training.resuming import compare, facts_of, load_beside, load_into, state_of

LOG = "metrics.jsonl"


class Keeper:
    """Keeps one row in its run folder; opened, the row stands where the newest checkpoint there does.

    Raises Refused where that is in the middle of an epoch, or at the end; CheckpointError and JobError as a
    resumed `train` does.
    """

    def __init__(self, row: Row, out: Path) -> None:
        self.row, self.out = row, out
        facts = facts_of(row.session, row.loader, row.seed, 1)
        facts["course"] |= course_of(row.job, row.session.optimizers, row.scheduler)
        self._checkpoints = Checkpoints(out / CHECKPOINTS, facts, out / LEDGER)
        # As of replayed steps: what a stack writes into its matrix counts no version of a row's own buffer.
        self._beside = Beside(row.session.build.models, captured=True, plain=False)
        if not can_go_on(out):
            return
        found = self._checkpoints.newest()
        if found is not None:
            compare(found.manifest, facts, out, changed_ok=False)
            self._take_up(found)

    def save(self, stack: Stack, slot: int) -> None:
        """Write a checkpoint of the row that stands in this slot, between two epochs. Raises FolderError."""
        row = self.row
        if not can_go_on(self.out):
            own_folder(self.out / CHECKPOINTS)
            row.session.plan.save(self.out / PLAN)
        log_bytes = (self.out / LOG).stat().st_size
        position = Position(row.steps, row.epoch, 0, log_bytes, row.loss, row.metric, row.steps)
        with stack.lent(slot):
            state = {
                "optimizer": state_of(row.session.optimizer),
                "scheduler": state_of(row.scheduler),
                "techniques": state_of(row.session.build.kept),
                "streams": [to_plain(row.streams_now())],
                "data": None,
                "beside": map_tensors(self._beside.state(), torch.clone),
            }
            weights = map_tensors(state_of(row.session.built), torch.clone)  # of views a file holds the whole
            self._checkpoints.save(position, weights, state)

    def _take_up(self, found: Found) -> None:
        row, position, state = self.row, found.position, found.state
        if position.batch or position.epoch >= row.job.epochs:
            raise Refused("it goes on alone, where its checkpoint stands")
        load_into(row.session.built, found.model, "the model")
        names = _buffers(row)
        load_beside(self._beside, state.get("beside", []))
        if _buffers(row) != names:
            raise Refused("it goes on alone, as its steps make buffers that others do not have yet")
        load_into(row.session.optimizer, state["optimizer"], "the optimizer")
        load_into(row.scheduler, state["scheduler"], "the scheduler")
        row.take_up(position.step, position.epoch, from_plain(state["streams"][0]))
        if (self.out / LOG).exists():
            os.truncate(self.out / LOG, position.log_bytes)


def _buffers(row: Row) -> list[str]:
    return [name for model in row.session.build.models for name, _ in model.named_buffers()]
