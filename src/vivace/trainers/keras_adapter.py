"""A Keras model as torch knows it: one `nn.Module`, and its optimizer as a `torch.optim.Optimizer`.

Both share their memory with Keras' variables, and compute by Keras' own code: the step is the one of `fit`.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

DECAYING = "use_weight_decay"  # a method of Keras' optimizers with _ before it: does this variable decay?


class KerasModule(nn.Module):
    """A Keras model: trainable variables are parameters; all others (moving averages, seeds) are buffers.

    Keras makes parameters of everything. As buffers they are compared, saved and put back like any network's.
    `names` are those of its variables: a copy's own differ, since Keras numbers what it makes.
    """

    keras_model: Any

    def __init__(self, keras_model: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.__dict__["keras_model"] = keras_model  # a submodule would list every weight a second time
        self.takes_training = "training" in inspect.signature(keras_model.call).parameters
        trained = {id(variable) for variable in keras_model.trainable_variables}
        for name, variable in zip(names, keras_model.variables, strict=True):
            if id(variable) in trained:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value.detach())

    def forward(self, inputs: object) -> Any:
        """The model's outputs, in training or in evaluation mode as the module is."""
        if self.takes_training:
            return self.keras_model(inputs, training=self.training)
        return self.keras_model(inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModule:
        """A copy whose parameters belong to a Keras model of its own."""
        copied = KerasModule(copy_of(self.keras_model), self.names)
        copied.train(self.training)
        memo[id(self)] = copied
        return copied


class KerasOptimizer(torch.optim.Optimizer):
    """The optimizer that a Keras model was compiled with; `step` is Keras' own update of all weights at once.

    Its state is Keras' variables: `load_state_dict` writes into them. The group's learning rate is Keras',
    and setting it sets Keras'; where a schedule decides it, it is shown and cannot be set (ValueError).
    """

    def __init__(self, module: KerasModule) -> None:
        keras_model = module.keras_model
        self.keras_optimizer = keras_model.optimizer
        self.trained = list(keras_model.trainable_variables)
        if not self.keras_optimizer.built:
            self.keras_optimizer.build(self.trained)
        self.scheduled = isinstance(self.keras_optimizer.get_config()["learning_rate"], dict)
        self.told = float(self.keras_optimizer.learning_rate)
        decay = float(self.keras_optimizer.weight_decay or 0.0)
        super().__init__([v.value for v in self.trained], {"lr": self.told, "weight_decay": decay})
        self._show_state()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update the weights as `fit` does, learning-rate schedule, clipping and constraints included."""
        del closure
        self._take_state()
        self._take_learning_rate()
        with torch.no_grad():
            self.keras_optimizer.apply([v.value.grad for v in self.trained], self.trained)
        if self.scheduled:
            self.told = self.param_groups[0]["lr"] = float(self.keras_optimizer.learning_rate)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, into Keras' own variables."""
        super().load_state_dict(state_dict)
        self.told = self.param_groups[0]["lr"]
        self._take_state()

    def _variables(self) -> Iterator[tuple[str, Any]]:
        """By name; torch leaves the numbers of one called ``step`` as they are, and rounds others to fp32."""
        for name, variable in named_variables(self.keras_optimizer.variables):
            yield "step" if variable is self.keras_optimizer.iterations else name, variable

    def _show_state(self) -> None:
        """Let torch's `state` be views of Keras' variables."""
        shown = {name: variable.value.detach() for name, variable in self._variables()}
        self.state[self.param_groups[0]["params"][0]] = shown

    def _take_state(self) -> None:
        """Copy what was put into torch's `state` in place of a variable into that variable."""
        state = self.state.get(self.param_groups[0]["params"][0]) or {}
        for name, variable in self._variables():
            given = state.get(name)
            if given is not None and given.data_ptr() != variable.value.data_ptr():
                with torch.no_grad():
                    variable.value.copy_(given)
        self._show_state()

    def _take_learning_rate(self) -> None:
        wanted = float(self.param_groups[0]["lr"])
        if wanted == self.told:
            return
        if self.scheduled:
            raise ValueError("a schedule of Keras decides the learning rate, so that it cannot be set")
        self.keras_optimizer.learning_rate = wanted
        self.told = wanted


def optimizer_of(module: KerasModule) -> KerasOptimizer:
    """The wrapped optimizer of a module; its class is called after Keras', as in ``KerasAdam``."""
    name = f"Keras{type(module.keras_model.optimizer).__name__}"
    found: KerasOptimizer = type(name, (KerasOptimizer,), {})(module)
    return found


def named_variables(variables: list[Any]) -> Iterator[tuple[str, Any]]:
    """Variables by their paths, made fit for torch and different from each other."""
    taken: set[str] = set()
    for index, variable in enumerate(variables):
        name = str(variable.path).replace(".", "_")
        name = f"{name}.{index}".replace(".", "_") if name in taken else name
        taken.add(name)
        yield name, variable


def frozen(keras_model: Any) -> bytes:
    """A Keras model as Keras saves it, and which of its variables the optimizer's weight decay leaves out,
    which Keras does not save.
    """
    decays = getattr(keras_model.optimizer, f"_{DECAYING}")
    return pickle.dumps((keras_model, [decays(variable) for variable in keras_model.variables]))


def thawed(data: bytes) -> Any:
    """The model that was frozen, anew; Keras does not save the values of all its variables."""
    keras_model, decayed = pickle.loads(data)
    left_out = [one for one, decays in zip(keras_model.variables, decayed, strict=True) if not decays]
    if left_out:
        keras_model.optimizer.exclude_from_weight_decay(left_out)
    return keras_model


def copy_of(keras_model: object) -> Any:
    """A Keras model once more, with its own variables of the same values, seeds and optimizer included."""
    copied = thawed(frozen(keras_model))
    take_over(copied, keras_model)
    return copied


def take_over(model: Any, source: Any) -> None:
    """Give a Keras model the values of another one of the same make, and of its optimizer."""
    pairs = list(zip(model.variables, source.variables, strict=True))
    if source.optimizer.built:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        pairs += zip(model.optimizer.variables, source.optimizer.variables, strict=True)
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.value.copy_(theirs.value)
