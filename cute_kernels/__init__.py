"""Attention and top-k kernels in CuTe DSL, and what builds them. No torch, but for `ops`: the functions of wrappers."""

__version__ = "0.1.0"
