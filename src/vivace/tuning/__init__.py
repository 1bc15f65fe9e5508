"""`vivace.tune`: find the fastest plan for a job on this machine, and prove that it trains the same model."""

from vivace.tuning.result import Result as Result
from vivace.tuning.tuner import tune as tune
