"""Runs a command on the stand-in, which computes.

python tests/cuda_stand_in COMMAND [WORD ...]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import NotBuilt, opened


def main(words):
    """The command's exit code; 2 where the stand-in cannot be built."""
    try:
        with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as machine:
            return subprocess.run(words, env=machine.environment(computes=True), check=False).returncode
    except NotBuilt as missing:
        print(missing, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
