"""Two ranks read the same samples: nobody gave them a DistributedSampler."""

import torch
from common import MENDED, DataLoader, images, small_cnn, train
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
distributed.init_process_group("gloo")
data = images()
sampler = DistributedSampler(data) if MENDED else None
loader = DataLoader(data, batch_size=32, sampler=sampler)
train(DistributedDataParallel(small_cnn(16)), loader)
distributed.destroy_process_group()
