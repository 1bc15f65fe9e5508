"""Asking the plain model for its outputs in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vivace.errors import ran_out_of_memory
from vivace.job import Batch, Job
from vivace.session.session import Session
from vivace.tensors.randomness import Streams
from vivace.tensors.trees import tensors
from vivace.verifying.displacement import State, output_distance, spread_of
from vivace.verifying.draws import LogicalDraws
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.judgement import LIMIT, check
from vivace.verifying.states import clone, load_state, state_of

HELD_OUT, HELD_OUT_FACTOR = "validation batch ", 2.0


class Evaluation:
    """The plain model's outputs in evaluation mode, on one placed batch and on those that are held out.

    Some models put out something else in that mode than their loss takes: torchvision's detectors return
    boxes, as many as they find, instead of losses, and GoogLeNet leaves auxiliary outputs away. For these,
    which the first evaluation tells, only torch's own modules are put into that mode (what BatchNorm and
    Dropout do is what a plan could spoil), and the outputs are those with which the model trains.
    """

    def __init__(self, job: Job, batch: Batch) -> None:
        self.job = job
        self.batch = batch
        self.held_out: list[Any] = []
        self.whole: bool | None = None

    def hold_out(self, session: Session, batches: Sequence[Batch]) -> None:
        """Look from now on also at such of these, validation data as they are loaded, as the loss can take.

        Nobody promised that it takes any; and those that are not finite say nothing.
        """
        self(session, state_of(session))
        for batch in batches if self.whole is not None else ():
            try:
                placed = session.place(batch)
                outputs = self._outputs(session, bool(self.whole), placed)
            except Exception:  # a person's code on other data than it was made for
                continue
            self.held_out += [placed] if outputs.isfinite().all() else []

    def everywhere(self, session: Session, state: State) -> list[torch.Tensor]:
        """Of the batch and of each that is held out, all floating-point outputs with the weights and buffers
        of `state`.
        """
        return [self(session, state), *self._of_held_out(session)]

    def __call__(self, session: Session, state: State) -> torch.Tensor:
        """All floating-point and complex outputs with the weights and buffers of `state`, as one vector; a
        single zero for a job with its own step.
        """
        load_state(session, state)
        if self.job.loss is None:
            return torch.zeros(1)
        if self.whole is not None:
            return self._outputs(session, self.whole, self.batch)
        try:
            outputs = self._outputs(session, True, self.batch)
            self.whole = True
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            outputs = self._outputs(session, False, self.batch)
            self.whole = False
        return outputs

    def as_it_is(self, session: Session) -> list[torch.Tensor]:
        """As `everywhere` of the session's weights as they are, under random streams that go on as before."""
        if self.job.loss is None or self.whole is None:
            return [torch.zeros(1)]
        with Streams(0, session.build.device):
            return [self._outputs(session, self.whole, self.batch), *self._of_held_out(session)]

    def _of_held_out(self, session: Session) -> list[torch.Tensor]:
        return [self._outputs(session, bool(self.whole), batch) for batch in self.held_out]

    def _outputs(self, session: Session, whole: bool, batch: Batch) -> torch.Tensor:
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
                self.job.loss(model, clone(batch))
        finally:
            for module, mode in modes:
                module.training = mode
            hook.remove()
        return torch.cat(outputs) if outputs else torch.zeros(1)


def checks_of(
    mine: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], roundoff: float, when: str = ""
) -> list[dict[str, Any]]:
    """The figures of evaluations under a plan, beside the plain model's with the same weights.

    The least spread of outputs is that of the first ones: few samples of validation data may give all but
    the same. Few of them also round unevenly, so twice the limit holds. What is not finite in the plain model
    says nothing.
    """
    found, least = [], 0.0
    for number, (ours, theirs) in enumerate(zip(mine, plain, strict=False)):
        if number and not theirs.isfinite().all():
            continue
        apart = output_distance(ours, theirs, least)
        least = spread_of(theirs) if not number else least
        measure, limit = Measure(Quantity.EVALUATION_UNDER_PLAN), LIMIT * (HELD_OUT_FACTOR if number else 1)
        figure = check(measure, 0, apart, 0.0, roundoff, floor=roundoff / 4, limit=limit)
        name = f"{measure}, {HELD_OUT}{number}" if number else f"{measure}"
        found.append(figure | {"name": f"{name}, {when or 'from step 0'}"})
    return found


def _of_torch(module: nn.Module) -> bool:
    """Is its behaviour in evaluation mode torch's own? A container has none."""
    homes = {base.__module__ for base in type(module).__mro__ if base is not nn.Module}
    return any(home.startswith("torch.nn.modules.") and not home.endswith(".container") for home in homes)


def _keep(outputs: list[torch.Tensor]) -> Callable[..., None]:
    def keep(module: nn.Module, arguments: object, output: object) -> None:
        for tensor in tensors(output):
            numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            if numbers.is_floating_point():
                outputs.append(numbers.detach().float().flatten())

    return keep
