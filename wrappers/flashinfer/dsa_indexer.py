"""FlashInfer's module `dsa_indexer`: keys of sparse attention, chosen by an indexer with queries and keys in bf16."""

from typing import Any

import torch

from ..host.checks import UnknownName, check_integer, check_number, check_operand, check_shape, check_strided
from ..host.scalars import integer
from ..host.segments import check_boundaries, segments_of
from ..indexer.logits import SEGMENTS, LogitsCall
from ..indexer.selection import SCRATCH, SelectionCall, apart, number_of_keys, serve, tokens_of_pass
from ..topk import checks as topk
from ..topk.checks import TopKCall, TopKTieBreak

__all__ = ["dsa_indexer_topk", "dsa_indexer_topk_workspace_size"]

BACKEND = "cake"  # the one name that upstream's function takes
LARGEST = (1 << 63) - (1 << 32)  # offset that still has room for the number of a token


def dsa_indexer_topk(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *,
    top_k: int = 2048, softmax_scale: float | None = None, q_causal_offsets: torch.Tensor | None = None,
    ratio: int = 1, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    workspace_buffer: torch.Tensor | None = None, indices: torch.Tensor | None = None,
    scores: torch.Tensor | None = None, backend: str = BACKEND,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Choose the top_k keys of each query token by the scores of an indexer, in segments of one batch, exactly.

    The score of token t and key j of its segment is the sum over heads h of
    w[t, h] * max(softmax_scale * q[t, h] . k[j], 0), with products and sums in fp32.

    Args:
        q: bf16 (T, H, D), rotated queries; H is at most 64 and D is 32, 64 or 128 on a GPU. k: bf16 (S, D), rotated
            keys, any row stride. w: fp32 (T, H), weights of the heads.
        cu_seqlens_q, cu_seqlens_k: int32 (N + 1,): where the queries and the keys of each of N segments begin and end.
            A token outside all segments chooses nothing.
        top_k: how many keys a token gets, at least 1. softmax_scale: positive, None for D**-0.5.
        q_causal_offsets: int64 (N,), or None. A token with number u in its segment sees its first
            floor((offset + u + 1) / ratio) keys. None: the queries are the tail of the keys if ratio is 1, else the
            offset is 0.
        ratio: query tokens per key, at least 1.
        max_seqlen_k: no segment has more keys; None: as many as k has. It bounds the memory of a token's scores.
        indices, scores: receive the results, or None.

    Hints: max_seqlen_q, and workspace_buffer, which nothing is written to. backend: "cake", upstream's only one.

    Returns (indices, scores), (T, top_k), int32 and fp32: numbers of keys in their segment, ascending, and their
    scores; then -1 and -inf. The last ones of equal scores are chosen. The bits of a token's result depend on
    its segment alone. Raises before any kernel is launched; torch operations that find the keys of tokens run before
    the last checks. FlashInfer's function.

    >>> q, k = torch.ones(2, 8, 32).bfloat16(), torch.arange(3.0)[:, None].expand(3, 32).bfloat16()
    >>> q_ends, k_ends = torch.tensor([[0, 2], [0, 3]]).int()
    >>> dsa_indexer_topk(q, k, torch.ones(2, 8), q_ends, k_ends, top_k=2, softmax_scale=1 / 32)
    (tensor([[0, 1],
            [1, 2]], dtype=torch.int32), tensor([[ 0.,  8.],
            [ 8., 16.]]))
    """
    call = topk_call(
        q, k, w, cu_seqlens_q, cu_seqlens_k, top_k, softmax_scale, q_causal_offsets, ratio, max_seqlen_q, max_seqlen_k,
        workspace_buffer, indices, scores, backend,
    )  # fmt: skip
    found = serve(call)
    assert call.scores is not None
    return found, call.scores


def dsa_indexer_topk_workspace_size(
    num_queries: int | None = None, num_keys: int | torch.device | None = None, num_segments: int | None = None, *,
    top_k: int = 2048, ratio: int = 1, device: torch.device | int | None = None,
) -> int:  # fmt: skip
    """Return 0, the bytes of a workspace that `dsa_indexer_topk` needs.

    Hints: num_queries, num_keys, num_segments, top_k, ratio, device; of a wrong type they are refused. Without
    num_segments, the first two positions are top_k and device, as in FlashInfer 0.7.2; later states of FlashInfer have
    three numbers there. FlashInfer's function.

    >>> dsa_indexer_topk_workspace_size(2048, torch.device("cpu")), dsa_indexer_topk_workspace_size(4096, 65536, 3)
    (0, 0)
    """
    sizes = {"num_queries": num_queries, "num_keys": num_keys, "num_segments": num_segments}
    if num_segments is None:
        sizes, top_k = {}, top_k if num_queries is None else num_queries
        device = device if num_keys is None else num_keys
    for name, size in (sizes | {"top_k": top_k, "ratio": ratio}).items():
        check_integer(name, integer(size), int(name not in sizes))
    if device is not None and not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"device: {device!r}, must be a torch.device, its name or number, or None")
    return 0


def topk_call(
    q: Any, k: Any, w: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, top_k: Any = 2048, softmax_scale: Any = None,
    q_causal_offsets: Any = None, ratio: Any = 1, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    workspace_buffer: Any = None, indices: Any = None, scores: Any = None, backend: Any = BACKEND,
) -> SelectionCall:  # fmt: skip
    """Return the call of `dsa_indexer_topk`."""
    if backend != BACKEND:
        raise UnknownName(f"backend: {backend!r}, must be {BACKEND!r}")
    tokens, _, dim = check_operand("q", q, 3, (torch.bfloat16,), None).shape
    device, owner = q.device, "that of q"
    check_operand("k", k, 2, (torch.bfloat16,), device, owner)
    check_shape("k", k, (k.shape[0], dim), "keys, elements of q")
    check_boundaries(cu_seqlens_q, cu_seqlens_k, device, owner)
    count, each = number_of_keys(top_k), check_integer("ratio", integer(ratio), 1)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale, positive=True)
    if q_causal_offsets is not None:
        check_operand("q_causal_offsets", q_causal_offsets, 1, (torch.int64,), device, owner)
        check_shape("q_causal_offsets", q_causal_offsets, (len(cu_seqlens_q) - 1,), "segments")
    if max_seqlen_q is not None:
        check_integer("max_seqlen_q", integer(max_seqlen_q), 0)
    width = k.shape[0]
    if max_seqlen_k is not None:
        width = min(width, check_integer("max_seqlen_k", integer(max_seqlen_k), 0))
    if workspace_buffer is not None:
        check_strided("workspace_buffer", workspace_buffer)
    given = {"q": q, "k": k, "w": w, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given |= {"q_causal_offsets": q_causal_offsets}
    for name, out, dtype in (("indices", indices, torch.int32), ("scores", scores, torch.float32)):
        if out is not None:
            check_operand(name, out, 2, (dtype,), device, owner)
            check_shape(name, out, (tokens, count), "tokens, top_k")
            apart(name, out, given)
            given[name] = out
    if scores is None:
        scores = q.new_empty((tokens, count), dtype=torch.float32)
    starts, lengths = windows_of(tokens, cu_seqlens_q, cu_seqlens_k, q_causal_offsets, each, width, k.shape[0])
    scale = torch.full((1,), dim**-0.5 if softmax_scale is None else softmax_scale, device=device)
    scored = LogitsCall(
        SEGMENTS, q, k.view(torch.uint8).unsqueeze(1), w, starts + lengths, width, k_scale=scale.expand(k.shape[0]),
        starts=starts, next_n=max(tokens, 1), compressed=True,
    )  # fmt: skip
    chosen = TopKCall(topk.SEGMENTS, None, count, lengths=lengths, out=indices, tie_break=TopKTieBreak.LARGE)
    return SelectionCall(scored, chosen, tokens, tokens_of_pass(scored, SCRATCH), scores)


def windows_of(
    tokens: int, starts_q: torch.Tensor, starts_k: torch.Tensor, offsets: torch.Tensor | None, ratio: int, width: int,
    keys: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the first key of each token, and how many it sees, int32 (T,)."""
    of = segments_of(tokens, starts_q, starts_k)
    begin, end = of.begin.clamp(0, keys), of.end.clamp(0, keys)
    number = of.number
    if offsets is not None and len(offsets):
        number = number + offsets.clamp(max=LARGEST)[of.segment]
    elif ratio == 1:
        number = number + of.end - of.begin - of.queries
    seen = torch.minimum(torch.div(number + 1, ratio, rounding_mode="floor"), end - begin).clamp(0, width)
    return begin.int(), torch.where(of.inside, seen, 0).int()
