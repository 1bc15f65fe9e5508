"""Anomaly detection was left on."""

import warnings

import torch
from common import MENDED, fast, mlp, rows, train

warnings.filterwarnings("ignore", "Anomaly Detection")
torch.autograd.set_detect_anomaly(not MENDED)
train(mlp(64, 20), fast(rows()))
