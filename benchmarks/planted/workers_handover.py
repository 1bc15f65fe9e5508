"""Batches that are there already are sent through worker processes."""

from common import MENDED, DataLoader, Whole, mlp, rows, train

data = rows(8192, inputs=2048)
loader = DataLoader(
    Whole(data, 256), batch_size=None, num_workers=0 if MENDED else 4, persistent_workers=not MENDED
)
train(mlp(64, 2, inputs=2048), loader)
