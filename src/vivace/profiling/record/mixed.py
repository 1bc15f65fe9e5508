"""How mixed precision is used: autocast regions, scaled losses, when gradients are clipped, skipped steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.optim import optimizer as optimizers

from vivace.profiling.record.guard import Guard
from vivace.profiling.record.hooks import LoopHooks, Patches
from vivace.profiling.record.sites import calling_site
from vivace.tensors.trees import tensors
from vivace.torch_internals.modules import is_acting
from vivace.torch_internals.tensors import dense_parts

SMALLEST_NORMAL = 2.0**-14  # of float16
SAMPLE = 256  # gradients of the largest weight
CHANGING = 1.01


class PrecisionWatch:
    """Notes what is done with autocast, GradScaler and clipping, by the person's line."""

    def __init__(self, hooks: LoopHooks, guard: Guard) -> None:
        self.hooks, self.guard = hooks, guard
        self._patches = Patches(guard)
        self.counts: Counter[str] = Counter()
        self.sites: dict[str, str] = {}
        self.dtypes: Counter[str] = Counter()
        self.not_finite: str | None = None
        self.examine = False
        self._tiny: list[float] = []
        self._tiniest: Counter[int] = Counter()  # such gradients, by the parameter's id
        self._overflown: int | None = None
        self._norm: tuple[Any, float, float] | None = None
        self._unscaled: set[int] = set()
        self._scaled = False
        self._updated = False  # by the optimizer that the scaler steps
        self._found_inf: list[torch.Tensor] = []  # for optimizers that skip steps themselves
        self._scaled_nodes: list[Any] = []  # of this step's backward graphs, where losses were scaled
        self._passes: set[bool] = set()  # of this step: from a scaled loss or not
        self._sample: tuple[Any, torch.Tensor] | None = None  # of scaled gradients as the pass left them
        self._factors: list[float] = []  # by which they were changed before GradScaler.step
        self._scheduled: set[int] = set()  # optimizers whose rate was stepped since the scaler stepped them

    def install(self) -> None:
        """Patch autocast, GradScaler and the clipping functions."""
        patches = self._patches
        self.hooks.on_backward = self.guard.looking(self._went_backward)
        self.hooks.on_collective = self.guard.looking(self._forget_sample)
        patches.replace(torch.autocast, "__enter__", self._enter_autocast)
        patches.replace(torch.amp.GradScaler, "scale", self._scale)
        patches.replace(torch.amp.GradScaler, "unscale_", self._unscale)
        patches.replace(torch.amp.GradScaler, "step", self._step)
        patches.replace(torch.amp.GradScaler, "update", self._update)
        patches.replace(torch.amp.GradScaler, "get_scale", self._get_scale)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for place in (torch.nn.utils, torch.nn.utils.clip_grad):
                patches.replace(place, name, self._clip)
        for scheduler in (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.SequentialLR):
            patches.replace(scheduler, "step", self._schedule)  # at a milestone none that it holds steps
        handle = optimizers.register_optimizer_step_pre_hook(self.guard.looking(self._before_update))
        patches.hook(handle)

    def restore(self) -> None:
        """Leave torch as it was, and let go of the loop's tensors."""
        self._patches.restore()
        self._norm = self._sample = None
        self._scaled_nodes.clear()
        self._found_inf.clear()

    def begin(self) -> None:
        """The timed window begins: forget the warm-up, where a scaler finds its scale."""
        self.counts.clear()
        self._scheduled.clear()
        self._found_inf.clear()

    def result(self, steps: int) -> dict[str, Any]:
        """Counts over the timed window, the lines that did it, and the gradients' state.

        Where watching ended with a fault, nothing is known.
        """
        if self.guard.off:
            return {"steps": steps}
        return {
            **self.counts,
            "skipped": self.counts["skipped"] + sum(map(bool, self._found_inf)),
            "steps": steps,
            "sites": self.sites,
            "autocast_dtypes": dict(self.dtypes),
            "not_finite": self.not_finite,
        }

    def _note(self, what: str) -> None:
        self.counts[what] += 1
        if what not in self.sites:
            self.sites[what] = calling_site()

    def _enter_autocast(self, original: Callable[..., Any]) -> Any:
        def enter(context: torch.autocast) -> Any:
            if is_acting(context):
                if torch.is_grad_enabled():  # else it is for a teacher or for validation
                    self._note("autocast")
                self.dtypes[str(context.fast_dtype).removeprefix("torch.")] += 1
            return original(context)

        return enter

    def _scale(self, original: Callable[..., Any]) -> Any:
        def scale(scaler: torch.amp.GradScaler, outputs: object) -> Any:
            if scaler.is_enabled():
                self._scaled = True
                self._note("scale")
            scaled = original(scaler, outputs)
            if scaler.is_enabled():
                self._scaled_nodes += [t.grad_fn for t in tensors(scaled) if t.grad_fn is not None]
            return scaled

        return scale

    def _unscale(self, original: Callable[..., Any]) -> Any:
        def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Any:
            if self.hooks.clock.inside is None:  # GradScaler.step calls it itself where nobody did
                self._note("unscale")
            self._unscaled.add(id(optimizer))
            return original(scaler, optimizer)

        return unscale

    def _step(self, original: Callable[..., Any]) -> Any:
        def step(
            scaler: torch.amp.GradScaler,
            optimizer: torch.optim.Optimizer,
            *arguments: object,
            **keywords: object,
        ) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *arguments, **keywords)
            self._updated = False
            self._scheduled.discard(id(optimizer))
            self._notice_division()
            self._notice_change()
            if self._passes == {True, False} and len(self.hooks.optimizers) == 1:
                self.counts["unscaled_loss"] += 1
            self.hooks.clock.push("update")
            try:
                result = original(scaler, optimizer, *arguments, **keywords)
            finally:
                self.hooks.clock.pop()
            self.counts["scaler_steps"] += 1
            if not self._updated:
                self.counts["skipped"] += 1
                self._find_overflow(optimizer)
                self.hooks.clock.updated(id(optimizer))
            return result

        return step

    def _get_scale(self, original: Callable[..., Any]) -> Any:
        def get_scale(scaler: torch.amp.GradScaler) -> Any:
            scale = original(scaler)
            if self._scaled and scale > 1 and not self._unscaled and self.hooks.clock.step.backwards:
                parameter = self._largest_gradient()
                if parameter is not None:
                    self._norm = (parameter, float(parameter.grad.norm()), scale)
            return scale

        return get_scale

    def _largest_gradient(self) -> Any:
        groups = (g["params"] for o in self.hooks.optimizers.values() for g in o.param_groups)
        found = [p for group in groups for p in group if p.grad is not None]
        return max(found, key=lambda p: p.grad.numel(), default=None)

    def _notice_division(self) -> None:
        """Were gradients divided by the scale between asking for it and `GradScaler.step`?"""
        if self._norm is None:
            return
        parameter, before, scale = self._norm
        self._norm = None
        after = float(parameter.grad.norm()) if parameter.grad is not None else before
        if before > 0 and 0.9 < after * scale / before < 1.1:
            self.counts["unscaled_by_hand"] += 1

    def _went_backward(self, losses: object) -> None:
        """Was this pass from a scaled loss, or from what was made of one? Keeps a few of its gradients."""
        if not self.counts["scale"]:
            return
        scaled = any(self._leads_to_scaled(loss.grad_fn) for loss in tensors(losses))
        self._passes.add(scaled)
        if not scaled and "unscaled_loss" not in self.sites:
            self.sites["unscaled_loss"] = calling_site()
        parameter = self._largest_gradient() if self.examine and not self._unscaled else None
        if parameter is None or parameter.grad.is_sparse:
            self._sample = None
        else:
            self._sample = (parameter, _some(parameter.grad).clone())

    def _leads_to_scaled(self, node: Node | None, depth: int = 6) -> bool:
        if node is None or not depth:
            return False
        if any(node is scaled for scaled in self._scaled_nodes):
            return True
        return any(self._leads_to_scaled(following, depth - 1) for following, _ in node.next_functions[:2])

    def _forget_sample(self) -> None:
        """Ranks average gradients by hand: the mean of scaled ones is as scaled."""
        self._sample = None

    def _notice_change(self) -> None:
        """Were gradients changed, other than to zero, between the backward pass and `GradScaler.step`?"""
        if self._sample is None or self._unscaled:
            return
        parameter, before = self._sample
        self._sample = None
        after = _some(parameter.grad) if parameter.grad is not None else before
        factor = float(after.norm() / before.norm())
        if bool(((after != before) & (after != 0)).any()) and 0 < factor < float("inf"):
            self._factors.append(factor)
            self.sites.setdefault("changed_scaled", calling_site())

    def changed_scaled(self) -> bool:
        """Were scaled gradients changed by another factor in each step? A constant one does no harm."""
        return len(self._factors) > 2 and max(self._factors) > CHANGING * min(self._factors)

    def tiny_share(self) -> float | None:
        """Mean share of the gradients that are not zero and below float16's normal numbers."""
        return sum(self._tiny) / len(self._tiny) if self._tiny else None

    def _update(self, original: Callable[..., Any]) -> Any:
        def update(scaler: torch.amp.GradScaler, *arguments: object, **keywords: object) -> Any:
            result = original(scaler, *arguments, **keywords)
            self._scaled = False
            self._unscaled.clear()
            self._scaled_nodes.clear()
            self._passes.clear()
            self.counts["scaler_updates"] += 1
            return result

        return update

    def _clip(self, original: Callable[..., Any]) -> Any:
        def clip(*arguments: object, **keywords: object) -> Any:
            self._note("clip")
            if self._scaled and not self._unscaled:
                self._note("clip_scaled")
            return original(*arguments, **keywords)

        return clip

    def _schedule(self, original: Callable[..., Any]) -> Any:
        def step(
            scheduler: torch.optim.lr_scheduler.LRScheduler, *arguments: object, **keywords: object
        ) -> Any:
            if id(scheduler.optimizer) not in self._scheduled:  # a chained scheduler steps all that it holds
                self._scheduled.add(id(scheduler.optimizer))
                self.counts["scheduled"] += 1
            return original(scheduler, *arguments, **keywords)

        return step

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._updated = True
        found_inf = vars(optimizer).get("found_inf")
        if found_inf is not None:  # where it is fused; read later, as the loop would wait for the device
            self._found_inf.append(found_inf)
            if self.examine and found_inf:
                self._find_overflow(optimizer)
        if self.examine:
            found = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            numbers = {id(p): dense_parts(p.grad)[-1] for p in found}
            tiny = {key: int(((n != 0) & (n.abs() < SMALLEST_NORMAL)).sum()) for key, n in numbers.items()}
            self._tiniest.update(tiny)
            self._tiny.append(sum(tiny.values()) / max(1, sum(int((n != 0).sum()) for n in numbers.values())))

    def _find_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """The first parameter, from the loss backwards, whose gradient is not finite."""
        if self.not_finite is not None:
            return
        found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        bad = [p for p in found if not bool(torch.isfinite(dense_parts(p.grad)[-1]).all())]
        self.not_finite = f"{len(bad)} of {len(found)} gradients" if bad else "none"
        self._overflown = id(bad[-1]) if bad else None

    def named(self, roots: dict[str, torch.nn.Module]) -> dict[str, str]:
        """Where gradients overflowed first, from the loss backwards, and where most of them are tiny."""
        names = {id(p): f"{root}.{name}" for root, m in roots.items() for name, p in m.named_parameters()}
        tiniest = self._tiniest.most_common(1)
        found = {}
        if self._overflown is not None and self._overflown in names:
            found["not_finite"] = f"{self.not_finite}, first that of {names[self._overflown]}"
        if tiniest and tiniest[0][1] and tiniest[0][0] in names:
            found["tiny_layer"] = names[tiniest[0][0]]
        return found


def _some(gradients: torch.Tensor) -> torch.Tensor:
    """About SAMPLE of them, from everywhere: all of one unit may be zero."""
    return gradients.flatten()[:: max(1, gradients.numel() // SAMPLE)]
