"""A Job from a LightningModule trains what Lightning trains."""

import copy
import functools
import sys

import cloudpickle
import pytest
import torch
import torchmetrics

import vivace
from vivace.training.course import sources_of

lightning = pytest.importorskip("lightning.pytorch")


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(lightning.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(20, 4, generator=generator)
        self.data = torch.utils.data.TensorDataset(inputs, inputs.argmax(1) % 3)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=6)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=8)


def theirs(**settings):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet, **settings)


@pytest.mark.filterwarnings("ignore")
def test_the_job_trains_what_lightning_trains(by_hand):
    module = Net()
    theirs(gradient_clip_val=0.3).fit(module, Data())
    job = vivace.Job.from_lightning(Net(), Data(), epochs=2, monitor="accuracy", gradient_clip_val=0.3)
    ours = by_hand(job)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    assert job.metric_name == "accuracy"
    with torch.no_grad():
        ours.eval()
        mine = job.metric(ours, job.validation())
    (found,) = theirs().validate(module, Data(), verbose=False)
    assert mine == pytest.approx(found["accuracy"], abs=1e-6)


def test_a_job_from_lightning_trains_as_any(tmp_path):
    job = vivace.Job.from_lightning(Net(), Data(), epochs=2, monitor="accuracy")
    run = vivace.train(job, out=tmp_path / "run")
    assert run.steps == 8
    assert 0.0 <= run.metric <= 1.0


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Hooked(Net):
    def on_train_batch_end(self, *_):
        pass


class Starting(Net):
    def on_train_start(self):
        self.layer.bias.requires_grad_(False)


class Indexed(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * batch_idx


class Preparing(Net):
    def prepare_data(self):
        self.factor = 1.0


class Ending(Net):
    def teardown(self, stage):
        self.factor = 0.0


class Annealed(Net):
    def weight(self):
        return max(max(0.0, 1.0 - self.global_step / count) for count in (10,))

    def training_step(self, batch, batch_idx):
        return self.weight() * torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


class Warming(Net):
    def forward(self, inputs):
        return super().forward(inputs) if self.current_epoch else self.layer(inputs).detach()


def passed_on(step):
    @functools.wraps(step)
    def passing(self, *arguments):
        return step(self, *arguments)

    return passing


class Wrapped(Net):
    @passed_on
    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum() * batch_idx


class Planning(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


class Two(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Manual, "manual optimization"),
        (Hooked, "on_train_batch_end would not be called"),
        (Starting, "on_train_start would not be called"),
        (Preparing, "module's prepare_data would not be called"),
        (Ending, "module's teardown would not be called"),
        (Indexed, "uses batch_idx"),
        (Wrapped, "uses batch_idx"),
        (Planning, "configure_optimizers asks the Trainer for estimated_stepping_batches, and a Job has no"),
        (Annealed, "weight uses global_step, which is 0 without a Trainer"),
        (Warming, "forward uses current_epoch, which is 0 without a Trainer"),
        (Two, "one optimizer and one schedule; the module has 2"),
        (lambda: torch.nn.Linear(1, 1), "not a Linear"),
    ],
)
def test_what_a_job_cannot_say_is_named(module, sentence):
    with pytest.raises(vivace.JobError, match=sentence):
        vivace.Job.from_lightning(module(), Data())


def annealing(module):
    return 1.0 / (1 + module.current_epoch)


