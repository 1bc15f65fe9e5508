"""What runs inside the profiled process: it needs torch, and of Vivace nothing above this folder."""
