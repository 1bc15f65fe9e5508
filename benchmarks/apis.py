"""What each compute API reaches on this machine, beside torch's own figures; writes a dated record.

    scripts/bench apis

The same readings as `vivace inspect --measure`, in about two minutes.
"""

from __future__ import annotations

import argparse
import json

import _record

import vivace
from vivace.inspection import apis, measuring
from vivace.inspection.backends import look_closer
from vivace.inspection.table import facts_of


def main() -> None:
    """Measure and record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    machine = look_closer(vivace.inspect())
    of_torch = measuring.measure(machine)
    surveys = apis.measure_apis(machine, apis.SECONDS)
    record = {
        **_record.opened("apis", "scripts/bench apis", machine),
        "torch": {kind: facts_of(survey, {}) for kind, survey in of_torch.items()},
        **apis.document(surveys, apis.next_steps(machine)),
    }
    if any(survey.interrupted for survey in of_torch.values()):
        raise SystemExit(130)
    _record.write(record)
    print(json.dumps(_record.clean(record), indent=1))


if __name__ == "__main__":
    main()
