"""`vivace.compare`: what differs between two runs or profiles, and is the second slower? Imports no torch."""

from vivace.comparing.compared import Compared as Compared
from vivace.comparing.comparison import compare as compare
