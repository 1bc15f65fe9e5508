"""Optimizer state in host memory, brought to the device for one part of the parameters at a time.

The update itself runs on the device, on the same numbers: no bit changes.
Source: https://arxiv.org/abs/2101.06840
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from vivace.tensors.optimizers import restricted
from vivace.tensors.page_locked import page_locking
from vivace.tensors.trees import bytes_of


class HostedState:
    """Keeps an optimizer's large state tensors in (pinned) host memory between steps.

    Args:
        optimizer: of which parameters can be updated one by one.
        device: where the parameters are.
        part_bytes: how much of the parameters is updated at a time.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, part_bytes: int) -> None:
        self.optimizer, self.device, self.part_bytes = optimizer, device, part_bytes
        self.side: Any = None
        if device.type == "cuda":
            self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.hosted: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.removes: list[Callable[[], None]] = [
            optimizer.register_state_dict_pre_hook(lambda _: self.wait()).remove,
            optimizer.register_load_state_dict_post_hook(lambda _: self.adopt()).remove,
        ]
        try:
            self.adopt()
        except BaseException:  # such as that page-locked memory is full
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of state in host memory."""
        return bytes_of(t for named in self.hosted.values() for t in named.values())

    def update(self) -> None:
        """One step of the optimizer, part by part; the state of the next part comes while one is updated."""
        parts = list(self._parts())
        arriving = self._bring(parts[0]) if parts else None
        for number, part in enumerate(parts):
            if arriving is not None:
                torch.cuda.current_stream(self.device).wait_event(arriving)
            following = parts[number + 1] if number + 1 < len(parts) else []
            arriving = self._bring(following)
            with restricted(self.optimizer, part):
                self.optimizer.step()
            self._take_back(part)

    def adopt(self) -> None:
        """Move state that stands on the device to the host, such as a checkpoint's after loading."""
        self.hosted.clear()
        self._take_back(list(self.optimizer.state))
        self.wait()

    def wait(self) -> None:
        """Let all copies arrive before somebody reads the state."""
        if self.side is not None:
            self.side.synchronize()

    def close(self) -> None:
        """Bring all state back for good."""
        self.wait()
        for remove in self.removes:
            remove()
        for parameter, named in self.hosted.items():
            for name, host in named.items():
                self.optimizer.state[parameter][name] = host.to(self.device)
        self.hosted.clear()

    def _parts(self) -> Iterator[list[torch.Tensor]]:
        part: list[torch.Tensor] = []
        size = 0
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                part.append(parameter)
                size += parameter.numel() * parameter.element_size()
                if size >= self.part_bytes:
                    yield part
                    part, size = [], 0
        if part:
            yield part

    def _bring(self, part: list[torch.Tensor]) -> Any:
        """Copy the state of a part to the device, on the side stream; the event of its arrival."""
        with self._on_side():
            for parameter in part:
                state = self.optimizer.state.get(parameter, {})
                for name, host in self.hosted.get(parameter, {}).items():
                    state[name] = host.to(self.device, non_blocking=True, copy=True)
        return self.side.record_event() if self.side is not None else None

    def _take_back(self, part: list[torch.Tensor]) -> None:
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_side():
            for parameter in part:
                state = self.optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if (
                        not isinstance(value, torch.Tensor)
                        or value.numel() < 2
                        or value.device != self.device
                    ):
                        continue
                    named = self.hosted.setdefault(parameter, {})
                    if name not in named:
                        with page_locking():
                            on_side = self.side is not None
                            named[name] = torch.empty_like(value, device="cpu", pin_memory=on_side)
                    host = named[name]
                    host.copy_(value, non_blocking=True)
                    if self.side is not None:
                        value.record_stream(self.side)
                        # The main stream updates what was made on the side stream.
                        value.record_stream(torch.cuda.current_stream(self.device))
                    state[name] = host

    def _on_side(self) -> Any:
        return torch.cuda.stream(self.side) if self.side is not None else nullcontext()
