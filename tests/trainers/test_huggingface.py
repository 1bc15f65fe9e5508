"""A Job from a Hugging Face Trainer trains what the Trainer trains."""

import copy
import gc
import weakref

import cloudpickle
import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vivace
from vivace.tensors.outside import Outside
from vivace.training.course import sources_of

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


def trainer(folder, callbacks=None, optimizers=(None, None), model=None, words=None, **settings):
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
        model or network(),
        arguments,
        train_dataset=Words(),
        eval_dataset=Words(),
        compute_metrics=lambda seen: {
            "accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())
        },
        processing_class=words,
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


class Scheduling(transformers.Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        return self.lr_scheduler


def test_a_schedule_of_its_own_may_ask_the_trainer_for_the_optimizer(tmp_path):
    job = vivace.Job.from_trainer(of_kind(Scheduling, trainer(tmp_path)))
    optimizer = job.optimizer(job.model())
    assert job.scheduler(optimizer).optimizer is optimizer


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


def test_the_evaluation_loss_is_that_of_its_own_prediction_step(tmp_path):
    class Counting(transformers.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            found = model(**self._prepare_inputs(inputs)).logits.argmax(-1)
            return (found != inputs["labels"]).float().mean(), None, None

    theirs = trainer(tmp_path)
    theirs.__class__ = Counting
    job = vivace.Job.from_trainer(theirs)
    with torch.no_grad():
        found = -job.metric(job.model().eval(), job.validation())
        assert found == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


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
        ({"use_liger_kernel": True}, "use_liger_kernel=True cannot become a Job, as only .* leave it out"),
        ({"bf16": True}, r"leave TrainingArguments\(bf16=True\) out"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
            "ends with the weights of its last step: leave load_best_model_at_end=True out",
        ),
        ({"callbacks": [Mine()]}, "callback Mine would not be called: take it off"),
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


class Holding(torch.nn.Module):
    """A loss that calls the model itself, as those of sentence_transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return self.model(**inputs).loss


class WithALoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return next(iter(self.losses.values()))(inputs)


def test_a_loss_that_holds_the_model_itself_is_refused(tmp_path):
    plain = trainer(tmp_path)
    plain.__class__, plain.losses = WithALoss, {"pairs": Holding(plain.model)}
    with pytest.raises(vivace.JobError, match=r"losses \(Holding\) holds the model's weights itself.*run"):
        vivace.Job.from_trainer(plain)
    plain.losses = {"pairs": torch.nn.Linear(2, 2)}
    assert vivace.Job.from_trainer(plain)


class Sentences(torch.utils.data.Dataset):
    """Four sentences of six words and their translations of five."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        words = torch.randint(2, 20, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words[1:]}


def translator(folder):
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        predict_with_generate=True,
        generation_max_length=5,
        metric_for_best_model="sum",
    )
    return transformers.Seq2SeqTrainer(
        transformers.T5ForConditionalGeneration(config),
        arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        compute_metrics=lambda seen: {
            "sum": float((seen.predictions * numpy.arange(1, 1 + seen.predictions.shape[1])).sum())
        },
    )


def test_what_is_generated_is_the_jobs_models(tmp_path):
    """Trainer lets its own model generate: that of a Job is another one, which is trained."""
    job = vivace.Job.from_trainer(translator(tmp_path))
    model = job.model().eval()
    other = translator(tmp_path)
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.model.parameters(), strict=True):
            its.copy_(mine.normal_())
        assert job.metric(model, job.validation()) == other.evaluate()["eval_sum"]
        assert other.evaluate()["eval_sum"] != translator(tmp_path).evaluate()["eval_sum"]


