"""The command line: commands, progress on the screen, and the demo."""
