"""`vivace.profile`: where a step's time and memory go, how far it is from the limit, and what is wrong."""

from vivace.profiling.run import Profiled as Profiled
from vivace.profiling.run import profile as profile
