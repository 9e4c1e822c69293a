"""`python -m cute_kernels`: the command `cute-kernels`, also where the package is not installed."""

import signal
import sys

from .cli import main


def run() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... show | head` ends quietly
    sys.exit(main())


if __name__ == "__main__":  # not in the processes that a build starts
    run()
