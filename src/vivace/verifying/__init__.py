"""`vivace.verify`: is the model that a plan trains still the same model?"""

from vivace.verifying.verdict import Verdict as Verdict
from vivace.verifying.verification import verify as verify
