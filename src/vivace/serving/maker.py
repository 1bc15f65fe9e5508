"""The child that has the person's model: makes a form's file, and says how far rounding moves the outputs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from vivace.job import Job
from vivace.serving import making
from vivace.serving.calls import Calls, read_arrays, write_arrays
from vivace.serving.envelope import ROUNDOFF, run, shadows
from vivace.serving.forms import form_named
from vivace.serving.layers import Layers
from vivace.serving.material import Material, gather

PROOF_SAMPLES = 256


class Maker:
    """Serves `vivace.processes.launch.Child`: each method is a command with JSON arguments and answer.

    Args:
        run: the run folder whose weights are meant; empty: those that the job begins with.
        folder: where the calls are recorded.
    """

    def __init__(self, job: Job, run: str, folder: str, threads: int) -> None:
        self.job, self.run, self.folder, self.threads = job, run, Path(folder), threads
        self.calls = Calls.load(self.folder)
        self._material: Material | None = None
        self._layers: Layers | None = None
        torch.set_num_threads(threads)

    def write(self, form: str, folder: str) -> dict[str, Any]:
        """Make the form's file in a folder; its bytes."""
        begin = time.perf_counter()
        size = making.write(form_named(form), self._gathered(), Path(folder))
        return {"bytes": size, "seconds": time.perf_counter() - begin}

    def weights(self, path: str) -> list[str]:
        """Write the tensors of the person's own `state_dict` as safetensors, which holds no code; tied ones
        by each name. The names of what else is in it.
        """
        from safetensors.torch import save_file

        state = self.material.flat.model.state_dict()
        found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        whole = {n: tensor.clone(memory_format=torch.contiguous_format) for n, tensor in found.items()}
        save_file(whole, path)
        return [name for name in state if name not in found]

    def envelope(self, numbers: str, samples: int = PROOF_SAMPLES) -> list[float]:
        """How far rounding to a number format moves each output of the model, on the first samples."""
        return shadows(self.material.flat, self.calls.first(samples), ROUNDOFF[numbers])

    def answer(self, calls: str, path: str) -> None:
        """What the model as it is returns for the calls of a file."""
        write_arrays(Path(path), [run(self.material.flat, arrays) for arrays in read_arrays(Path(calls))])

    def layers(self, form: str, calls: str) -> dict[str, Any]:
        """For each layer of the model the names that its output may have in the form's file; how many of the
        calls of a file are compared.
        """
        asked = read_arrays(Path(calls))
        self._layers = Layers(self.material.flat, self._gathered(), form_named(form), asked)
        return {"values": self._layers.values, "calls": self._layers.calls}

    def layer_checks(self, told: list[int], path: str) -> list[dict[str, Any]]:
        """How far the layers of these places are, in a file of their outputs, from the model's."""
        assert self._layers is not None
        return [check.to_dict() for check in self._layers.checks(read_arrays(Path(path)), told)]

    @property
    def material(self) -> Material:
        """The model that is called, with its calls, loaded once. One that is traced is another."""
        if self._material is None:
            self._material = self._gathered()
        return self._material

    def _gathered(self) -> Material:
        return gather(self.job, self.run, self.folder)
