"""A torchvision network on small images, with an augmenting Dataset, label smoothing and a validation set."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.transforms import v2

from vivace import Job


class Patches(Dataset):
    def __init__(self, count, train):
        generator = torch.Generator().manual_seed(1 if train else 2)
        self.labels = torch.randint(10, (count,), generator=generator)
        noise = torch.randn(count, 3, 16, 16, generator=generator)
        self.images = noise + torch.linspace(-2, 2, 10)[self.labels, None, None, None]
        self.transform = (
            v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(16, padding=2)]) if train else None
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.transform is not None:
            image = self.transform(image)
        return image, self.labels[index]


def accuracy(model, batches):
    hits = [(model(x).argmax(1) == y).float().mean().item() for x, y in batches]
    return sum(hits) / len(hits)


job = Job(
    model=lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10),
    data=lambda: DataLoader(Patches(64, train=True), batch_size=8, shuffle=True, drop_last=True),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    validation=lambda: DataLoader(Patches(16, train=False), batch_size=8),
    metric=accuracy,
    epochs=3,
)