def test_a_loss_that_looks_at_the_trainers_model_sees_the_jobs(tmp_path):
    class Decaying(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return sum(weight.square().sum() for weight in self.model.parameters())

    theirs = trainer(tmp_path)
    theirs.__class__ = Decaying
    job = vivace.Job.from_trainer(theirs)
    model = job.model()
    job.loss(model, next(iter(job.data()))).backward()
    assert all(torch.equal(weight.grad, 2 * weight) for weight in model.parameters())
    assert all(weight.grad is None for weight in theirs.model.parameters())


def test_a_loss_that_counts_its_labels_is_told_how_many_there_are(tmp_path):
    counts = []

    def loss(outputs, labels, num_items_in_batch):
        counts.append(int(num_items_in_batch))
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    theirs = trainer(tmp_path)
    theirs.compute_loss_func = loss
    job = vivace.Job.from_trainer(theirs)
    model = job.model()
    with torch.no_grad():
        found = [float(job.loss(model, batch)) for batch in job.data()]
        assert counts == [6, 6, 4]
        assert found[0] == pytest.approx(float(model(**next(iter(job.data()))).loss))


def test_evaluations_that_a_metric_would_not_be_are_named(tmp_path):
    for name in ("batch_eval_metrics", "include_for_metrics"):
        theirs = trainer(tmp_path)
        setattr(theirs.args, name, ["inputs"])
        with pytest.raises(vivace.JobError, match=f"leave {name}=.'inputs'. out"):
            vivace.Job.from_trainer(theirs)
    theirs.args.include_for_metrics, theirs.args.eval_do_concat_batches = [], False
    with pytest.raises(vivace.JobError, match="leave eval_do_concat_batches=False out"):
        vivace.Job.from_trainer(theirs)
    theirs.args.eval_do_concat_batches, own = True, theirs.eval_dataset
    theirs.eval_dataset = {"seen": own, "new": own}
    with pytest.raises(vivace.JobError, match=r"is a dict of data sets \(seen, new\)"):
        vivace.Job.from_trainer(theirs)
    theirs.eval_dataset = own

    class Mine(transformers.Trainer):
        def evaluate(self, *arguments, **keywords):
            return super().evaluate(*arguments, **keywords)

    theirs.__class__, theirs.args.include_for_metrics = Mine, []
    with pytest.raises(vivace.JobError, match="own evaluate would not be called"):
        vivace.Job.from_trainer(theirs)


def test_the_file_of_the_trainers_parts_is_compared_when_a_run_goes_on(tmp_path):
    assert "source of test_huggingface.py" in sources_of(vivace.Job.from_trainer(trainer(tmp_path)))


def of_kind(kind, theirs):
    theirs.__class__ = kind
    return theirs


class Annealed(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.weight() * super().compute_loss(model, inputs)

    def weight(self):
        return max(max(0.0, 1.0 - self.state.global_step / count) for count in (10,))


class Telling(transformers.Trainer):
    """Looks at the counts where it trains nothing by them."""

    def compute_loss(self, *arguments, **keywords):
        self.log({})
        return super().compute_loss(*arguments, **keywords)

    def log(self, logs, *_):
        self.told = self.state.epoch

    def save_model(self, *_, **__):
        self.told = self.state.global_step


def test_a_loss_that_counts_steps_is_refused(tmp_path):
    with pytest.raises(vivace.JobError, match=r"weight uses state.global_step, .*: take that out of.*run"):
        vivace.Job.from_trainer(of_kind(Annealed, trainer(tmp_path)))
    assert vivace.Job.from_trainer(of_kind(Telling, trainer(tmp_path)))
    theirs = trainer(tmp_path)
    theirs.compute_loss_func = lambda outputs, labels, **_: outputs.logits.sum() * theirs.state.epoch
    with pytest.raises(vivace.JobError, match=r"compute_loss_func uses state.epoch, which nobody counts"):
        vivace.Job.from_trainer(theirs)


class Logging(transformers.Trainer):
    """Asks for the step to log at some of them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        if self.state.global_step % self.args.logging_steps == 0:
            self.log({type(model).__name__: loss.item(), "at": self.state.epoch})
            print("logged")
        return loss


class Hiding(transformers.Trainer):
    """Logs, and stops something as it does."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        first, state = True, self.state
        if state.global_step > 2:
            self.log({})
            first = False
        return model(**inputs).loss * first


class Batched(transformers.Trainer):
    """Its batches have a state and an epoch of their own; its predictions look at the Trainer's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return inputs.state * inputs.epoch

    def prediction_step(self, *arguments, **keywords):
        return self.state.epoch


class Naming(transformers.Trainer):
    """Asks a class for its name, which Trainer has as well, though not as a member."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss * len(type(model).__name__)


def test_a_loss_may_ask_for_the_name_of_a_class(tmp_path):
    job = vivace.Job.from_trainer(of_kind(Naming, trainer(tmp_path)))
    model, batch = job.model(), next(iter(job.data()))
    factor = len("BertForSequenceClassification")
    assert torch.equal(job.loss(model, batch), model(**batch).loss * factor)


def test_a_loss_may_log_at_some_steps(tmp_path, capsys):
    theirs = of_kind(Logging, trainer(tmp_path))
    job = vivace.Job.from_trainer(theirs)
    model = job.model()
    for batch in job.data():
        assert torch.equal(job.loss(model, batch), model(**batch).loss)
    assert theirs.state.log_history == []
    assert "Bert" not in capsys.readouterr().out


def test_only_a_count_that_can_change_the_training_is_refused(tmp_path):
    with pytest.raises(vivace.JobError, match=r"compute_loss uses state.global_step"):
        vivace.Job.from_trainer(of_kind(Hiding, trainer(tmp_path)))
    theirs = of_kind(Batched, trainer(tmp_path))
    with pytest.raises(vivace.JobError, match=r"prediction_step uses state.epoch"):
        vivace.Job.from_trainer(theirs)
    theirs.eval_dataset = None
    assert vivace.Job.from_trainer(theirs)


def ramp(theirs):
    return 1.0 + theirs.state.global_step


def tell(theirs):
    if theirs.state.global_step % 2 == 0:
        print("step", theirs.state.global_step)


class Ramped(transformers.Trainer):
    """Computes with the step in another function, and shows it in another one."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tell(self)
        return model(**inputs).loss * self.factor()

    def factor(self):
        return ramp(self)


class Asked(Ramped):
    def factor(self):
        return 1.0 + getattr(self.state, "epoch")  # noqa: B009


class Told(Ramped):
    def factor(self):
        return 1.0 + self.state.is_world_process_zero


def test_a_count_that_another_function_computes_with_is_refused_where_it_is_asked_for(tmp_path, capsys):
    for kind, asks in ((Ramped, "ramp uses state.global_step"), (Asked, "factor uses state.epoch")):
        job = vivace.Job.from_trainer(of_kind(kind, trainer(tmp_path)))
        with pytest.raises(vivace.JobError, match=f"{asks}, which nobody counts without a Trainer"):
            vivace.train(job, out=tmp_path / kind.__name__)
    job = vivace.Job.from_trainer(of_kind(Told, trainer(tmp_path)))
    job = cloudpickle.loads(cloudpickle.dumps(job))
    model, batch = job.model(), next(iter(job.data()))
    assert torch.equal(job.loss(model, batch), model(**batch).loss * 2)
    assert "step 0" in capsys.readouterr().out


def generator_and_words():
    """A network that must know which token pads, and does not; and a tokenizer that does."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "num_labels": 2}
    never = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, **never))
    known = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=known, pad_token="[PAD]")


