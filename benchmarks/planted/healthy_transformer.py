"""A transformer encoder with AdamW and a schedule."""

import torch
from common import TensorDataset, fast, functional, nn, train


class Encoder(nn.Module):
    """Embedding, two layers, classifier."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(128, 10)

    def forward(self, tokens):
        return self.out(self.encoder(self.embed(tokens)).mean(dim=1))


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)


def step(model, optimizer, tokens, labels):
    functional.cross_entropy(model(tokens), labels).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()


data = TensorDataset(torch.randint(100, (1024, 64)), torch.randint(10, (1024,)))
train(model, fast(data), optimizer, step=step)
