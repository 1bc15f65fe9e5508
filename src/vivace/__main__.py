"""``python -m vivace``: the command line, for torchrun."""

from vivace.cli import main

main()
