"""RoPE and quantisation of rows of latent attention (MLA), where K has no heads, for `rope_quantize`.

The kernel behind `append_latent` does it in one launch if it has the sizes and if the parts of Q's output lie behind
each other in the order [nope, rope], as MLA's kernels read them. The kernel that writes rows of K and V does the rest.
"""

from typing import Any, NamedTuple

import torch

from cute_kernels.latent import write
from cute_kernels.latent.request import LatentRequest

from ..cache_write import parts
from ..cache_write.call import CacheWriteCall
from ..cache_write.parts import joined
from ..host.checks import UnknownName, check_integer, check_one_of, check_operand, check_shape, listed
from ..host.plain import traced
from ..host.scalars import integer
from ..latent import op
from ..latent.call import LatentCall
from ..latent.checks import E4M3

RECORD = "e4m3"
LAYOUTS = "HND", "NHD"  # of a cache with heads; a hint here


class LatentParts(NamedTuple):
    """The parts of Q (N, Hq, R or M), and those of K without heads (N, R or M)."""

    q: torch.Tensor
    q_nope: torch.Tensor
    k: torch.Tensor
    k_nope: torch.Tensor


def has_kernel(rows: LatentParts, dtype: torch.dtype) -> bool:
    """Return whether the kernel of latent attention serves these parts and this dtype of the outputs."""
    if dtype != E4M3 or traced(rows.q):
        return False
    (tokens, heads, rotated), rest = rows.q.shape, rows.q_nope.shape[2]
    request = LatentRequest("bf16", RECORD, rest, rotated, (rest, rotated), tokens * (1 + heads))
    return write.refuses(request) is None


def new_query(rows: LatentParts, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new outputs of both parts of Q, the rotated one first: views of one tensor that holds [nope, rope]."""
    (tokens, heads, rotated), rest = rows.q.shape, rows.q_nope.shape[2]
    whole = torch.empty((tokens, heads, rest + rotated), dtype=dtype, device=rows.q.device)
    return whole[..., rest:], whole[..., :rest]


def latent_call(
    function: str, rows: LatentParts, outputs: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[torch.Tensor, torch.Tensor], scales: tuple[float, float], **given: Any,
) -> LatentCall | None:  # fmt: skip
    """Return the call of the kernel of latent attention, None if Q's outputs do not lie as it writes them.

    outputs: of both parts of Q, the rotated one first. caches: of the latent and of the rotated part. scales: by which
    Q and K are divided. given: other fields of the call."""
    check_one_of("cos_sin_cache: dtype", given["rope_table"].dtype, (torch.float32,))
    whole = joined(outputs[1], outputs[0])
    if whole is None:
        return None
    return LatentCall(
        function, RECORD, rows.k_nope, rows.k, *caches, q=rows.q_nope, q_pe=rows.q, q_out=whole, q_scale=scales[0],
        scale=scales[1], **given,
    )  # fmt: skip


def cache_parts(
    name: str, value: Any, layout: Any, sizes: tuple[int, int], dtype: torch.dtype, page_size: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches of the latent and of the rotated part, after a check of their shapes and dtypes.

    name: of the pair. layout: of a cache with heads, which this one is not. sizes: elements of a row of each."""
    if layout not in LAYOUTS:
        raise UnknownName(f"kv_layout: {layout!r}, must be one of {listed(LAYOUTS)}")
    if not isinstance(value, tuple | list):
        raise TypeError(f"{name}: {type(value).__name__}, must be a tuple (ckv, kpe)")
    if len(value) != 2:
        raise ValueError(f"{name}: a tuple of {len(value)}, must be (ckv, kpe)")
    ckv, kpe = value
    for part, t, width in (("ckv", ckv, sizes[0]), ("kpe", kpe, sizes[1])):
        check_operand(f"{name} ({part})", t, 3, (dtype,), None)
        shape = (*ckv.shape[:2], width)
        check_shape(f"{name} ({part})", t, shape, "pages and rows of (ckv), and elements of that part of K")
    if check_integer("page_size", integer(page_size), 1) != ckv.shape[1]:
        raise ValueError(f"page_size: {page_size}, must be that of {name}, {ckv.shape[1]}")
    return ckv, kpe


def serve(first: CacheWriteCall | LatentCall, second: CacheWriteCall | None) -> None:
    """Run the calls of a function that rotates and quantises."""
    if isinstance(first, LatentCall):
        op.serve(first)
    else:
        parts.serve_parts(first, second)
