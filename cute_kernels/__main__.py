"""`python -m cute_kernels`: the command `cute-kernels`, also where the package is not installed."""

import sys

from .cli import main

if __name__ == "__main__":  # not in the processes that a build starts
    sys.exit(main())
