"""The torch operator that writes rows, for torch.compile and for tensors that are not plain.

It takes a `CacheWriteCall` field by field. `serve` is the last step of all functions.
"""

from typing import Any

import torch

from ..host import schema
from ..host.launch import run
from ..host.plain import traced
from ..host.scalars import split_scale
from . import checks, plan
from .call import CacheWriteCall, QueryTransform


def serve(call: CacheWriteCall, kv: Any = None, sf: Any = None) -> None:
    """Run a call that writes rows.

    kv, sf: the caches and the scale factors as the caller has given them. An operator gets one tensor of K and V whole:
    with dynamic shapes, torch.compile loses the offset of a view that an operator writes (pytorch/pytorch#198068).
    """
    if not traced(call.k):
        run(plan.FAMILY, call)
        return
    checks.validate(call)
    given = call._asdict() | {"transform": call.transform is not None} | (call.transform or plan.NO_TRANSFORM)._asdict()
    if _whole(kv) and (sf is None or _whole(sf)):
        given |= {"k_cache": kv, "v_cache": None, "k_sf": sf, "v_sf": None}
    OPERATOR.record(given)


def _whole(value: Any) -> bool:
    """Return whether a value is one tensor of K and V, (pages, 2, ...), or of the scales of their rows."""
    return isinstance(value, torch.Tensor) and value.ndim == (4 if value.dtype is torch.float32 else 5)


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
    run(plan.FAMILY, call)


# Without v_cache, k_cache is one tensor of both caches, (pages, 2, ...), and so is k_sf.
_CALL = schema.arguments(
    CacheWriteCall, ("k_cache", "k_sf", "v_sf"), v_cache="Tensor(v_cache!)? v_cache", transform="bool transform"
)
OPERATOR = schema.define("write_rows", _CALL + schema.arguments(QueryTransform, ("q_out", "kv_lens_out")), _run)
