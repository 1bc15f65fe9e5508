"""Forks the zygote from this process, which has made all imports and done nothing: it makes none itself."""

import multiprocessing
import os
import signal
import socket

from vivace.processes import launch, zygote


class Process:
    """What `vivace.processes.launch` asks of a process that it has started."""

    def __init__(self, pid):
        self.pid, self.ended = pid, None

    def poll(self, options=os.WNOHANG):
        if self.ended is None:
            found, status = os.waitpid(self.pid, options)
            self.ended = os.waitstatus_to_exitcode(status) if found else None
        return self.ended

    def wait(self):
        return self.poll(0)

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Forked(launch._Zygote):
    def __init__(self):
        self._socket, theirs = socket.socketpair()
        parent, pid = os.getpid(), os.fork()
        if pid:
            theirs.close()
            self.process = Process(pid)
            return
        try:
            self._socket.close()
            os.setsid()
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as `launch` does it
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nothing, number)
            zygote.main(theirs.detach(), parent)
        finally:
            os._exit(1)


multiprocessing.set_start_method("fork", force=True)  # what the fork server set is for itself
launch._zygotes[os.getpid()] = Forked()
