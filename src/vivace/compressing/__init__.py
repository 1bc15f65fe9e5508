"""`vivace.compress`: a trained model in the form that is really faster on this machine, and no worse."""

from vivace.compressing.finding import compress as compress
from vivace.compressing.result import Compressed as Compressed
