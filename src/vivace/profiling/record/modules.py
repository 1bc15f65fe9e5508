"""Which module runs: names of modules as ranges of the trace, and a stack of them for what is counted."""

from __future__ import annotations

from typing import Any

from torch import nn

from vivace.profiling.record import facts
from vivace.profiling.record.guard import Guard
from vivace.profiling.record.hooks import named_range

_global_hooks = nn.modules.module


class ModuleRanges:
    """Global forward hooks that keep the stack of running modules, under the names that a person knows.

    Where torch.compile is at work it stays silent: hooks would be compiled too.
    """

    def __init__(self, guard: Guard, *, annotate: bool = False) -> None:
        self.guard, self.annotate = guard, annotate
        self.stack: list[str] = []
        self.roots: dict[str, nn.Module] = {}
        self.silent = facts.compiles()
        self._names: dict[int, str] = {}
        self._ranges: list[Any] = []
        self._handles: list[Any] = []

    def install(self) -> None:
        """Hook every module's call, to know inside of which one an operator runs."""
        if self.silent:
            return
        self._handles = [
            _global_hooks.register_module_forward_pre_hook(self.guard.looking(self._enter)),
            _global_hooks.register_module_forward_hook(self.guard.looking(self._leave), always_call=True),
        ]

    def restore(self) -> None:
        """Remove the hooks, and leave the ranges that are open."""
        for handle in self._handles:
            handle.remove()
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not self.stack and id(module) not in self._names:
            root = self._new_root(module)
            self.roots[root] = module
            for name, part in module.named_modules():
                self._names[id(part)] = f"{root}.{name}" if name else root
        name = self._name(module)
        self.stack.append(name)
        if self.annotate:
            self._ranges.append(named_range(f"module:{name}"))

    def _new_root(self, module: nn.Module) -> str:
        """Its class; a second model of that class, such as the other network of a pair, is counted."""
        kind = name = type(module).__name__
        number = 1
        while name in self.roots and next(module.parameters(), None) is not None:
            number += 1
            name = f"{kind} {number}"
        return name

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], result: object) -> None:
        if self.stack:
            self.stack.pop()
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def _name(self, module: nn.Module) -> str:
        return self._names.get(id(module), type(module).__name__)
