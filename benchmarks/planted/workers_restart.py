"""Short epochs, and the workers start anew in each."""

from common import MENDED, DataLoader, images, small_cnn, train

loader = DataLoader(images(256), batch_size=32, num_workers=2, persistent_workers=MENDED)
train(small_cnn(16), loader)