@pytest.mark.filterwarnings("ignore")
def test_the_model_is_told_the_tokens_of_the_tokenizer(tmp_path, by_hand):
    (model, words), (other, _) = generator_and_words(), generator_and_words()
    job = vivace.Job.from_trainer(trainer(tmp_path, model=model, words=words))
    assert job.model().config.pad_token_id == 0
    assert model.config.pad_token_id is None
    theirs = trainer(tmp_path, model=other, words=words)
    theirs.train()
    ours = by_hand(job)
    for name, value in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_the_model_is_told_its_tokens_by_a_method_of_older_versions(tmp_path, monkeypatch):
    class Older(transformers.Trainer):
        def _align_special_tokens(self):
            self.model.config.pad_token_id = self.processing_class.pad_token_id + 7

    monkeypatch.delattr(transformers.trainer_utils, "align_special_tokens")
    model, words = generator_and_words()
    job = vivace.Job.from_trainer(of_kind(Older, trainer(tmp_path, model=model, words=words)))
    assert job.model().config.pad_token_id == 7
    theirs = trainer(tmp_path, model=model, words=words)  # in still older ones nobody tells it
    assert vivace.Job.from_trainer(theirs).model().config.pad_token_id is None
    assert model.config.pad_token_id is None


def test_a_collator_that_holds_the_model_gets_the_jobs(tmp_path):
    model, words = generator_and_words()
    theirs = trainer(tmp_path, model=model, words=words)
    collator = transformers.DataCollatorForSeq2Seq(words, model=model)
    theirs.data_collator, its = collator, weakref.ref(model)
    kept = vivace.Job.from_trainer(theirs).data().collate_fn
    kept = getattr(kept, "data_collator", kept)  # which leaves out what the model does not take
    assert kept.tokenizer is words
    assert kept.model.config.pad_token_id == 0
    assert collator.model is model
    del theirs, collator, model
    gc.collect()
    assert its() is None


def test_a_loss_is_one_number_where_the_process_sees_several_gpus(tmp_path):
    def loss(outputs, labels, num_items_in_batch):
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    one, two = trainer(tmp_path), trainer(tmp_path)
    two.args._n_gpu = 2
    for function in (None, loss):
        one.compute_loss_func = two.compute_loss_func = function
        jobs = vivace.Job.from_trainer(one), vivace.Job.from_trainer(two)
        found = [job.loss(network(), next(iter(job.data()))) for job in jobs]
        assert torch.equal(*found)
    assert two.args.n_gpu == 2


