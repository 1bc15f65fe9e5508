"""Graphs as one object, as graph libraries have them: it moves itself, and the model writes into it."""

import weakref

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import vivace


class Store(dict):
    """What a graph holds, and whose it is."""

    def __init__(self, owner):
        super().__init__()
        self.owner = weakref.ref(owner)

    def __reduce__(self):
        return dict, (dict(self),)


class Graphs:
    """Nodes of several graphs, the edges between them, and the graph of each node."""

    def __init__(self, **tensors):
        self.store = Store(self)
        self.store.update(tensors)

    @property
    def batch_size(self):
        return len(self.store["y"])

    def __copy__(self):
        return Graphs(**self.store)

    def to(self, device):
        self.store.update({key: value.to(device) for key, value in self.store.items()})
        return self


def together(graphs):
    """One object of several graphs: the nodes of each have numbers above those of the ones before."""
    nodes = [len(x) for x, _, _ in graphs]
    before = [sum(nodes[:number]) for number in range(len(nodes))]
    return Graphs(
        x=torch.cat([x for x, _, _ in graphs]),
        edges=torch.cat([edges + start for (_, edges, _), start in zip(graphs, before, strict=True)], 1),
        graph=torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(nodes)),
        y=torch.tensor([y for _, _, y in graphs]),
    )


def graph(number):
    random = torch.Generator().manual_seed(number)
    nodes = 4 + number % 5
    edges = torch.randint(nodes, (2, 3 * nodes), generator=random)
    return torch.randn(nodes, 8, generator=random), edges, number % 3


class Network(nn.Module):
    """Each layer adds up what a node's neighbours say, and writes that into the graphs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 3)

    def forward(self, graphs):
        there = graphs.store
        start, end = there["edges"]
        for layer in self.layers:
            said = torch.zeros_like(there["x"]).index_add(0, end, there["x"][start])
            there["x"] = layer(there["x"] + said).relu()
        total = there["x"].new_zeros(len(there["y"]), 16).index_add(0, there["graph"], there["x"])
        return self.head(total)


def job() -> vivace.Job:
    return vivace.Job(
        model=Network,
        data=lambda: DataLoader([graph(n) for n in range(64)], 16, shuffle=True, collate_fn=together),
        loss=lambda model, batch: cross_entropy(model(batch), batch.store["y"]),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    )
