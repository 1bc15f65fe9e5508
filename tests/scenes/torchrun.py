"""torchrun with the command line on two ranks, in forked processes.

The global SCENE holds the command line's words, folder and environment, files for output and errors, and the
program of a rank, mostly rank.py.
"""

import os

from torch.distributed.run import main

scene = globals()["SCENE"]
os.environ.update(scene["environment"])
os.chdir(scene["folder"])
for number, path in enumerate(scene["written"], 1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
options = ["--standalone", "--nproc-per-node", "2", "--start-method", "fork"]
main([*options, "--run-path", scene["program"], *scene["words"]])
