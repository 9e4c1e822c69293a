"""Keys that each token chooses by position in its request: FlashAttention 4's gather_kv_indices, beside qv."""

from typing import Any

import torch

from cute_kernels.attention.spec import LSE_NATURAL

from ..attention.call import AttentionCall, slot_sequences
from ..attention.checks import SIGNATURES
from ..attention.views import counts_of
from ..host.checks import check_operand, check_shape, check_strided
from ..host.plain import traced
from ..host.scratch import constant, steps
from ..host.segments import check_boundaries, rows_of_documents

NAME = "gather_kv_indices"


def signature_of(signature: str) -> str:
    """Return the name of a call with chosen keys. signature: of one without."""
    return f"{signature}, {NAME}"


def register(signature: str) -> None:
    """Register how errors name the arguments of calls with chosen keys: as in `signature`, except the keys."""
    SIGNATURES[signature_of(signature)] = SIGNATURES[signature] | dict.fromkeys(("page_table", "kv_lens"), NAME)


def gathered(call: AttentionCall, indices: Any) -> AttentionCall:
    """Return the call, of ragged requests and with qv, in which tokens see the keys that they have chosen.

    indices: int32 (T, K), positions in the token's request; another number is no key.
    """
    given = f"{tuple(indices.shape)}" if isinstance(indices, torch.Tensor) else type(indices).__name__
    if not call.shares_v:
        raise NotImplementedError(f"{NAME}: {given}, not supported without qv, must be None")
    if call.requests.form != "ragged":
        raise NotImplementedError(f"{NAME}: {given}, not supported with a page table, must be None")
    for name, value, off in (
        ("window_size", call.window_left, -1), ("attention_chunk", call.chunk, 0), ("softcap", call.soft_cap or 0.0, 0)
    ):  # fmt: skip
        if value > off:
            raise NotImplementedError(f"{name}: {value}, not supported with {NAME}, must be off")
    starts_q, starts_k, plain = call.requests.cu_seqlens_q, call.requests.kv_starts, not traced(call.q)
    check_operand(NAME, indices, 2, (torch.int32,), call.q.device)
    check_shape(NAME, indices, (call.q.shape[0], indices.shape[1]), "tokens of q, keys")
    assert starts_q is not None and starts_k is not None
    check_boundaries(starts_q, starts_k, call.q.device, "that of q")
    rows = rows_of_documents(indices, starts_q, starts_k, call.causal)
    return call._replace(
        signature=signature_of(call.signature), max_q_len=1, causal=False, lse_form=LSE_NATURAL,
        requests=slot_sequences(rows, counts_of(rows, None, 1, plain), plain),
    )  # fmt: skip


def rows_of_requests(name: str, t: torch.Tensor) -> torch.Tensor:
    """Return rows (B * N, ...) of a tensor (B, N, ...), as a view."""
    batch, rows = check_strided(name, t, 3 if name == NAME else 4).shape[:2]
    if batch > 1 and t.stride(0) != rows * t.stride(1):
        raise ValueError(f"{name}: strides {t.stride()}, the first must be {rows} times the second with {NAME}")
    return t.flatten(0, 1)


def equal_starts(batch: int, length: int, device: torch.device, plain: bool) -> torch.Tensor:
    """Return the offsets of requests of one length, int32 (B + 1,)."""
    return constant(steps, device, plain, batch + 1, length)
