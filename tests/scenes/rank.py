"""The command line on a forked rank of torchrun."""

import torch

from vivace.command.cli import main

torch.set_num_threads(1)
main()