class Helped(Net):
    """Its functions call others, that look at the Trainer's counts."""

    def training_step(self, batch, batch_idx):
        return annealing(self) * self(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", annealing(self))


class Asking(Net):
    def training_step(self, batch, batch_idx):
        assert self.logger is None
        assert self.global_rank == len(self.loggers) == 0
        return getattr(self, "global_" + "step") * self(batch[0]).sum()


@pytest.mark.parametrize(("kind", "count"), [(Helped, "current_epoch"), (Asking, "global_step")])
def test_a_count_of_the_trainers_is_refused_wherever_the_loss_asks_for_it(kind, count, tmp_path):
    job = vivace.Job.from_lightning(kind(), Data(), monitor="accuracy")
    with torch.no_grad():
        assert job.metric(job.model().eval(), job.validation()) >= 0
    with pytest.raises(
        vivace.JobError, match=f"training_step asks the Trainer for {count}, and a Job has no"
    ):
        vivace.train(job, out=tmp_path / "run")


class Normalizing(Data):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / 2, batch[1]


def test_hooks_of_the_data_are_named():
    with pytest.raises(vivace.JobError, match="data module's on_after_batch_transfer would not be called"):
        vivace.Job.from_lightning(Net(), Normalizing())


def test_a_module_and_data_of_the_library_under_its_other_name(monkeypatch):
    other = pytest.importorskip("pytorch_lightning")
    plain = vivace.Job.from_lightning(Net(), Data(), monitor="accuracy")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.setitem(sys.modules, name, None)  # as where only that is installed

    class Same(other.LightningModule):
        forward, training_step, validation_step = Net.forward, Net.training_step, Net.validation_step
        configure_optimizers = Net.configure_optimizers

        def __init__(self):
            super().__init__()
            self.layer = Net().layer

    class Rows(other.LightningDataModule):
        setup, train_dataloader, val_dataloader = Data.setup, Data.train_dataloader, Data.val_dataloader

    job = vivace.Job.from_lightning(Same(), Rows(), monitor="accuracy")
    batch = next(iter(plain.data()))
    assert torch.equal(job.loss(job.model(), batch), plain.loss(plain.model(), batch))
    with torch.no_grad():
        measured = job.metric(job.model().eval(), job.validation())
    monkeypatch.undo()
    with torch.no_grad():
        assert measured == plain.metric(plain.model().eval(), plain.validation())
    Rows.on_after_batch_transfer = Normalizing.on_after_batch_transfer
    with pytest.raises(vivace.JobError, match="data module's on_after_batch_transfer would not be called"):
        vivace.Job.from_lightning(Same(), Rows())


class Listing(Net):
    def configure_optimizers(self):
        return [super().configure_optimizers()]


@pytest.mark.filterwarnings("ignore")
def test_the_only_optimizer_in_a_list_comes_with_its_schedule(by_hand):
    module = Listing()
    theirs(gradient_clip_val=0.3).fit(module, Data())
    ours = by_hand(vivace.Job.from_lightning(Listing(), Data(), epochs=2, gradient_clip_val=0.3))
    for name, value in module.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.seen = torchmetrics.Accuracy("multiclass", num_classes=3)

    def validation_step(self, batch, batch_idx):
        self.seen(self(batch[0]), batch[1])
        self.log("accuracy", self.seen)


def test_a_logged_metric_of_torchmetrics_is_computed_over_all_batches():
    plain, counting = (
        vivace.Job.from_lightning(net(), Data(), monitor="accuracy") for net in (Net, Counting)
    )
    with torch.no_grad():
        wanted = plain.metric(plain.model().eval(), plain.validation())
        model = counting.model().eval()
        found = [counting.metric(model, counting.validation()) for _ in range(2)]
    assert found == pytest.approx([wanted, wanted])


def test_it_can_be_sent_to_another_process():
    job = cloudpickle.loads(cloudpickle.dumps(vivace.Job.from_lightning(Net(), Data(), epochs=2)))
    model = job.model()
    optimizer = job.optimizer(model)
    assert job.scheduler(optimizer).optimizer is optimizer


def test_a_name_that_nobody_logs():
    job = vivace.Job.from_lightning(Net(), Data(), monitor="f1")
    with torch.no_grad(), pytest.raises(vivace.JobError, match="logs accuracy, not 'f1'"):
        job.metric(job.model().eval(), job.validation())


class Probing(Net):
    """Only its head is trained, though gradients come to the rest as well."""

    def __init__(self):
        super().__init__()
        self.before = torch.nn.Linear(4, 4)

    def forward(self, inputs):
        return self.layer(10 * self.before(inputs))

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_what_no_optimizer_has_are_not_clipped_with_the_others(tmp_path):
    module = Probing()
    theirs(gradient_clip_val=0.3).fit(module, Data())
    job = vivace.Job.from_lightning(Probing(), Data(), epochs=2, gradient_clip_val=0.3)
    vivace.train(job, out=tmp_path / "run")
    ours = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(ours[name], value)


class Growing(Net):
    @property
    def weight(self):
        return min(1.0, self.global_step / 100)


class Remembering(Net):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 1


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Growing, "weight uses global_step, which is 0 without a Trainer"),
        (Remembering, "on_save_checkpoint would not be called"),
    ],
)
def test_properties_and_hooks_of_checkpoints_are_named(module, sentence):
    with pytest.raises(vivace.JobError, match=sentence):
        vivace.Job.from_lightning(module(), Data())


