"""``python -m vivace``: the command line, for torchrun."""

from vivace.command.cli import main

main()
