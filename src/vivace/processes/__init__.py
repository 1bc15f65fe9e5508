"""Child processes: forked from one that has everything imported, asked by messages."""
