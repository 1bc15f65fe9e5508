"""`vivace.compare`: what differs between two runs, profiles or records, and is the second slower? No torch."""

from vivace.comparing.compared import Compared as Compared
from vivace.comparing.comparison import compare as compare
