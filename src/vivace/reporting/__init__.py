"""`vivace.report`: one page, and the same in the terminal, of what was measured. Imports no torch."""

from vivace.reporting.page import report as report
from vivace.reporting.tables import terminal as terminal
