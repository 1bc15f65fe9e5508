"""Asking the plain model for its outputs in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vivace.errors import ran_out_of_memory
from vivace.job import Batch, Job
from vivace.session.session import Session
from vivace.tensors.randomness import Streams
from vivace.tensors.trees import tensors
from vivace.verifying.displacement import State
from vivace.verifying.draws import LogicalDraws
from vivace.verifying.states import clone, load_state


class Evaluation:
    """The plain model's outputs on one placed batch in evaluation mode.

    Some models put out something else in that mode than their loss takes: torchvision's detectors return
    boxes, as many as they find, instead of losses, and GoogLeNet leaves auxiliary outputs away. For these,
    which the first evaluation tells, only torch's own modules are put into that mode (what BatchNorm and
    Dropout do is what a plan could spoil), and the outputs are those with which the model trains.
    """

    def __init__(self, job: Job, batch: Batch) -> None:
        self.job = job
        self.batch = batch
        self.whole: bool | None = None

    def __call__(self, session: Session, state: State) -> torch.Tensor:
        """All floating-point outputs with the weights and buffers of `state`, as one vector; a single zero
        for a job with its own step.
        """
        load_state(session, state)
        if self.job.loss is None:
            return torch.zeros(1)
        if self.whole is not None:
            return self._outputs(session, self.whole)
        try:
            outputs = self._outputs(session, whole=True)
            self.whole = True
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            outputs = self._outputs(session, whole=False)
            self.whole = False
        return outputs

    def as_it_is(self, session: Session) -> torch.Tensor:
        """The same of the session's weights as they are, under random streams that go on as before."""
        if self.job.loss is None or self.whole is None:
            return torch.zeros(1)
        with Streams(0, session.build.device):
            return self._outputs(session, self.whole)

    def _outputs(self, session: Session, whole: bool) -> torch.Tensor:
        assert self.job.loss is not None
        outputs: list[torch.Tensor] = []
        (model,) = session.build.models
        modes = [(module, module.training) for module in model.modules()]
        hook = model.register_forward_hook(_keep(outputs))
        try:
            if whole:
                model.eval()
            else:
                for module in filter(_of_torch, model.modules()):
                    module.training = False
            torch.manual_seed(2)
            with session.whole(), torch.no_grad(), LogicalDraws():
                self.job.loss(model, clone(self.batch))
        finally:
            for module, mode in modes:
                module.training = mode
            hook.remove()
        return torch.cat(outputs) if outputs else torch.zeros(1)


def _of_torch(module: nn.Module) -> bool:
    """Is its behaviour in evaluation mode torch's own? A container has none."""
    homes = {base.__module__ for base in type(module).__mro__ if base is not nn.Module}
    return any(home.startswith("torch.nn.modules.") and not home.endswith(".container") for home in homes)


def _keep(outputs: list[torch.Tensor]) -> Callable[..., None]:
    def keep(module: nn.Module, arguments: object, output: object) -> None:
        found = (tensor for tensor in tensors(output) if tensor.is_floating_point())
        outputs.extend(tensor.detach().float().flatten() for tensor in found)

    return keep
