"""`vivace.export`: a trained model as a file for a runtime, proven on it."""

from vivace.exporting.proving import export as export
from vivace.exporting.result import Exported as Exported
