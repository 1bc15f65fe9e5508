"""What runs inside the profiled process: it needs torch, and of Vivace nothing above this folder."""

RECORD, TRACE = "record.json", "trace.json"  # names of files in the profile's folder
