"""Attention and top-k kernels in CuTe DSL, and the tools that build them.

Only `ops`, the functions of wrappers, needs torch."""

__version__ = "0.1.0"
