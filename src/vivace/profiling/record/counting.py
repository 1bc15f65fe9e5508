"""One step counted: operations and bytes by operator class, and by module what is kept for the backward."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vivace.profiling.record import facts
from vivace.profiling.record.guard import Guard
from vivace.profiling.record.hooks import LoopHooks
from vivace.profiling.record.modules import ModuleRanges
from vivace.tensors.trees import bytes_of
from vivace.torch_internals.tensors import (
    Operator,
    current_dispatch_mode,
    dense_parts,
    storage_id,
    storage_ids,
)
from vivace.work.bins import bins_of
from vivace.work.count import KernelCounter


class CountedStep:
    """Between `install` and `restore` lies one step of the loop. It counts nothing where `guard` is off."""

    def __init__(self, hooks: LoopHooks, guard: Guard) -> None:
        self.hooks, self.guard = hooks, guard
        self.modules = ModuleRanges(guard)
        self._kept: dict[int, Counter[str]] = defaultdict(Counter)  # by backward pass
        self._gradients: dict[int, int] = {}  # bytes by weight, which several updates may use
        self._seen: set[tuple[int, int]] = set()
        self._stack = contextlib.ExitStack()

    def install(self) -> None:
        """Begin to count operators, what they keep for the backward pass, and gradients."""
        trained = list(facts.parameters(self.hooks))
        self._weights = storage_ids([*trained, *facts.frozen(trained)])
        self.modules.install()
        pre_hook = register_optimizer_step_pre_hook(self.guard.looking(self._before_update))
        self._stack.callback(pre_hook.remove)
        self._counter = _GuardedCounter(self.hooks, self.guard)
        self._stack.enter_context(self._counter.closures())
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._stack.callback(self._leave_counter)
        if not self.modules.silent:
            noting = self.guard.looking(self._note_kept)

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                noting(tensor)
                return tensor

            saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            self._stack.enter_context(saving)

    def restore(self) -> None:
        """Stop counting, at the end of the step."""
        self._stack.close()
        self.modules.restore()
        if not self.hooks.optimizers:
            self._add_gradients(self.hooks.by_hand)

    def work(self) -> dict[str, Any]:
        """Operations and bytes by class of operators."""
        work = self._counter.work()
        dtypes: Counter[str] = Counter()
        phases = set[str]()
        shares: dict[str, Counter[int]] = defaultdict(Counter)
        for kernel in work.kernels:
            if kernel.flops and kernel.reads:
                shares[kernel.operator][kernel.reads[0].item_bytes] += kernel.flops
                phases.update([kernel.phase] if kernel.reads[0].item_bytes == 2 else [])
        for kind, sizes in shares.items():
            dtypes[f"{kind}:{sizes.most_common(1)[0][0]}"] = sum(sizes.values())
        return {
            "work": work.to_dict(),
            "flops": work.flops,
            "bytes": work.bytes,
            "bytes_fused": work.bytes_fused,
            "kernels": work.count,
            "bins": bins_of([k for k in work.kernels if k.phase != "update"], 1),
            "item_bytes": dict(dtypes),
            "narrow_phases": sorted(phases),
        }

    def kept(self) -> dict[str, Any]:
        """What autograd kept by module, and the gradients."""
        activations = max(self._kept.values(), key=Counter.total, default=Counter[str]())
        return {
            "activations": activations.most_common(40),
            "activation_bytes": activations.total(),
            "gradient_bytes": sum(self._gradients.values()),
            "silent_modules": self.modules.silent,
        }

    def _leave_counter(self) -> None:
        """Modes are left in the reverse order of entering: where the person entered one since, ours stays,
        and does nothing.
        """
        if current_dispatch_mode() is self._counter:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        else:
            self.guard.off = True

    def _note_kept(self, tensor: torch.Tensor) -> None:
        number, stack = self.hooks.clock.step.backwards, self.modules.stack
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            size = storage.nbytes()
            if not part.requires_grad:  # a piece of the data, all of which is there anyway
                size = min(size, bytes_of([part]))
            key = storage_id(storage)
            if (number, key) not in self._seen and key not in self._weights:
                self._seen.add((number, key))
                self._kept[number][stack[-1] if stack else "outside of modules"] += size

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._add_gradients(p for group in optimizer.param_groups for p in group["params"])

    def _add_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._gradients[id(parameter)] = bytes_of(dense_parts(parameter.grad))


class _GuardedCounter(KernelCounter):  # type: ignore[no-untyped-call]
    """Counts inside the person's own calls. What a data set computes is the loader's work, not the step's."""

    def __init__(self, hooks: LoopHooks, guard: Guard) -> None:
        super().__init__(lambda: hooks.clock.inside == "update")
        self._hooks = hooks
        self._noting = guard.looking(super().note)

    def note(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Note it, if that is possible."""
        if self._hooks.clock.inside != "data":
            self._noting(func, args, kwargs, result)
