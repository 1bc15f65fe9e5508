"""`vivace.export`: what Vivace found, for those who go on without it."""

from vivace.exporting.plans import export as export
