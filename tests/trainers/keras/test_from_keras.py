"""A Job of a compiled Keras model: each step is that of `fit`, to the bit, and the weights go back."""

import copy

import numpy
import pytest
import torch

keras = pytest.importorskip("keras")

import vivace  # noqa: E402
from vivace.errors import JobError  # noqa: E402
from vivace.inspection import inspect  # noqa: E402
from vivace.plan import Plan  # noqa: E402
from vivace.session.opening import start  # noqa: E402
from vivace.trainers.keras_adapter import copy_of  # noqa: E402
from vivace.training.evaluation import Evaluation  # noqa: E402

SAMPLES, BATCH, CLASSES = 40, 8, 3
layers = keras.layers

NETWORKS = {
    "dense": ((6,), [layers.Dense(8, "relu", kernel_regularizer="l2"), layers.Dropout(0.5, seed=3)]),
    "convolution": (
        (8, 8, 2),
        [
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.BatchNormalization(),
            layers.Flatten(),
        ],
    ),
    "separable": ((8, 8, 2), [layers.SeparableConv2D(4, 3), layers.GlobalAveragePooling2D()]),
    "recurrent": ((5, 4), [layers.LSTM(6), layers.Dropout(0.2)]),
    "gated": ((5, 4), [layers.Bidirectional(layers.GRU(3))]),
    "attention": ((5, 4), None),
}
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0),
    "scheduled": lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.7)),
}


def network(kind="dense", optimizer=None, **compiled):
    keras.utils.set_random_seed(1)
    shape, body = NETWORKS[kind]
    inputs = keras.Input(shape)
    if body is None:
        found = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=3)(inputs, inputs)
        found = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(found + inputs))
    else:
        found = inputs
        for layer in body:
            found = type(layer).from_config(layer.get_config())(found)
    model = keras.Model(inputs, layers.Dense(CLASSES, "softmax")(found))
    how = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]} | compiled
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), **how)
    return model


def data(kind="dense", samples=SAMPLES):
    draw = numpy.random.default_rng(0)
    x = draw.normal(size=(samples, *NETWORKS[kind][0])).astype("float32")
    return x, draw.integers(0, CLASSES, samples)


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_epoch_begin(self, epoch, logs=None):
        torch.manual_seed(epoch)  # where a layer has no seed of its own, Keras draws from torch's stream

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


def assert_steps_are_those_of_fit(model, x, y, **given):
    """Two epochs: the running mean of the loss at every step, then all weights and the metric."""
    job = vivace.Job.from_keras(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, **given)
    theirs, recorder = copy_of(model), Recorder()
    given = {name: value for name, value in given.items() if name != "validation_data"}
    theirs.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[recorder], **given)
    losses = []
    with start(job, Plan(), inspect()) as session:
        for number in range(2):
            epoch = []
            torch.manual_seed(number)
            for batch in job.data():
                epoch.append(float(session.step(batch)))
                losses.append(sum(epoch) / len(epoch))
        mine = session.built.keras_model
        metric = Evaluation(job, session, seed=0).metric()
    assert losses == pytest.approx(recorder.losses, rel=1e-6)
    for one, other in zip(mine.variables, theirs.variables, strict=True):
        assert torch.equal(one.value, other.value), one.path
    for one, other in zip(mine.optimizer.variables, theirs.optimizer.variables, strict=True):
        assert torch.equal(one.value, other.value), one.path
    evaluated = theirs.evaluate(x, y, BATCH, verbose=0, return_dict=True)
    name = job.metric_name.removeprefix("minus ")
    assert abs(metric) == pytest.approx(evaluated[name], rel=1e-6)
    return job, metric


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_step_of_a_kind_of_layer_is_that_of_fit(kind):
    assert_steps_are_those_of_fit(network(kind), *data(kind))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_update_of_an_optimizer_is_that_of_fit(name):
    assert_steps_are_those_of_fit(network(optimizer=OPTIMIZERS[name]()), *data())


def test_what_weight_decay_leaves_out_is_left_out_by_a_copy_of_a_copy_as_well():
    model = network(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.5))
    model.optimizer.exclude_from_weight_decay([model.layers[-1].kernel])
    plain = network(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.5))
    weights = []
    for one in (model, plain):
        job = vivace.Job.from_keras(one, *data(), batch_size=BATCH, shuffle=False)
        module = copy.deepcopy(job.model())
        job.loss(module, next(iter(job.data()))).backward()
        job.optimizer(module).step()
        weights.append(module.keras_model.get_weights())
    same = [numpy.array_equal(mine, other) for mine, other in zip(*weights, strict=True)]
    assert [same[index] for index in (0, -2)] == [True, False]  # the kernels of the first layer and the last


