"""What runs inside the profiled process: it needs torch, and of Vivace nothing above this folder."""

RECORD, TRACE = "record.json", "trace.json"  # names of files in the profile's folder
CUT = "vivace:cut"  # a range of the trace that stands in a step which was not recorded to its end
