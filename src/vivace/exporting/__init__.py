"""What Vivace found, for use without it: a model as a file for a runtime, proven on it; a plan in words,
for which no torch is needed.
"""

from vivace.exporting.plans import in_words as in_words
from vivace.exporting.result import Exported as Exported
