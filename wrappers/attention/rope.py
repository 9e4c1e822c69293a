"""Rotary embedding before a launch: one launch of a kernel that writes caches rotates Q and K of the call.

The attention kernels have none. K is read once and written once: the kernel reads it from its pages and writes it to
new pages, with the page table that belongs to them. Nothing here waits for the device or copies from it, so a call can
be captured.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import ANGLES, fields
from cute_kernels.cache_write.request import CacheWriteRequest
from cute_kernels.cache_write.spec import CacheWriteSpec

from .. import reference
from ..cache_write.plan import groups
from ..cache_write.rotation import turns
from ..host import machine
from ..host.scratch import constant, kept, steps
from .call import AttentionCall, Rope

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class RotationPlan(NamedTuple):
    """A compiled kernel, or the reference, and its arguments, except the tensors of a call and its outputs.

    at: the position of each argument in `flat`.
    """

    fn: Callable[..., Any]
    flat: list[Any]
    at: dict[str, int]
    lanes: int  # per row


class RotatedCall(NamedTuple):
    """Tensors that replace those of a call. k: (rows, Hkv, D), the rows of all pages one after another."""

    q: torch.Tensor
    k: torch.Tensor
    page_table: torch.Tensor


def rotated(call: AttentionCall, offsets: Any = None) -> AttentionCall:
    """Return the call with rotated copies of Q and K, and without `rope`.

    Otherwise only K's row of the page table differs.

    Entry e of the page table becomes page e of the new K, (pages, Hkv, P, D) with heads inside rows, rotated at the
    positions of its request: a page in several entries is copied for each. K takes memory for all entries, used or not:
    B * M pages for a table (B, 2, M) whatever the lengths, N pages for CSR, all rows of ragged K; only rows of keys are
    written. An entry outside the pool becomes -1, which kernels read as zeros. Lengths and offsets are clamped. If
    offsets fall, a row or page of several requests is rotated for one of them. Query positions are negative if a
    request has more queries than keys.

    offsets: those of the queries in the form of `HostMachine.argument`, if the call has none. Raises
    NotImplementedError unless Q and K have 16 bits and the kernel can rotate their head_dim.
    """
    if call.rope is None:
        return call
    for name, x in (("query", call.q), ("key", call.k)):
        if x.dtype not in TYPES:
            kind = "NVFP4" if x.dtype == torch.uint8 else str(x.dtype).removeprefix("torch.")
            raise NotImplementedError(f"pos_encoding_mode: 'ROPE_LLAMA' with a {kind} {name}, must be fp16 or bf16")
    if not (call.requests.batch and call.k.shape[0] and call.k.shape[2]):  # no request has keys
        return call._replace(rope=None)
    out = new_tensors(call)
    rotate(call, call.rope, out, offsets)
    requests, size = call.requests, call.k.shape[2]
    if requests.form == "ragged":
        return call._replace(q=out.q, k=out.k.transpose(0, 1)[None], rope=None)
    k, requests = out.k.unflatten(0, (-1, size)).transpose(1, 2), requests._replace(page_table=out.page_table)
    return call._replace(q=out.q, k=k, requests=requests, rope=None)


def new_tensors(call: AttentionCall) -> RotatedCall:
    """Return tensors for the rotated Q and K of a call."""
    r, (_, heads, size, dim) = call.requests, call.k.shape
    columns = r.page_table.shape
    count = size if r.form == "ragged" else columns[0] * columns[2] * size
    return RotatedCall(
        call.q.new_empty(call.q.shape), call.k.new_empty(count, heads, dim), r.page_table.new_empty(columns)
    )


def rotate(call: AttentionCall, rope: Rope, out: RotatedCall, offsets: Any = None) -> None:
    """Write the rotated Q and K of a call, and its page table. offsets: as in `rotated`."""
    q, r, device = call.q, call.requests, call.q.device
    if not q.shape[0] + out.k.shape[0]:
        return
    plan = plan_for(call)
    flat, at = plan.flat.copy(), plan.at
    ragged = r.form == "ragged"
    if offsets is None:
        offsets = r.cu_seqlens_q
    if offsets is None:
        offsets = constant(steps, device, True, r.batch + 1, call.max_q_len)
    shared = groups(q.shape[0] + out.k.shape[0], max(q.shape[1], out.k.shape[1]), plan.lanes)
    given = dict(
        q=q, q_out=out.q, k=out.k, k_cache=call.k.permute(2, 1, 0, 3) if ragged else call.k, tables=r.page_table,
        tables_out=out.page_table, cu_seqlens=offsets, k_groups=shared,
        rope_table=turns_of(device, q.shape[2], rope),
    )  # fmt: skip
    given["v_cache"] = given["k_cache"]
    if r.kv_starts is not None:
        given["kv_indptr"] = r.kv_starts
    if not ragged:
        given["kv_lens"] = r.kv_lens
    for name, value in given.items():
        flat[at[name]] = value
    plan.fn(*flat)


def turns_of(device: torch.device, dim: int, rope: Rope) -> torch.Tensor:
    """Return the turns per position (`cache_write.rotation.turns`).

    They are kept unless the call that makes them is captured: written before any other launch sees them and never
    freed, so launches on any stream and graphs may read them.
    """
    here, numbers = machine.current, (dim, float(rope.theta), float(rope.scale))
    key = turns, device, *numbers
    found = here.constants.get(key)
    if found is None:
        make = partial(turns, device, *numbers)
        if here.uncaptured_stream(device) is None or len(here.constants) >= here.max_plans:
            return make()
        found = here.constants.setdefault(key, kept(make, device, wait=True))
    return found


def plan_for(call: AttentionCall) -> RotationPlan:
    """Return the plan of a call; NotImplementedError if the kernel cannot rotate its head_dim."""
    here, dim, dtype, device = machine.current, call.q.shape[2], call.q.dtype, call.q.device
    key = "rope", call.q.get_device(), dtype, dim
    known = here.plans.get(key)
    if known is not None:
        return known
    found = here.device_info(device)
    lanes, empty = rows.lanes(dim, 8), partial(here.empty, device)
    spec = CacheWriteSpec(TYPES[dtype], TYPES[dtype], True, True)
    fn: Callable[..., Any] = lambda *flat: reference.gather_rows(spec, *flat)  # noqa: E731
    if found is not None:
        request = CacheWriteRequest(TYPES[dtype], TYPES[dtype], True, dim, dim, True)
        try:
            op, spec = dispatch.select(request, found[0])
        except NotImplementedError as error:
            raise NotImplementedError(f"pos_encoding_mode: 'ROPE_LLAMA': {error}") from None
        fn = here.kernel(op, spec, found[0])

    names = fields(spec)
    values = dict.fromkeys(names, empty(torch.int32)) | dict(
        v=empty(dtype, 0, dim), nhd=0, places=0, wide=0, page_table=empty(torch.int32, 1), q_weight=empty(dtype),
        k_weight=empty(dtype), lanes_log2=lanes.bit_length() - 1, v_groups=0, enable_pdl=1, rope=ANGLES, norm_eps=0.0,
        norm_offset=0.0,
    )  # fmt: skip
    plan = RotationPlan(fn, [values[name] for name in names], {name: i for i, name in enumerate(names)}, lanes)
    if found is not None:
        here.keep(key, plan)
    return plan
