"""In the manner of pytorch/examples: a small CNN with dropout, a test pass each epoch, a schedule."""

import argparse
import hashlib
import sys

import torch
import torch.nn.functional as F
from slow import Slow
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.norm = nn.BatchNorm2d(16)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 16, 10)
        self.slow = Slow()

    def forward(self, x):
        x = F.relu(self.conv1(self.slow(x)))
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        return F.log_softmax(self.fc1(torch.flatten(self.dropout1(x), 1)), dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--save-model", default="")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(args.exact)
    data = TensorDataset(torch.randn(args.samples, 1, 12, 12), torch.randint(10, (args.samples,)))
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        model.train()
        for inputs, target in DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss = F.nll_loss(model(inputs), target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            test = F.nll_loss(model(data.tensors[0][:512]), data.tensors[1][:512])
        print(f"epoch {epoch} {test.item():.17g}" if args.exact else f"epoch {epoch}", flush=True)
        scheduler.step()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    if args.exact:
        print(digest.hexdigest(), torch.rand(1).item())
    if args.save_model:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save_model)
    print("read", sys.stdin.readline().strip())
    sys.exit(3)


if __name__ == "__main__":
    main()
