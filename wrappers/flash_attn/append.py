"""Append K and V, and rotate Q and K, for `flash_attn_with_kvcache` before it attends.

One launch does all of it, and writes the number of keys that attention then reads, so no torch kernel runs beside the
two launches. Rows of one byte are copied by a kernel that neither rotates nor counts: torch adds the lengths then. A
launch shares positions between rows of Q and of K, so Q has a launch of its own if a request has another number of
queries than of new keys.
"""

from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write.args import FROM_FIRST, INTERLEAVED

from ..attention import checks, plan
from ..attention import op as attention_op
from ..attention import values as attention_values
from ..attention.call import OPTIONS, AttentionCall
from ..cache_write.call import PAGES, ROWS, CacheWriteCall, QueryTransform
from ..cache_write.checks import KVCACHE, WIDE
from ..cache_write.op import serve
from ..host import machine
from ..host.checks import check_apart, check_flag, check_operand, check_shape, check_strided, checking
from ..host.plain import refuse_grad, traced
from ..host.scratch import constant, steps


class Rotary(NamedTuple):
    """Tables of cosines and sines, (L, R / 2), of the dtype of Q and K."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


class NewKeyValues(NamedTuple):
    """Keys and values to append, (N, Hkv, D): request b owns rows starts[b]:starts[b + 1].

    counts: new rows of each request, or one number for all.
    """

    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    counts: int | torch.Tensor
    rotary: Rotary | None = None


def new_rows(
    k: Any, v: Any, starts: Any, batch: int, keys: tuple[torch.Tensor, torch.Tensor], plain: bool
) -> NewKeyValues:
    """Return new rows after a check. keys: the caches, (pages, Hkv, P, D)."""
    lead: tuple[int, ...] = ()
    for name, t, cache in (("k", k, keys[0]), ("v", v, keys[1])):
        check_strided(name, t, 4 if starts is None else 3)
        lead = lead or ((batch, t.shape[1]) if starts is None else (t.shape[0],))
        check_shape(name, t, (*lead, cache.shape[1], cache.shape[3]), "new rows, heads and head_dim of the cache")
        if t.dtype != cache.dtype:
            raise TypeError(f"{name}: dtype {t.dtype}, must be that of {name}_cache, {cache.dtype}")
        if t.device != cache.device:
            raise ValueError(f"{name}: device {t.device}, must be that of {name}_cache, {cache.device}")
    if starts is None:
        starts = constant(steps, k.device, plain, batch + 1, lead[1])
        return NewKeyValues(k.flatten(0, 1), v.flatten(0, 1), starts, lead[1])
    check_operand("cu_seqlens_k_new", starts, 1, (torch.int32,), k.device, "that of k")
    check_shape("cu_seqlens_k_new", starts, (batch + 1,), "requests + 1")
    return NewKeyValues(k, v, starts, starts.diff())


def rotary_of(cos: Any, sin: Any, interleaved: Any, appends: bool) -> Rotary | None:
    """Return the tables of a call, None if it has none."""
    check_flag("rotary_interleaved", interleaved)
    if cos is None and sin is None:
        return None
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if t is None:
            raise ValueError(f"{name}: None, rotary_cos and rotary_sin must be given together")
        check_strided(name, t, 2)
    if not appends:
        raise ValueError("rotary_cos: given without k, must be None: only new keys are rotated, and queries with them")
    return Rotary(cos, sin, interleaved)


def check_rotary(call: AttentionCall, rotary: Rotary) -> None:
    """Raise on tables that do not fit a call, and on queries that have no position of their own."""
    if call.q.dtype not in WIDE or call.k.dtype != call.q.dtype:
        types = f"q {call.q.dtype}, k_cache {call.k.dtype}"
        raise NotImplementedError(f"rotary_cos: given with {types}, both must be {WIDE[0]} or {WIDE[1]}")
    room = call.requests.page_table.shape[2] * call.k.shape[2]
    for name, t in (("rotary_cos", rotary.cos), ("rotary_sin", rotary.sin)):
        if t.shape[0] < room:
            raise ValueError(f"{name}: shape {tuple(t.shape)}, must have at least {room} rows, those of a request")
    single = call.requests.cu_seqlens_q is None and call.max_q_len == 1
    if not (call.causal or call.window_left >= 0 or single or not call.q.shape[0]):
        need = "must be causal, have a window, or one query per request"
        raise NotImplementedError(f"rotary_cos: queries that all stand at one position are not supported: {need}")


def append(call: AttentionCall, new: NewKeyValues) -> AttentionCall:
    """Write new keys and values to the pages of a call, and return the call with all of its keys, and with Q rotated.

    call: its lengths are those before. Raises as the call itself would, before anything is written.
    """
    lens, plain = call.requests.kv_lens, not traced(call.q)
    wide = new.k.dtype in WIDE
    eager = not wide or not new.k.shape[0]  # torch counts the keys
    total = lens + new.counts if eager else torch.empty_like(lens)
    if torch.is_grad_enabled():
        attention_op.refuse_grad(call)
        refuse_grad({"k": new.k, "v": new.v})
    if not plain and new.rotary is not None:
        check_rotary(call, new.rotary)
    if plain and not was_checked(call, new):
        check(call, new)
    # The lengths count the keys before the call. Without a transform, they count the new keys too.
    write = CacheWriteCall(
        KVCACHE, new.k, new.v, call.k, call.v, False, PAGES, page_table=call.requests.page_table[:, 0],
        cu_seqlens=new.starts, kv_lens=total if eager else lens,
    )  # fmt: skip
    q, queries = call.q, None
    if wide:
        transform = QueryTransform(rope=FROM_FIRST, kv_lens_out=None if eager else total)
        if new.rotary is not None:
            q = torch.empty_like(call.q, memory_format=torch.contiguous_format)
            flags = FROM_FIRST | (INTERLEAVED if new.rotary.interleaved else 0)
            transform = transform._replace(rope_cos=new.rotary.cos, rope_sin=new.rotary.sin, rope=flags)
            if together(call, new):
                transform = transform._replace(q=call.q, q_out=q)
            elif call.q.shape[0]:
                queries = _query_call(call, transform._replace(q=call.q, q_out=q, kv_lens_out=None))
        write = write._replace(transform=transform)
    if queries is not None:
        serve(queries)
    if new.k.shape[0]:
        serve(write)
    return call._replace(q=q, requests=call.requests._replace(kv_lens=total))


def was_checked(call: AttentionCall, new: NewKeyValues) -> bool:
    """Return whether `check` has passed calls that differ from this one in memory only.

    Memory that new rows share with caches is found by `cache_write.plan`. A call with an output is always checked.
    """
    key = key_of(call, new)
    return key is not None and key in machine.current.plans


def key_of(call: AttentionCall, new: NewKeyValues) -> tuple[Any, ...] | None:
    """Return all that `check` depends on but memory; None for a call that is checked each time."""
    q, k, v, r = call.q, call.k, call.v, call.requests
    if call.out is not None or checking() or machine.current.device_info(q.device) is None:
        return None
    try:
        found = plan.key_of(call)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        return None  # `check` raises
    options: Any = call[OPTIONS]
    types = [value.__class__ for value in options]
    layouts = [(t.stride(), t.data_ptr() % checks.TMA_BYTES) for t in (q, k, v)]
    tables = new.rotary and (new.rotary.cos.shape[0], new.rotary.sin.shape[0])
    return "append", found, *types, *layouts, r.page_table.shape, tables, len(new.k), new.k.dtype


def check(call: AttentionCall, new: NewKeyValues) -> None:
    """Raise on the first argument that does not fit, also of the attention that follows."""
    name = checks.names_of(call)
    checks.validate(call)
    if new.rotary is not None:
        check_rotary(call, new.rotary)
    check_apart({name("k"): call.k, name("v"): call.v}, {"k": new.k, "v": new.v})
    here = machine.current
    found = here.device_info(call.q.device)
    if found is not None:
        plan.plan_of(call)
        checks.kernel_tensors(call)  # a plan depends on no stride or address
    if not call.q.is_meta and (found is None or checking() and not here.is_capturing()):
        whole = call.requests._replace(kv_lens=call.requests.kv_lens + new.counts)
        attention_values.check(call._replace(requests=whole), positive=found is not None)
    key = key_of(call, new)
    if key is not None:
        here.keep(key, True)


def together(call: AttentionCall, new: NewKeyValues) -> bool:
    """Return whether each request has as many queries as new keys, without a look at a value."""
    offsets = call.requests.cu_seqlens_q
    if call.q.shape[0] != new.k.shape[0]:
        return False
    if offsets is None:
        return not isinstance(new.counts, torch.Tensor) and new.counts == call.max_q_len
    return offsets is new.starts


def _query_call(call: AttentionCall, transform: QueryTransform) -> CacheWriteCall:
    """Return a call that rotates Q alone, to the positions behind the keys that were there before."""
    q, offsets, r = call.q, call.requests.cu_seqlens_q, call.requests
    if offsets is None:
        offsets = constant(steps, q.device, not traced(q), r.batch + 1, call.max_q_len)
    none, cache = q[:, :0], q[None, :, :0]
    return CacheWriteCall(
        KVCACHE, none, none, cache, cache, True, ROWS, cu_seqlens=offsets, kv_lens=r.kv_lens, transform=transform
    )


__all__ = ["NewKeyValues", "Rotary", "append", "new_rows", "rotary_of"]
