"""A Job from a Hugging Face Trainer trains what the Trainer trains."""

import copy

import pytest
import torch

import vivace

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Words(torch.utils.data.Dataset):
    """Sixteen sentences of eight words, which are of either kind."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(5, 50, (8,), generator=generator)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": index % 2}


def network():
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


def trainer(folder, callbacks=None, optimizers=(None, None), **settings):
    settings = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": 6,  # the last batch is smaller
        "num_train_epochs": 2,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        **settings,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings
    )
    return transformers.Trainer(
        network(),
        arguments,
        train_dataset=Words(),
        eval_dataset=Words(),
        compute_metrics=lambda seen: {
            "accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())
        },
        callbacks=callbacks,
        optimizers=optimizers,
    )


def test_the_job_trains_what_the_trainer_trains(tmp_path, by_hand):
    theirs = trainer(tmp_path)
    theirs.train()
    ours = by_hand(vivace.Job.from_trainer(trainer(tmp_path)))
    begun = network().state_dict()
    for name, value in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(begun[name], value) for name, value in ours.state_dict().items())


def test_the_metric_is_the_trainers(tmp_path):
    settings = {"metric_for_best_model": "accuracy", "greater_is_better": True}
    theirs = trainer(tmp_path, **settings)
    job = vivace.Job.from_trainer(trainer(tmp_path, **settings))
    model = job.model().eval()
    with torch.no_grad():
        assert job.metric(model, job.validation()) == theirs.evaluate()["eval_accuracy"]
    assert job.metric_name == "accuracy"
    loss = vivace.Job.from_trainer(trainer(tmp_path))
    with torch.no_grad():
        assert -loss.metric(model, loss.validation()) == pytest.approx(
            theirs.evaluate()["eval_loss"], rel=1e-5
        )
    assert loss.metric_name == "minus loss"


def test_a_job_builds_afresh_and_leaves_the_trainer_alone(tmp_path, by_hand):
    theirs = trainer(tmp_path)
    before = copy.deepcopy(theirs.model.state_dict())
    job = vivace.Job.from_trainer(theirs)
    first, second = by_hand(job), by_hand(job)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(before[name], value) for name, value in theirs.model.state_dict().items())
    assert theirs.optimizer is None
    assert theirs.lr_scheduler is None


class Mine(transformers.TrainerCallback):
    pass


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gradient_accumulation_steps": 4}, "per_device_train_batch_size=24 instead"),
        ({"max_steps": 5}, "num_train_epochs"),
        ({"num_train_epochs": 1.5}, "num_train_epochs"),
        ({"bf16": True}, r"leave TrainingArguments\(bf16=True\) out"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
            "ends with the weights of its last step: leave load_best_model_at_end=True out",
        ),
        ({"callbacks": [Mine()]}, "callback Mine would not be called"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "knows no metric"),
    ],
)
def test_what_a_job_cannot_say_is_named(tmp_path, settings, sentence):
    with pytest.raises(vivace.JobError, match=sentence):
        vivace.Job.from_trainer(trainer(tmp_path, **settings))


def test_a_metric_that_nobody_computes(tmp_path):
    job = vivace.Job.from_trainer(trainer(tmp_path, metric_for_best_model="f1"))
    with torch.no_grad(), pytest.raises(vivace.JobError, match="compute_metrics gives accuracy"):
        job.metric(job.model().eval(), job.validation())


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    model = network()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(vivace.JobError, match="optimizer_cls_and_kwargs"):
        vivace.Job.from_trainer(trainer(tmp_path, optimizers=(own, None)))


def test_inputs_of_its_own_are_refused(tmp_path):
    plain = trainer(tmp_path)

    class Masking(transformers.Trainer):
        def _prepare_inputs(self, inputs):
            return super()._prepare_inputs(inputs)

    plain.__class__ = Masking
    with pytest.raises(vivace.JobError, match="own _prepare_inputs would not be called"):
        vivace.Job.from_trainer(plain)


def test_a_step_of_its_own_is_refused(tmp_path):
    plain = trainer(tmp_path)

    class Mine(transformers.Trainer):
        def training_step(self, *arguments, **keywords):
            return super().training_step(*arguments, **keywords)

    plain.__class__ = Mine
    with pytest.raises(vivace.JobError, match="own training_step would not be called"):
        vivace.Job.from_trainer(plain)