class Largest(Net):
    def validation_step(self, batch, batch_idx):
        self.log("largest", self(batch[0]).max(), reduce_fx="max")


def test_a_logged_number_that_is_no_mean_is_refused():
    job = vivace.Job.from_lightning(Largest(), Data(), monitor="largest")
    with torch.no_grad(), pytest.raises(vivace.JobError, match="logged with reduce_fx='max', and a Job"):
        job.metric(job.model().eval(), job.validation())


class Collecting(Net):
    """Two metrics that keep all that they are shown, one in training and one in validation."""

    def __init__(self):
        super().__init__()
        self.trained, self.validated = torchmetrics.CatMetric(), torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        self.trained(batch[1])
        self.log("labels", self.trained)
        return super().training_step(batch, 0)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.validated(batch[1])
        self.log_dict({"labels": self.validated})


def test_metrics_of_torchmetrics_do_not_keep_what_nobody_asks_for():
    job = vivace.Job.from_lightning(Collecting(), Data(), monitor="accuracy")
    model = job.model()
    for batch in job.data():
        job.loss(model, batch)
    with torch.no_grad():
        job.metric(model.eval(), job.validation())
    assert len(model.trained.value) == len(model.validated.value) == 0


def test_the_file_of_the_module_is_compared_when_a_run_goes_on():
    assert "source of test_lightning.py" in sources_of(vivace.Job.from_lightning(Net(), Data()))


class Frozen(Net):
    """A backbone that is not trained, with one part of it that is, before the layer."""

    def __init__(self):
        super().__init__()
        kinds = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4)
        self.backbone = torch.nn.Sequential(*kinds).eval()
        self.backbone[2].train()

    def forward(self, inputs):
        return self.layer(self.backbone(inputs))


def modes(model):
    return {name: part.training for name, part in model.named_modules()}


@pytest.mark.filterwarnings("ignore")
def test_parts_in_evaluation_mode_stay_in_it(tmp_path):
    module = Frozen()
    theirs().fit(module, Data())
    job = vivace.Job.from_lightning(Frozen(), Data(), epochs=2, monitor="accuracy")
    vivace.train(job, out=tmp_path / "run")
    ours = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(ours[name], value)
    assert not ours["backbone.0.running_mean"].any()
    assert ours["backbone.2.running_mean"].any()


def test_copies_of_a_model_keep_its_parts_in_evaluation_mode_as_well():
    wanted = modes(Frozen())
    with pytest.warns(UserWarning, match="3 modules of Frozen in evaluation mode will stay in it"):
        model = vivace.Job.from_lightning(Frozen(), Data()).model()
    for copied in (copy.deepcopy(model), cloudpickle.loads(cloudpickle.dumps(model)), model):
        assert not any(modes(copied.eval()).values())
        assert copied.train() is copied
        assert modes(copied) == wanted
        copied.eval()
    assert "train" not in vars(vivace.Job.from_lightning(Net(), Data()).model())


class Together(Data):
    """Loaders as Lightning lets a data module return them."""

    def __init__(self, put):
        super().__init__()
        self.put = put

    def val_dataloader(self):
        return self.put(super().val_dataloader())


@pytest.mark.filterwarnings("ignore")  # of the pytrees of a CombinedLoader
def test_the_only_loader_in_a_list_is_the_validation_data_and_several_are_refused():
    plain = vivace.Job.from_lightning(Net(), Data(), monitor="accuracy")
    model = plain.model().eval()
    with torch.no_grad():
        wanted = plain.metric(model, plain.validation())
        combined = lightning.utilities.CombinedLoader
        for put in (lambda loader: [loader], lambda loader: {"held out": loader}, combined):
            job = vivace.Job.from_lightning(Net(), Together(put), monitor="accuracy")
            assert job.metric(model, job.validation()) == wanted
    job = vivace.Job.from_lightning(Net(), Together(lambda loader: [loader, loader]), monitor="accuracy")
    with pytest.raises(vivace.JobError, match="val_dataloader returns a collection of 2 loaders"):
        job.validation()


def test_training_batches_of_several_loaders_are_refused():
    class Pairs(Data):
        def train_dataloader(self):
            return [super().train_dataloader()]

    with pytest.raises(vivace.JobError, match="train_dataloader returns a collection of 1 loader, which"):
        vivace.Job.from_lightning(Net(), Pairs()).data()
