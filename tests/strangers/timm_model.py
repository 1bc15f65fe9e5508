"""A timm vision transformer with its own optimizer factory."""

import timm
import timm.optim
import torch

import vivace

images = torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(0))
labels = (images.mean((1, 2, 3)) > 0).long()
criterion = torch.nn.CrossEntropyLoss()


def build():
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=32,
        patch_size=8,
        num_classes=2,
        depth=2,
        drop_path_rate=0.1,
    )


def get_loss(model, batch):
    inputs, targets = batch
    return criterion(model(inputs), targets)


job = vivace.Job(
    model=build,
    data=lambda: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, labels), batch_size=8, shuffle=True
    ),
    loss=get_loss,
    optimizer=lambda model: timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05),
    epochs=2,
)
