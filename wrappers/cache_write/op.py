"""The torch.library operator that writes rows, for torch.compile and for tensors that are not plain.

It takes a `CacheWriteCall` field by field. `serve` is the last step of all functions.
"""

from typing import Any

import torch

from ..host.plain import fake_of, known, traced, write
from ..host.scalars import split_scale
from . import checks, plan
from .call import CacheWriteCall, QueryTransform

NAME = "cute_kernels::write_rows"
# The fields of CacheWriteCall in order, then those of QueryTransform. Without v_cache, k_cache is one tensor of both
# caches, (pages, 2, ...), and so is k_sf.
SCHEMA = """(
    str function, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!)? v_cache, bool nhd, int places,
    Tensor? slots, Tensor? batch_indices, Tensor? positions, Tensor? page_table, Tensor? kv_indices,
    Tensor? kv_indptr, Tensor? kv_last_page_len, Tensor? cu_seqlens, Tensor? kv_lens, float k_scale, float v_scale,
    Tensor? k_scale_ptr, Tensor? v_scale_ptr,
    Tensor(c!)? k_sf, Tensor(d!)? v_sf, bool v_sf_interleaved, bool transform, Tensor? q, Tensor(e!)? q_out,
    Tensor? rope_table, int rope, Tensor? rope_positions, Tensor? q_weight, Tensor? k_weight, float norm_eps,
    float norm_offset, float q_scale, Tensor? q_scale_ptr, Tensor? rope_cos, Tensor? rope_sin,
    Tensor(f!)? kv_lens_out) -> ()"""

torch.library.define(NAME, SCHEMA.replace("\n", " "), tags=torch.Tag.pt2_compliant_tag)

_is_grad_enabled = torch.is_grad_enabled  # a module global: saves an attribute look-up, 20 ns


def serve(call: CacheWriteCall, kv: Any = None, sf: Any = None) -> None:
    """Run a call that writes rows.

    In grad mode, tensors that require grad are refused, since their gradient would be lost.

    kv, sf: the caches and the scale factors as the caller has given them. An operator gets one tensor of K and V whole:
    with dynamic shapes, torch.compile loses the offset of a view that an operator writes (pytorch/pytorch#198068).
    """
    if _is_grad_enabled():
        tensors = [*call[1:5], call.k_scale_ptr, call.v_scale_ptr, *(call.transform or ())]
        if any(t.requires_grad for t in tensors if isinstance(t, torch.Tensor)):
            checks.validate(call)
    if traced(call.k):
        checks.validate(call)
        given = call._asdict() | {"transform": call.transform is not None}
        given |= (call.transform or QueryTransform())._asdict()
        if _whole(kv) and (sf is None or _whole(sf)):
            given |= {"k_cache": kv, "v_cache": None, "k_sf": sf, "v_sf": None}
        write(torch.ops.cute_kernels.write_rows.default, **(given | known(given, "nhd", "v_sf_interleaved")))
    else:
        plan.run(call)


def _whole(value: Any) -> bool:
    """Return whether a value is one tensor of K and V, (pages, 2, ...)."""
    return isinstance(value, torch.Tensor) and value.ndim == 5


@torch.library.impl(NAME, ("cpu", "cuda"))
def _run(*flat: Any) -> None:
    count = len(CacheWriteCall._fields)
    transform = QueryTransform(*flat[count:]) if flat[count - 1] else None
    call = CacheWriteCall(*(*flat[: count - 1], transform))
    if call.v_cache is None:
        (k, v), sf = call.k_cache.unbind(1), (None, None) if call.k_sf is None else call.k_sf.unbind(1)
        call = call._replace(k_cache=k, v_cache=v, k_sf=sf[0], v_sf=sf[1])
    for side in ("k", "v"):  # the host's scale tensors had no value in a trace
        tensor = getattr(call, f"{side}_scale_ptr")
        if tensor is not None:
            number, tensor = split_scale(checks.name_of(call, f"{side}_scale_ptr"), tensor)
            given: dict[str, Any] = {f"{side}_scale_ptr": tensor}
            if tensor is None:
                given[f"{side}_scale"] = 1.0 / number if checks.block_scaled(call) else number
            call = call._replace(**given)
    serve(call)


torch.library.register_fake(NAME)(fake_of(NAME))
