"""`python -m cute_kernels`: the command `cute-kernels`, also if the package is not installed."""

import signal
import sys

from .cli import main


def run() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("list", "show", "env"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... show | head` ends quietly; a build must report why it ends
    sys.exit(main())


if __name__ == "__main__":  # not in the worker processes of a build
    run()
