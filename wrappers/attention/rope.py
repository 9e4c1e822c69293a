"""Rotary embedding on CUDA: a problem with it as one without."""

from .problem import Problem


def rotated(p: Problem) -> Problem:
    raise NotImplementedError("rope: no CUDA kernel")
