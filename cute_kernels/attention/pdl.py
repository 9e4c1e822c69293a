"""The prologue under programmatic dependent launch (PDL): work that a CTA does before the previous kernel has ended.

That kernel may still write the lengths and offsets. A result computed from them must be checked against the values read
after `griddepcontrol.wait` (`stream_k.first_work`, `load.load_kv`).
"""

from ..device.uncached import UncachedTensor
from . import geometry
from .operands import tensors


def has_prologue(spec):
    """Return whether a CTA finds its first tile while the previous kernel may still run."""
    return spec.tile.pdl_prologue


def prologue_threads(spec):
    """Return the number of threads at the barrier of prologues: the schedule warp and those that load K and V."""
    return 32 * (1 + len(tensors(spec.kv)) * spec.tile.load_warps)


def uncached_args(spec, a):
    """Return the arguments, with all values of sequences as `UncachedTensor` in kernels with a PDL prologue."""
    if not has_prologue(spec):
        return a
    for block, fields in geometry.SEQUENCE_ARGS.items():
        given = getattr(a, block)
        had = {name: getattr(given, name) for name in fields if getattr(given, name) is not None}
        a = a._replace(**{block: given._replace(**{name: UncachedTensor(t) for name, t in had.items()})})
    return a
