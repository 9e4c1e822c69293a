"""Rotary embedding before a launch: one launch of a kernel that writes caches rotates Q and K of the call.

The attention kernels have none. K is read once and written once: the kernel reads it from its pages and writes it to
new pages, with the page table that belongs to them. Nothing here waits for the device or copies from it, so a call can
be captured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import ANGLES, fields
from cute_kernels.cache_write.request import CacheWriteRequest
from cute_kernels.cache_write.spec import CacheWriteSpec

from .. import reference
from ..cache_write.plan import RowsPlan, arranged, groups
from ..cache_write.rotation import turns
from ..host import machine
from ..host.launch import KernelFamily, nothing, run, select
from ..host.scratch import constant, kept, steps
from .call import AttentionCall, Rope

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(slots=True, eq=False, kw_only=True)
class RotationPlan(RowsPlan):
    """A kernel that rotates, or the reference, and its arguments except the tensors of a call and its outputs."""

    lanes: int  # per row


class RotatedCall(NamedTuple):
    """Tensors that replace those of a call. k: (rows, Hkv, D), the rows of all pages one after another."""

    q: torch.Tensor
    k: torch.Tensor
    page_table: torch.Tensor


class RotationCall(NamedTuple):
    """The work of one launch: a call, its rotation, and where the rotated tensors go. offsets: as in `rotated`."""

    call: AttentionCall
    rope: Rope
    out: RotatedCall
    offsets: Any


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
    if call.q.shape[0] + out.k.shape[0]:
        run(FAMILY, RotationCall(call, rope, out, offsets))


def bind(plan: RotationPlan, rotation: RotationCall) -> tuple[list[Any], None]:
    """Return the arguments of a launch."""
    call, rope, out, offsets = rotation
    q, r, device, flat, at = call.q, call.requests, call.q.device, plan.flat.copy(), plan.at
    ragged = r.form == "ragged"
    if offsets is None:
        offsets = r.cu_seqlens_q
    if offsets is None:
        offsets = constant(steps, device, True, r.batch + 1, call.max_q_len)
    flat[at.q], flat[at.q_out], flat[at.k] = q, out.q, out.k
    flat[at.k_cache] = flat[at.v_cache] = call.k.permute(2, 1, 0, 3) if ragged else call.k
    flat[at.tables], flat[at.tables_out], flat[at.cu_seqlens] = r.page_table, out.page_table, offsets
    flat[at.k_groups] = groups(q.shape[0] + out.k.shape[0], max(q.shape[1], out.k.shape[1]), plan.lanes)
    flat[at.rope_table] = turns_of(device, q.shape[2], rope)
    if r.kv_starts is not None:
        flat[at.kv_indptr] = r.kv_starts
    if not ragged:
        flat[at.kv_lens] = r.kv_lens
    return flat, None


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


def plan_for(rotation: RotationCall, device_info: tuple[str, int] | None) -> RotationPlan:
    """Return the plan of a call; NotImplementedError if the kernel cannot rotate its head_dim."""
    q = rotation.call.q
    dim, dtype = q.shape[2], TYPES[q.dtype]
    lanes, empty = rows.lanes(dim, 8), partial(machine.current.empty, q.device)
    spec = CacheWriteSpec(dtype, dtype, True, True)
    fn: Callable[..., Any] = partial(reference.gather_rows, spec)
    if device_info is not None:
        request = CacheWriteRequest(dtype, dtype, True, dim, dim, True)
        fn, spec = select(dispatch, request, device_info[0], "pos_encoding_mode: 'ROPE_LLAMA'")
    values = dict.fromkeys(fields(spec), empty(torch.int32)) | dict(
        v=empty(q.dtype, 0, dim), nhd=0, places=0, wide=0, page_table=empty(torch.int32, 1), q_weight=empty(q.dtype),
        k_weight=empty(q.dtype), lanes_log2=lanes.bit_length() - 1, v_groups=0, enable_pdl=1, rope=ANGLES, norm_eps=0.0,
        norm_offset=0.0,
    )  # fmt: skip
    flat, at = arranged(spec, values)
    return RotationPlan(fn=fn, flat=flat, at=at, lanes=lanes)


FAMILY = KernelFamily(
    key=lambda rotation: ("rope", rotation.call.q.get_device(), rotation.call.q.dtype, rotation.call.q.shape[2]),
    inputs=lambda rotation: (rotation.call.q,),
    validate=nothing,  # attention has checked the call
    plan=plan_for,
    bind=bind,
)