def test_sample_weights_act_and_an_error_counts_with_the_other_sign():
    model = network(loss="mse", metrics=["mae"])
    x, _ = data()
    y = numpy.random.default_rng(1).normal(size=(SAMPLES, CLASSES)).astype("float32")
    weights = numpy.linspace(0, 2, SAMPLES).astype("float32")
    job, _ = assert_steps_are_those_of_fit(model, x, y, sample_weight=weights)
    assert job.metric_name == "minus mae"
    plain = vivace.Job.from_keras(model, x, y, batch_size=BATCH, shuffle=False)
    with start(job, Plan(), inspect()) as session, start(plain, Plan(), inspect()) as other:
        batch, bare = next(iter(job.data())), next(iter(plain.data()))
        assert float(session.step(batch)) != float(other.step(bare))


@pytest.mark.parametrize(
    ("metric", "is_error"),
    [
        (keras.losses.mean_absolute_error, True),
        (keras.losses.MeanAbsoluteError(), True),
        (keras.metrics.CosineSimilarity(), False),
    ],
)
def test_a_loss_as_the_metric_counts_with_the_other_sign(metric, is_error):
    model = network(loss="mse", metrics=[metric])
    job = vivace.Job.from_keras(model, data()[0], numpy.zeros((SAMPLES, CLASSES)))
    assert job.metric_name.startswith("minus ") is is_error


def test_the_metric_of_a_model_with_several_outputs_is_called_as_keras_calls_it(tmp_path):
    inputs = keras.Input((6,))
    heads = [layers.Dense(CLASSES, "softmax", name="kind")(inputs), layers.Dense(1, name="size")(inputs)]
    model = keras.Model(inputs, heads)
    losses = ["sparse_categorical_crossentropy", "mse"]
    model.compile("adam", losses, metrics={"size": ["mae"], "kind": ["accuracy"]})
    x, kinds = data()
    y = [kinds, x[:, :1]]
    job = vivace.Job.from_keras(model, x, y, batch_size=BATCH, validation_data=(x, y))
    assert job.metric_name == "kind_accuracy"
    run = vivace.train(job, out=tmp_path / "run")
    evaluated = model.evaluate(x, y, BATCH, verbose=0, return_dict=True)
    assert run.metric == pytest.approx(evaluated["kind_accuracy"], rel=1e-6)


def test_an_optimizer_goes_on_from_a_state_that_was_saved():
    x, y = data()
    job = vivace.Job.from_keras(network(optimizer=OPTIMIZERS["scheduled"]()), x, y, batch_size=BATCH)
    first, *others = list(job.data())
    with start(job, Plan(), inspect()) as one, start(job, Plan(), inspect()) as other:
        one.step(first)
        other.built.load_state_dict(one.built.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        for batch in others:
            assert float(one.step(batch)) == float(other.step(batch))
        assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"] < 0.01
        mine = one.built.keras_model.optimizer.iterations.value
        assert int(mine) == int(other.built.keras_model.optimizer.iterations.value) == len(others) + 1


def test_a_learning_rate_that_is_set_acts_and_a_scheduled_one_refuses():
    x, y = data()
    job = vivace.Job.from_keras(network(optimizer=keras.optimizers.SGD(0.1)), x, y, batch_size=BATCH)
    with start(job, Plan(), inspect()) as session:
        session.optimizer.param_groups[0]["lr"] = 0.0
        before = [p.detach().clone() for p in session.built.parameters()]
        session.step(next(iter(job.data())))
        assert all(torch.equal(a, b) for a, b in zip(before, session.built.parameters(), strict=True))
    job = vivace.Job.from_keras(network(optimizer=OPTIMIZERS["scheduled"]()), x, y, batch_size=BATCH)
    with start(job, Plan(), inspect()) as session:
        session.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(ValueError, match="a schedule of Keras decides"):
            session.step(next(iter(job.data())))


def test_trained_weights_go_back_and_the_model_is_saved(tmp_path):
    x, y = data()
    model = network("dense", metrics=["accuracy"])
    before = model.get_weights()
    job = vivace.Job.from_keras(model, x, y, batch_size=BATCH, epochs=2, validation_data=(x[:16], y[:16]))
    run = vivace.train(job, out=tmp_path / "run")
    after = model.get_weights()
    assert any(not numpy.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert int(model.optimizer.iterations.value) == run.steps == 10
    assert model.evaluate(x[:16], y[:16], verbose=0, return_dict=True)["accuracy"] == pytest.approx(
        run.metric
    )
    loaded = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert all(numpy.array_equal(a, b) for a, b in zip(after, loaded.get_weights(), strict=True))
    model.save(tmp_path / "own.keras")
    model.fit(x, y, BATCH, verbose=0)  # goes on where Vivace stopped


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    x, y = data("convolution")
    weights = []
    for name, stops in (("whole", [None]), ("parts", [3, None])):
        model = network("convolution")
        job = vivace.Job.from_keras(model, x, y, batch_size=BATCH, epochs=2)
        for number, stop in enumerate(stops):
            vivace.train(job, out=tmp_path / name, max_steps=stop, resume=number > 0)
        weights.append(model.get_weights())
    assert all(numpy.array_equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"callbacks": [keras.callbacks.EarlyStopping()]}, "the callback EarlyStopping of fit has no place"),
        ({"callbacks": [Recorder()]}, "the callback Recorder of fit has no place"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"y": numpy.zeros(3)}, "x, y and sample_weight must have one length of at least 1, not 3, 40"),
        ({"x": "pictures"}, "must be arrays, or lists, tuples and dictionaries of arrays, not a str"),
    ],
)
def test_arguments_that_a_job_cannot_have_are_named(change, message):
    x, y = data()
    given = {"x": x, "y": y, "batch_size": BATCH} | change
    with pytest.raises(JobError, match=message):
        vivace.Job.from_keras(network(), **given)


