"""The contract of a technique, the workbench that it edits, and how techniques are found by their names."""

from vivace.technique.build import OWN_STEP_SEAMS as OWN_STEP_SEAMS
from vivace.technique.build import Build as Build
from vivace.technique.contract import UNIT_ROUNDOFF as UNIT_ROUNDOFF
from vivace.technique.contract import Card as Card
from vivace.technique.contract import Numerics as Numerics
from vivace.technique.contract import Stage as Stage
from vivace.technique.contract import Technique as Technique
from vivace.technique.contract import Way as Way
from vivace.technique.plain import Plain as Plain
from vivace.technique.step import Seam as Seam
