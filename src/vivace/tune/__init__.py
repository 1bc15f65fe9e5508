"""`vivace.tune`: find the fastest plan for a job on this machine, and prove that it trains the same model."""

from vivace.tune.result import Result as Result
from vivace.tune.tuner import tune as tune
from vivace.verb import make_callable

make_callable(__name__)
