"""`vivace.train`: a training whose steps are watched while it runs."""

from vivace.watching.train import train as train
