import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, Subset
from torchvision import transforms
from torchvision.transforms import v2

from vivace.errors import Refused
from vivace.mechanisms.pixels import cut

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Gradients(Dataset):
    def __init__(self, *steps, compose=transforms.Compose, mode="RGB"):
        self.transform, self.mode = compose(steps) if steps else None, mode

    def __len__(self):
        return 256

    def __getitem__(self, index):
        gradient = Image.linear_gradient("L").rotate(index)
        if self.mode == "RGB":
            gradient = Image.merge("RGB", (gradient, gradient.rotate(90), gradient.rotate(45)))
        return self.transform(gradient.convert(self.mode)), index


ENDINGS = {
    "first generation": (transforms.ToTensor(), transforms.Normalize(MEAN, STD)),
    "bare": (transforms.ToTensor(),),
    "second generation": (v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)),
    "mixed": (
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float32),
        transforms.Normalize(MEAN, STD),
    ),
    "in place": (transforms.ToTensor(), transforms.Normalize(MEAN, STD, inplace=True)),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_bytes_finished_on_the_device_are_the_same_floats_bit_for_bit(name):
    dataset = Gradients(transforms.CenterCrop(200), *ENDINGS[name])
    found = cut(Subset(dataset, range(0, 250, 10)))
    sent = torch.stack([torch.as_tensor(found.dataset[n][0]) for n in range(25)])
    assert sent.dtype == torch.uint8
    assert len(sent.unique()) == 256
    wanted = torch.stack([torch.as_tensor(dataset[10 * n][0]) for n in range(25)])
    assert torch.equal(found.finish(sent), wanted)
    assert dataset[0][0].dtype == torch.float32


@pytest.mark.parametrize("name", ["first generation", "mixed"])
def test_bytes_are_divided_by_a_tensor(name):
    """Of a number a GPU takes the reciprocal, which is another float for half of all bytes."""

    class Divisors(TorchDispatchMode):
        seen = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_) and self.seen is None:
                self.seen = args[1]
            return func(*args, **(kwargs or {}))

    found = cut(Gradients(transforms.CenterCrop(8), *ENDINGS[name]))
    with Divisors() as divisors:
        found.finish(torch.as_tensor(found.dataset[0][0])[None])
    assert isinstance(divisors.seen, torch.Tensor)


def test_a_dataset_that_is_told_the_epoch_is_not_copied():
    dataset = Gradients(transforms.ToTensor())
    dataset.set_epoch = print
    with pytest.raises(
        Refused, match="your Gradients is told the epoch by set_epoch, which a copy of it would"
    ):
        cut(Subset(dataset, range(4)))


def test_torchvisions_own_pair_of_transforms_is_changed_too():
    from torchvision.datasets import FakeData

    dataset = FakeData(4, (3, 8, 8), 2, transforms.ToTensor(), lambda label: label + 5)
    found = cut(dataset)
    pixels, label = found.dataset[1]
    assert pixels.dtype == torch.uint8
    assert label >= 5
    assert found.moved == ("ToTensor",)
    assert torch.equal(found.finish(pixels), dataset[1][0])


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((), "your Gradients has no torchvision Compose"),
        ((transforms.ToTensor(), transforms.RandomErasing()), "floats: RandomErasing comes"),
        (
            (transforms.ToTensor(), lambda pixels: pixels, transforms.Normalize(MEAN, STD)),
            "floats: function comes",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(steps, reason):
    with pytest.raises(Refused, match=reason):
        cut(Gradients(*steps))


def test_a_picture_that_is_not_bytes_is_refused():
    found = cut(Gradients(transforms.ToTensor(), mode="1"))
    with pytest.raises(Refused, match="mode 1 does not consist of bytes"):
        found.dataset[0]


class TestAugmenting:
    def test_every_picture_draws_for_itself_from_the_same_distribution(self):
        steps = (
            transforms.RandomHorizontalFlip(0.3),
            transforms.RandomVerticalFlip(1.0),
            transforms.ToTensor(),
        )
        dataset = Gradients(transforms.CenterCrop(8), *steps)
        found = cut(dataset, augment=True)
        assert found.moved == ("RandomHorizontalFlip", "RandomVerticalFlip", "ToTensor")
        torch.manual_seed(0)
        sent = torch.stack([found.dataset[3][0]] * 2000)
        done = found.finish(sent)
        upright = sent[0].flip(-2).float() / 255
        flipped = (done == upright.flip(-1)).flatten(1).all(1)
        assert ((done == upright).flatten(1).all(1) | flipped).all()
        assert 0.26 < float(flipped.float().mean()) < 0.34

    def test_other_steps_act_on_each_picture_alone(self):
        steps = transforms.ColorJitter(0.5), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)
        found = cut(Gradients(transforms.CenterCrop(8), *steps, transforms.RandomErasing(1.0)), augment=True)
        assert found.moved == ("ColorJitter", "ToDtype", "RandomErasing")
        sent = torch.stack([torch.as_tensor(found.dataset[3][0])] * 6)
        assert sent.dtype == torch.uint8
        done = found.finish(sent)
        assert done.dtype == torch.float32
        assert len({tuple(one.flatten().tolist()) for one in done}) == 6

    def test_nothing_random_is_refused(self):
        with pytest.raises(Refused, match="does nothing random at its end"):
            cut(Gradients(transforms.CenterCrop(8), transforms.ToTensor()), augment=True)
