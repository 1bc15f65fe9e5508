"""`vivace.advise`: which device for which job. The catalogue, prices, and predictions. Imports no torch."""

from vivace.advising.advise import Advice as Advice
from vivace.advising.advise import advise as advise
from vivace.advising.command import answer as answer
