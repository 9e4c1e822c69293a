"""Write rows of Q and K that are given in two parts, one that is rotated and one that is not."""

from typing import NamedTuple

import torch

from cute_kernels.cache_write.rows import MAX_TRANSFORMED

from ..host.checks import check_apart
from ..host.plain import traced
from .call import CacheWriteCall
from .checks import NOPE, inputs_of, outputs_of, validate
from .op import serve


def without_v(call: CacheWriteCall) -> CacheWriteCall:
    """Return the call with a V and a cache of V that have no heads."""
    heads = 2 if call.nhd else 1
    sf = None if call.k_sf is None else call.k_sf.narrow(heads, 0, 0)
    return call._replace(v=call.k[:, :0], v_cache=call.k_cache.narrow(heads, 0, 0), v_sf=sf)


class Operands(NamedTuple):
    """One part of the rows of Q and K, rotated or not, and where it is written."""

    q: torch.Tensor  # (N, Hq, M)
    q_out: torch.Tensor
    k: torch.Tensor  # (N, H, M)
    k_cache: torch.Tensor  # (pages, P, H, M) or (pages, H, P, M)


def joined(rope: torch.Tensor, nope: torch.Tensor) -> torch.Tensor | None:
    """Return (..., R + M): the rows of (..., R) and (..., M) as one tensor, if each row of the second lies behind that
    of the first; else None."""
    if traced(rope) or rope.shape[:-1] != nope.shape[:-1] or rope.stride(-1) != 1:
        return None
    if rope.stride() != nope.stride() and _differ(rope, nope):
        return None
    if rope.dtype != nope.dtype or rope.device != nope.device or rope.requires_grad != nope.requires_grad:
        return None
    same = rope.untyped_storage().data_ptr() == nope.untyped_storage().data_ptr()
    if not same or nope.data_ptr() - rope.data_ptr() != rope.shape[-1] * rope.element_size():
        return None
    return rope.as_strided((*rope.shape[:-1], rope.shape[-1] + nope.shape[-1]), rope.stride())


def _differ(rope: torch.Tensor, nope: torch.Tensor) -> bool:
    """Return whether rows have other strides; those of a dimension of size 1, as of a K without heads, do not count."""
    strides = zip(rope.stride()[:-1], nope.stride()[:-1], rope.shape[:-1], strict=True)
    return nope.stride(-1) != 1 or any(a != b for a, b, size in strides if size != 1)


def calls_of(
    call: CacheWriteCall, rope: Operands, nope: Operands | None
) -> tuple[CacheWriteCall, CacheWriteCall | None]:
    """Return the call that rotates and writes the parts `rope` of all rows, and the one that writes the parts `nope`.

    The first one writes both, and the second one is None, if they lie behind each other in every operand. call:
    everything but the operands; V is written with the rotated parts."""
    whole = rope
    if nope is not None and rope.q.shape[2] + nope.q.shape[2] <= MAX_TRANSFORMED:
        found = [joined(*parts) for parts in zip(rope, nope)]
        if all(t is not None for t in found):
            whole, nope = Operands(*found), None  # type: ignore[arg-type]
    first = _of(call, whole)
    if nope is None:
        return first, None
    rest = call.transform._replace(rope_table=None, rope=0, rope_positions=None)  # type: ignore[union-attr]
    return first, _of(call._replace(function=call.function + NOPE, v=None, transform=rest), nope)


def serve_parts(first: CacheWriteCall, second: CacheWriteCall | None) -> None:
    """Run the calls of a function that writes the parts of rows."""
    if second is not None:
        for call in (first, second):  # both before the first is written
            validate(call)
        if not traced(first.k_cache):
            _check_apart(first, second)
    serve(first)
    if second is not None:
        serve(second)


def _check_apart(first: CacheWriteCall, second: CacheWriteCall) -> None:
    """Check that no call writes what the other reads or writes; each has been checked alone."""
    for writes, other in ((first, second), (second, first)):
        check_apart(outputs_of(writes), outputs_of(other) | inputs_of(other))


def _of(call: CacheWriteCall, part: Operands) -> CacheWriteCall:
    """Return the call with its operands."""
    transform = call.transform._replace(q=part.q, q_out=part.q_out)  # type: ignore[union-attr]
    call = call._replace(k=part.k, k_cache=part.k_cache, transform=transform)
    return without_v(call) if call.v is None else call
