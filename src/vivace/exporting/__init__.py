"""What Vivace found, for use without it: a model as a file for a runtime, proven on it; a plan in words."""

from vivace.exporting.plans import in_words as in_words
from vivace.exporting.proving import export as export
from vivace.exporting.result import Exported as Exported
