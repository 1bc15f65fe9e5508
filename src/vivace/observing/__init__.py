"""What one step of a session does: its parts, operators and memory."""
