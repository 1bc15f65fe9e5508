"""Jobs of the kinds that Vivace has C code of its own for, beside those that other benchmarks train."""

from __future__ import annotations

import torch
import torchvision
from jobs import NUM_CHARACTERS, NUM_CLASSES, adam, adamw, images, loader, next_token_loss, sgd, text
from peer_jobs import image_job
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

import vivace

NUM_NODES, NUM_EDGES, WIDTH = 20_000, 160_000, 128

mobilenet_v2 = image_job(
    lambda: torchvision.models.mobilenet_v2(num_classes=NUM_CLASSES), sgd(0.02), size=112, batch_size=16
)
mnasnet = image_job(
    lambda: torchvision.models.mnasnet1_0(num_classes=NUM_CLASSES), sgd(0.02), size=112, batch_size=16
)
shufflenet_v2 = image_job(
    lambda: torchvision.models.shufflenet_v2_x1_0(num_classes=NUM_CLASSES), sgd(0.02), size=112, batch_size=32
)
efficientnet_b0 = image_job(
    lambda: torchvision.models.efficientnet_b0(num_classes=NUM_CLASSES),
    adamw(1e-3),
    size=112,
    batch_size=16,
)


vgg11 = image_job(
    lambda: torchvision.models.vgg11_bn(num_classes=NUM_CLASSES), sgd(0.01), size=64, batch_size=16
)


class CharacterGRU(nn.Module):
    """Characters of text by a gated recurrent unit (Cho et al., 2014, arXiv:1406.1078)."""

    def __init__(self, width: int = 256, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CHARACTERS, width)
        self.gru = nn.GRU(width, width, num_layers, batch_first=True)
        self.head = nn.Linear(width, NUM_CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each position's next character."""
        return self.head(self.gru(self.embedding(tokens))[0])


class Tagger(nn.Module):
    """A class of each character by LSTMs in both directions (Huang et al., 2015, arXiv:1508.01991)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CHARACTERS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits (characters of all texts, 2)."""
        given = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(given)[0].data)


class GraphNetwork(nn.Module):
    """Each node adds up what the nodes with an edge to it say (Kipf and Welling, 2017, arXiv:1609.02907)."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        """Logits of each node's class."""
        for layer in self.layers:
            said = layer(nodes)
            heard = torch.zeros_like(said).index_add_(0, targets, said[sources])
            nodes = nodes + functional.relu(heard / (NUM_EDGES / NUM_NODES))
        return self.head(nodes)


class WaveNetwork(nn.Module):
    """Sound by four convolutions and poolings (Dai et al., 2017, arXiv:1610.00087, M5)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(1, width, 80, stride=4), *self._behind(width)]
        for inputs, outputs in ((1, 1), (1, 2), (2, 4)):
            layers.append(nn.Conv1d(inputs * width, outputs * width, 3, padding=1))
            layers += self._behind(outputs * width)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, NUM_CLASSES)

    def _behind(self, width: int) -> list[nn.Module]:
        return [nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(4)]

    def forward(self, waves: Tensor) -> Tensor:
        """Logits of each wave's class."""
        return self.head(self.layers(waves).mean(-1))


class Enlarger(nn.Module):
    """Images of twice the size, by residual blocks with PReLU (Ledig et al., 2017, arXiv:1609.04802)."""

    def __init__(self, width: int = 48, num_blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 9, padding=4), nn.PReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.PReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(num_blocks)
        )
        self.head = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.PReLU(),
            nn.Conv2d(width, 3, 9, padding=4),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """The larger pictures."""
        hidden = self.stem(pictures)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def graph() -> list[tuple[Tensor, ...]]:
    """Eight batches of a graph with edges at random: nodes, both ends of each edge, classes."""
    draw = torch.Generator().manual_seed(0)
    sources, targets = torch.randint(NUM_NODES, (2, NUM_EDGES), generator=draw)
    classes = torch.randint(NUM_CLASSES, (NUM_NODES,), generator=draw)
    return [(torch.randn(NUM_NODES, WIDTH, generator=draw), sources, targets, classes)] * 8


def texts(num_texts: int, longest: int) -> TensorDataset:
    """Texts of different lengths, each the beginning of one of `longest` characters; and how long."""
    draw = torch.Generator().manual_seed(0)
    tokens, _ = text(num_texts, longest).tensors
    return TensorDataset(tokens, torch.randint(8, longest + 1, (num_texts,), generator=draw))


def tagged_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Is a character a letter? The mean over the characters of all texts."""
    tokens, lengths = batch
    letters = pack_padded_sequence(
        (tokens >= ord("A")).long(), lengths, batch_first=True, enforce_sorted=False
    )
    return functional.cross_entropy(model(tokens, lengths), letters.data)


def waves(num_waves: int, length: int) -> TensorDataset:
    """Tones in noise, and the class of each by its pitch."""
    draw = torch.Generator().manual_seed(0)
    classes = torch.randint(NUM_CLASSES, (num_waves,), generator=draw)
    pitch = 0.01 * (classes + 1)[:, None, None]
    noise = torch.randn(num_waves, 1, length, generator=draw)
    return TensorDataset(torch.sin(pitch * torch.arange(length)) + 0.5 * noise, classes)


def enlarged_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean distance to pictures of which the model is given every second pixel."""
    pictures, _ = batch
    return functional.l1_loss(model(pictures[:, :, ::2, ::2]), pictures)


gru = vivace.Job(
    model=CharacterGRU,
    data=lambda: loader(text(2048, length=64), batch_size=32),
    loss=next_token_loss,
    optimizer=adam(2e-3),
    epochs=5,
)
tagger = vivace.Job(
    model=Tagger,
    data=lambda: loader(texts(2048, longest=64), batch_size=32),
    loss=tagged_loss,
    optimizer=adam(2e-3),
    epochs=5,
)
graph_network = vivace.Job(
    model=GraphNetwork,
    data=graph,
    loss=lambda model, batch: functional.cross_entropy(model(*batch[:3]), batch[3]),
    optimizer=adam(1e-2),
    epochs=20,
)
sound = vivace.Job(
    model=WaveNetwork,
    data=lambda: loader(waves(256, length=16_000), batch_size=16),
    loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=adam(1e-3),
    epochs=10,
)
enlarger = vivace.Job(
    model=Enlarger,
    data=lambda: loader(images(256, size=96), batch_size=4),
    loss=enlarged_loss,
    optimizer=adam(1e-3),
    epochs=10,
)
