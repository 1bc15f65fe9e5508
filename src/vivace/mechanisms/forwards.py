"""Functions in the place of modules' forwards, for as long as a plan acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from vivace.job import Batch
from vivace.mechanisms.graphs import InPlace, put_in_place
from vivace.technique import Build, Seam
from vivace.tensors.modules import patched


def act_in_steps(
    build: Build, modules: Sequence[nn.Module], function: Callable[..., Any], *settings: object
) -> None:
    """Let ``function(module, own forward, *settings, *arguments)`` be each module's forward until the session
    closes; of a step of the person's own, while it runs.

    Who evaluates, copies or scripts a model between such steps finds its own forwards.
    """
    if not build.own_step:
        build.on_close(put_in_place(modules, function, *settings))
        return
    forwards = [InPlace(module, function, settings) for module in modules]

    def run(following: Callable[[Any], Any], batch: Batch) -> Any:
        with patched(modules, "forward", forwards):
            return following(batch)

    build.wrap(Seam.STEP, run)
