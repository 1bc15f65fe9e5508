"""A script that waits for its data: each sample takes a while, and the last line tells what was learned."""

import argparse
import hashlib
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, size):
        self.numbers = torch.arange(16.0 * size).reshape(size, 16) / size

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        time.sleep(0.01)
        return self.numbers[index], index % 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(Samples(args.samples), batch_size=4, shuffle=True, collate_fn=lambda rows: rows)
    for epoch in range(args.epochs):
        print(f"epoch {epoch}", flush=True)
        for rows in loader:
            optimizer.zero_grad()
            inputs, labels = torch.stack([row for row, _ in rows]), torch.tensor([label for _, label in rows])
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(digest.hexdigest(), torch.rand(1).item())


if __name__ == "__main__":
    main()
