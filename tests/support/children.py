"""Functions in forked processes: they find everything imported, may be killed, and may give up their rights."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

NOBODY = 65534  # a user without rights
UNKNOWN = 54321  # a user that the system has no entry of


class Child(NamedTuple):
    pid: int
    said: int  # the reading end of a pipe

    def result(self) -> str:
        """Wait for the child and return what the function returned. Fail if it raised or was killed."""
        with os.fdopen(self.said) as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert status == 0, f"exit status {status} (negative: killed by a signal)\n{text}"
        return text


def start(function: Callable[[], str], user: int | None = None) -> Child:
    """Run a function in a forked process, as `user` if this process is root's. It must not use CUDA."""
    said, say = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(say)
        return Child(pid, said)
    status = 1
    try:
        os.close(said)
        if user is not None and os.geteuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        text, status = function(), 0
    except BaseException:
        text = traceback.format_exc()
    os.write(say, text.encode())
    os._exit(status)


def run(function: Callable[[], str], user: int | None = None) -> str:
    return start(function, user).result()
