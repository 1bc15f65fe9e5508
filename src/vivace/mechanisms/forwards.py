"""Functions in the place of modules' forwards, for as long as a plan acts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from vivace.job import Batch
from vivace.mechanisms.graphs import InPlace, put_in_place
from vivace.technique import Build, Seam
from vivace.tensors.modules import modules_of, patched


def own_convolutions(models: Iterable[nn.Module]) -> list[nn.Conv2d]:
    """2-D convolutions of PyTorch's own class, but for those whose forward somebody else has replaced."""
    found = [m for model in models for m in modules_of(model, nn.Conv2d) if type(m) is nn.Conv2d]
    return [m for m in found if runs_its_own(m) and "_conv_forward" not in vars(m)]


def runs_its_own(module: nn.Module) -> bool:
    """Is a module's forward its class's own, or one that Vivace has put around that?"""
    replaced = vars(module).get("forward")
    while isinstance(replaced, functools.partial) and not (replaced.args or replaced.keywords):
        replaced = replaced.func  # of a module that was stored while a plan acted on it
    if getattr(replaced, "__func__", None) is type(module).forward:
        return True
    return replaced is None or str(getattr(replaced, "__module__", "")).startswith("vivace.")


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