class OwnStep(keras.Model):
    def train_step(self, data):
        return {}


def of_own_step():
    inputs = keras.Input((6,))
    model = OwnStep(inputs, layers.Dense(CLASSES)(inputs))
    model.compile("adam", "mse")
    return model


def not_compiled():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(CLASSES)(inputs), name="plain")


def mixed():
    return keras.Sequential([keras.Input((6,)), layers.Dense(CLASSES, dtype="mixed_bfloat16", name="half")])


def compiled(model, **how):
    model.compile(**({"optimizer": "adam", "loss": "mse"} | how))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (not_compiled, "the model 'plain' is not compiled"),
        (of_own_step, "OwnStep has a train_step of its own"),
        (lambda: compiled(not_compiled(), jit_compile=True), "compiled with jit_compile=True"),
        (lambda: compiled(mixed()), "the layer 'half' has the dtype policy mixed_bfloat16"),
        (lambda: network(optimizer=keras.optimizers.Adam(use_ema=True)), r"averages the weights \(use_ema\)"),
        (
            lambda: network(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=4)),
            "accumulates gradients over 4 steps",
        ),
        (
            lambda: network(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
            "the optimizer LossScaleOptimizer scales the loss",
        ),
        (lambda: torch.nn.Linear(6, 3), "from_keras takes a keras.Model, not a Linear"),
    ],
)
def test_models_that_a_job_would_train_otherwise_are_refused(make, message):
    with pytest.raises(JobError, match=message):
        vivace.Job.from_keras(make(), *data(), batch_size=BATCH)


@keras.saving.register_keras_serializable("forgetting")
class Scaled(keras.losses.Loss):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def call(self, y_true, y_pred):
        return self.factor * keras.ops.mean(keras.ops.square(y_pred), -1)

    def get_config(self):
        return {}


@keras.saving.register_keras_serializable("forgetting")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, steps=2):
        self.steps = steps

    def __call__(self, step):
        return 0.1 * keras.ops.minimum(1.0, keras.ops.cast(step, "float32") / self.steps)

    def get_config(self):
        return {}


@keras.saving.register_keras_serializable("forgetting")
class Noisy(layers.Layer):
    """Its noise in training is drawn anew each time, from no seed that a copy has."""

    gain = 1.0

    def call(self, inputs, training=False):
        noise = keras.random.normal(keras.ops.shape(inputs)) if training else 0.0
        return inputs * self.gain + noise


def noisy(gain):
    keras.utils.set_random_seed(1)
    layer = Noisy()
    layer.gain = gain
    return compiled(keras.Sequential([keras.Input((6,)), layer, layers.Dense(1)]))


def regularized():
    model = network()
    model.layers[-1].kernel_regularizer = keras.regularizers.L2(0.5)
    return model


@pytest.mark.parametrize(
    ("make", "differs"),
    [
        (lambda: network(loss=Scaled(2.0)), "loss"),
        (lambda: network(optimizer=keras.optimizers.SGD(WarmUp(4))), "learning rate"),
        (lambda: noisy(2.0), "loss and output"),
        (regularized, "loss"),
    ],
)
def test_a_model_of_which_keras_copies_lose_something_is_refused(make, differs):
    with pytest.raises(JobError, match=f"copy of the model '.*' has another {differs}: what a get_config"):
        vivace.Job.from_keras(make(), *data(), batch_size=BATCH)


def test_comparing_a_model_with_its_copy_leaves_it_as_it_was():
    keras.utils.set_random_seed(1)
    body = [layers.Dropout(0.5), layers.Dense(4), layers.BatchNormalization(), Noisy(), layers.Dense(1)]
    model = compiled(keras.Sequential([keras.Input((6,)), *body]))
    before = [variable.numpy().copy() for variable in model.variables]
    vivace.Job.from_keras(model, *data(), batch_size=BATCH)
    assert all(map(numpy.array_equal, before, [variable.numpy() for variable in model.variables]))
    assert int(model.optimizer.iterations.value) == 0


def test_a_class_that_is_not_registered_is_refused_with_what_helps():
    class Unknown(keras.losses.Loss):
        pass

    with pytest.raises(JobError, match=r"cannot be copied by Keras .*Unknown.*: mark its classes and func"):
        vivace.Job.from_keras(network(loss=Unknown()), *data(), batch_size=BATCH)


def test_a_plan_is_verified_in_child_processes():
    job = vivace.Job.from_keras(network("convolution"), *data("convolution"), batch_size=BATCH)
    assert vivace.verify(job, Plan.from_dict({"loader_workers": {"num_workers": 1}})).kept is True
