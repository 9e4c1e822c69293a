"""The public functions, those of `wrappers`: `from cute_kernels.ops import xqa` equals `from wrappers import xqa`.

Needs torch. Import from here if another module may be called `wrappers`: this module then raises ImportError and
names it."""

import sys
from importlib.util import find_spec
from pathlib import Path


def _require(ours: Path) -> None:
    """Raise ImportError unless the module `wrappers` of this process is the file `ours`."""
    module = sys.modules.get("wrappers")
    spec = None if module else find_spec("wrappers")
    if module is None and spec is None:
        raise ImportError(f"cute_kernels.ops needs the package wrappers, which must be {ours}: there is none")
    file = getattr(module, "__file__", None) if module else spec.origin if spec else None
    if not file or Path(file).resolve() != ours.resolve():
        other = file or f"a folder without __init__.py, {list(getattr(module or spec, '__path__', []))}"
        raise ImportError(f"the module wrappers is {other}, which hides {ours}: rename it or remove it from sys.path")


_require(Path(__file__).resolve().parents[1] / "wrappers" / "__init__.py")

from wrappers import *  # noqa: E402, F403
from wrappers import __all__ as __all__  # noqa: E402
