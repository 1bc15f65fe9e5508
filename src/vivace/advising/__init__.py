"""`vivace.advise`: which device for which job. The catalogue, prices, and predictions. Imports no torch."""

from vivace.advising.advice import Advice as Advice
from vivace.advising.command import answer as answer
from vivace.advising.command import on_software as on_software
from vivace.advising.ranking import advise as advise
