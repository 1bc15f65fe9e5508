"""Each sample is a JPEG that is decoded every time."""

import io

import numpy
import torch
from common import MENDED, DataLoader, Dataset, small_cnn, train
from PIL import Image


class Photographs(Dataset):
    """JPEG files in memory, decoded to 32 x 32."""

    def __init__(self):
        random = numpy.random.default_rng(0)
        self.files = []
        for _ in range(64):
            buffer = io.BytesIO()
            Image.fromarray(random.integers(0, 255, (256, 256, 3), dtype=numpy.uint8)).save(buffer, "JPEG")
            self.files.append(buffer.getvalue())
        self.kept = [self.decode(index) for index in range(64)] if MENDED else None

    def __len__(self):
        return 512

    def decode(self, index):
        image = Image.open(io.BytesIO(self.files[index])).convert("RGB").resize((32, 32))
        return torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1).float() / 255

    def __getitem__(self, index):
        return (self.kept[index % 64] if self.kept else self.decode(index % 64)), index % 10


train(small_cnn(16), DataLoader(Photographs(), batch_size=32, shuffle=True))
