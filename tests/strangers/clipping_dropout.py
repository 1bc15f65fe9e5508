"""A perceptron with dropout, gradient clipping and RMSprop, on scikit-learn's breast cancer data."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import vivace

x, y = load_breast_cancer(return_X_y=True)
x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
y = torch.tensor(y, dtype=torch.float32)
train, held_out = torch.utils.data.random_split(
    torch.utils.data.TensorDataset(x, y), [0.8, 0.2], generator=torch.Generator().manual_seed(0)
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(30, 256)
        self.second = nn.Linear(256, 256)
        self.out = nn.Linear(256, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        x = self.dropout(self.first(x).relu())
        x = self.dropout(self.second(x).relu())
        return self.out(x).squeeze(-1)


def auc(model, batches):
    right = total = 0
    for inputs, targets in batches:
        right += ((model(inputs) > 0) == (targets > 0.5)).sum().item()
        total += targets.numel()
    return right / total


job = vivace.Job(
    model=Net,
    data=lambda: torch.utils.data.DataLoader(train, batch_size=64, shuffle=True, drop_last=True),
    loss=lambda model, batch: nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    on_gradients=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    validation=lambda: torch.utils.data.DataLoader(held_out, batch_size=128),
    metric=auc,
    epochs=4,
)
