"""One technique a file; the file's name is the technique's name, and its existence registers it."""
