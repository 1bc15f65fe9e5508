"""A model that learns from a trained one: what is added to its loss, and that it comes nearer to it."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace.errors import JobError
from vivace.job import load
from vivace.serving.distilling import distilled
from vivace.serving.trained import load_trained
from vivace.session.opening import seed_everything


class Narrow(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 3))


@pytest.fixture
def student(trained):
    """A function that gives the distilled job of a narrow model, and the reference and run of its teacher."""
    reference, run = trained("job")

    def make(*, of=reference, **changes):
        changed = {"model": Narrow, **changes}
        job = vivace.Job(**{**vars(load(reference)), **changed})
        return distilled(job, teacher=of, run=run, weight=3.0)

    return make


def teacher_of(trained):
    return load_trained(load(trained("job")[0]), trained("job")[1])[0]


def test_the_teachers_distance_in_units_of_its_variance_is_added(trained, student):
    job, teacher = student(), teacher_of(trained)
    model = job.model().eval()
    batches = list(job.data())
    variance = teacher(batches[0][0]).var(correction=0)
    images, labels = batches[1]
    found = model(images)
    own = functional.cross_entropy(found, labels)
    wanted = own + 3.0 * functional.mse_loss(found, teacher(images)) / variance
    assert torch.allclose(job.loss(model, (images, labels)), wanted, rtol=1e-5)
    pieces = [job.loss(model, (images[rows], labels[rows])) for rows in (slice(0, 8), slice(8, 16))]
    assert torch.allclose(torch.stack(pieces).mean(), wanted, rtol=1e-5)


def test_random_numbers_are_those_of_the_job_alone(student):
    def drawn(build):
        seed_everything(5)
        model = build()
        return [*(p.clone() for p in model.parameters()), torch.rand(3)]

    assert all(map(torch.equal, drawn(student().model), drawn(Narrow)))


def test_the_model_comes_nearer_and_the_teacher_stays(trained, student, tmp_path):
    teacher = teacher_of(trained)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    images = torch.cat([images for images, _ in student().validation()])
    wanted = teacher(images)

    def off(job, out):
        vivace.train(job, out=tmp_path / out, seed=1)
        model, _ = load_trained(job, tmp_path / out)
        return functional.mse_loss(model(images), wanted).item()

    slow = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.01)}
    alone = vivace.Job(**{**vars(student(**slow)), "model": Narrow, "loss": load(trained("job")[0]).loss})
    assert off(student(**slow), "distilled") < 0.7 * off(alone, "alone")
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher_of(trained).state_dict().items())


def test_another_teacher_or_weight_is_another_training(trained, tmp_path):
    reference, run = trained("job")
    other = tmp_path / "other"
    vivace.train(reference, out=other, seed=5)
    moved = shutil.copytree(run, tmp_path / "moved")

    def train(run, weight=3.0, **options):
        student = vivace.Job(**{**vars(load(reference)), "model": Narrow})
        job = distilled(student, teacher=reference, run=run, weight=weight)
        return vivace.train(job, out=tmp_path / "run", **options)

    train(run, max_steps=2)
    with pytest.raises(JobError, match=r"changed \(weight of the teacher: 3\.0 -> 1\.0\)"):
        train(run, weight=1.0, resume=True)
    with pytest.raises(JobError, match=r"changed \(teacher: weights \w{12} -> weights \w{12}\)"):
        train(other, resume=True)
    assert train(moved, resume=True, max_steps=3).resumed_from_step == 2
    assert any("teacher: weights" in note for note in train(other, resume=True, changed="ok").notices)


@pytest.mark.parametrize(
    "plan",
    [{"bf16_autocast": {}}, {"bf16_weights": {}}, {"micro_batches": {"num": 2}}, {"fused_optimizer": {}}],
    ids=lambda plan: next(iter(plan)),
)
def test_plans_keep_it_the_same_model(student, plan):
    job = student(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    verdict = vivace.verify(job, vivace.Plan.from_dict(plan))
    assert verdict.kept, verdict.reason


def test_what_cannot_be_distilled(trained, student):
    reference, run = trained("job")
    with pytest.raises(JobError, match="weight is 0"):
        distilled(reference, teacher=reference, run=run, weight=0)
    step = vivace.Job(model=Narrow, data=load(reference).data, step=lambda *_: torch.zeros(()))
    with pytest.raises(JobError, match="its loss there"):
        distilled(step, teacher=reference, run=run)
    with pytest.raises(JobError, match="never calls the model"):
        student(loss=lambda model, batch: next(model.parameters()).sum()).model()
    wide = student(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
    )
    with pytest.raises(JobError, match=r"shapes \[\(16, 4\)\], and its teacher's \[\(16, 3\)\]"):
        wide.loss(wide.model(), next(iter(wide.data())))
