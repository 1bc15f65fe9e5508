"""Each sample is augmented by itself, with a slow filter."""

import torch
from common import MENDED, DataLoader, Dataset, small_cnn, train
from torchvision.transforms import functional as transforms


class Blurred(Dataset):
    """Random images, rotated and blurred one by one."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        image = torch.full((3, 32, 32), index / 512)
        if not MENDED:
            image = transforms.gaussian_blur(transforms.rotate(image, 10.0), 9)
        return image, index % 10


train(small_cnn(16), DataLoader(Blurred(), batch_size=32, shuffle=True))
