"""`vivace.train`: a training whose steps are watched while it runs."""

from vivace.watching.watched import train as train