def test_the_trainers_own_model_can_go(tmp_path):
    """On a GPU it would take the memory of a second one for the whole run."""
    theirs = trainer(tmp_path)
    its, before = weakref.ref(theirs.model), copy.deepcopy(theirs.model.state_dict())
    job = vivace.Job.from_trainer(theirs)
    del theirs
    gc.collect()
    assert its() is None
    model = job.model()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    job.loss(model, next(iter(job.data()))).backward()
    job.optimizer(model).step()


class Made(TorchDispatchMode):
    """Weights that are made inside: by which operators, and where."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operator, kinds, arguments=(), keywords=None):
        found = operator(*arguments, **(keywords or {}))
        if operator.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            self.seen.add((operator.overloadpacket.__name__, found.device.type))
        return found


def test_the_copy_that_a_job_keeps_is_made_on_the_host_alone(tmp_path):
    """A second one on a GPU might not fit; and none is needed where each model is built afresh."""
    theirs = trainer(tmp_path)
    tied, classifier = theirs.model.bert.embeddings.word_embeddings, theirs.model.classifier
    classifier.tied = tied.weight
    classifier.bias.requires_grad_(False)
    with Made() as made:
        job = vivace.Job.from_trainer(theirs)
    assert made.seen == {("_to_copy", "cpu")}
    model = job.model()
    assert model.classifier.tied is model.bert.embeddings.word_embeddings.weight
    assert model.classifier.tied is not tied.weight
    assert not model.classifier.bias.requires_grad
    theirs = trainer(tmp_path)
    theirs.model_init = network
    with Made() as made:
        job = vivace.Job.from_trainer(theirs)
    assert made.seen == {("_to_copy", "meta")}
    job.loss(job.model(), next(iter(job.data()))).backward()


def test_predictions_go_to_the_host_as_often_as_the_trainers_do(tmp_path, monkeypatch):
    from transformers import trainer_pt_utils

    joined, join = [], trainer_pt_utils.nested_concat

    def watched(first, *more, **keywords):
        joined.append(type(first))
        return join(first, *more, **keywords)

    monkeypatch.setattr(trainer_pt_utils, "nested_concat", watched)
    settings = {"metric_for_best_model": "accuracy", "per_device_eval_batch_size": 3}  # five full, one of one
    found = []
    for every, kinds in ((None, {torch.Tensor}), (1, {numpy.ndarray}), (2, {torch.Tensor, numpy.ndarray})):
        joined.clear()
        job = vivace.Job.from_trainer(trainer(tmp_path, eval_accumulation_steps=every, **settings))
        with torch.no_grad():
            found.append(job.metric(job.model().eval(), job.validation()))
        assert set(joined) == kinds
    assert len(set(found)) == 1


class Counting(transformers.Trainer):
    """Its loss is divided by how often it was asked for one, which it counts in two ways."""

    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls += 1
        self.seen.append(self.calls)
        return super().compute_loss(model, inputs) / (self.calls + len(self.seen))


@pytest.mark.filterwarnings("ignore")
def test_watching_moves_nothing_that_the_trainers_loss_keeps(tmp_path):
    weights, counts = [], []
    for watch in (0, 1e6):  # nothing, or every step
        theirs = of_kind(Counting, trainer(tmp_path / "theirs", num_train_epochs=4))
        theirs.eval_dataset, theirs.seen = None, []
        job, out = vivace.Job.from_trainer(theirs), tmp_path / f"run-{watch}"
        plan = vivace.Plan.from_dict({"bf16_autocast": {}})
        run = vivace.train(job, plan, out=out, watch=watch, on_broken="ignore")
        assert (run.watched or {"steps": 0})["steps"] > 0 or not watch
        weights.append(torch.load(out / "model.pt", weights_only=True))
        counts.append(theirs.seen[-1])
    assert counts == [12, 12]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_function_for_the_loss_that_counts_is_looked_at_as_well(tmp_path):
    seen = []

    def loss(outputs, labels, num_items_in_batch):
        seen.append(1)
        return torch.nn.functional.cross_entropy(outputs.logits, labels) / len(seen)

    theirs = trainer(tmp_path)
    theirs.compute_loss_func = loss
    job = vivace.Job.from_trainer(theirs)
    outside, batch = Outside((job.loss,), []), next(iter(job.data()))
    first = job.loss(network(), batch)
    assert outside.moved()
    outside.put_back()
    assert not seen
    assert torch.equal(job.loss(network(), batch), first)


def test_a_metric_that_has_trainers_prefix_already(tmp_path):
    theirs = trainer(tmp_path, metric_for_best_model="eval_f1")
    theirs.compute_metrics = lambda seen: {"eval_f1": 0.25}
    job = vivace.Job.from_trainer(theirs)
    assert job.metric_name == "f1"
    with torch.no_grad():
        assert job.metric(job.model().eval(), job.validation()) == 0.25
