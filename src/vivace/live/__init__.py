"""`vivace.run`: a script as it is, made faster while it trains."""

from vivace.live.here import run_here as run_here
from vivace.live.launch import Ran as Ran
from vivace.live.launch import run as run
