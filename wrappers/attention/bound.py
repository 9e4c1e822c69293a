"""A launch that keeps its plan and all its arguments but the query, K and V, the requests, and the outputs."""

from typing import Any

import torch

from .. import machine
from ..plain import traced
from . import op, plan
from .call import AttentionCall, SequenceBatch

_is_grad_enabled = torch.is_grad_enabled  # a module global: saves an attribute look-up, 20 ns


class BoundLaunch:
    """An attention call that is repeated with other queries, and perhaps with other K and V or requests.

    All arguments are checked and put in their places once. `run` then only replaces some of them, and launches. Tensors
    of the call are read at each launch, so lengths, page ids and the cache may change in place.
    """

    __slots__ = ("_call", "_dtype", "_flat", "_plan", "_shape")

    def __init__(self, call: AttentionCall) -> None:
        call = op.prepared(call)
        self._plan = found = None if call.requests.shape_id is None else plan.plan_of(call)
        self._flat: Any = None
        # A query and outputs would stay allocated as long as the launch is kept.
        self._call: Any = call._replace(q=None, out=None, lse=None)  # type: ignore[arg-type]
        self._shape, self._dtype = call.q.shape, call.q.dtype
        if found is None or call.rope is not None or not found.out_is_16bit or found.checked:
            return  # the reference runs the call, something traces it, or it has work to do at each launch
        here = machine.current
        if found.single_device or here.current_device() == found.device.index:
            if not here.is_capturing():  # what `bind` makes in a capture belongs to its graph
                self._flat = found.bind(call, False)

    def run(self, q: torch.Tensor, out: Any = None, lse: Any = None) -> Any:
        """Return the result of the call with another query.

        q: of the dtype, heads and head_dim of the call; with its number of tokens this takes the least host time. out,
        lse: receive the results; None: new tensors. Raises as the function that was bound does.
        """
        call = self._call
        if self.fits(q, call.k, call.v, out):
            return self.launch(q, (call.k, call.v), None, out, lse)
        return op.serve(call._replace(q=q, out=out, lse=lse))

    def fits(self, q: Any, k: Any, v: Any, out: Any) -> bool:
        """Return whether `launch` may be called with these tensors."""
        p, call = self._plan, self._call
        return not (
            self._flat is None or p is None or traced(q) or q.shape != self._shape or q.dtype != self._dtype
            or k.shape != call.k.shape or v.shape != call.v.shape or k.dtype != call.k.dtype
            or out is not None and out.dtype != p.dtype
            or _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
            or not p.single_device and machine.current.current_device() != p.device.index
        )  # fmt: skip

    def launch(self, q: torch.Tensor, kv: Any, requests: SequenceBatch | None, out: Any, lse: Any) -> Any:
        """Return the result of the call with tensors that fit.

        kv: K and V in the form of `AttentionCall`. requests: None, or others of the shape_id of the call's. Both have
        no offsets of queries, or both have some.
        """
        p: Any = self._plan
        flat, slots, r = self._flat.copy(), p.slots, requests or self._call.requests
        flat[slots.k], flat[slots.v] = kv
        if requests is not None:
            flat[slots.kv_lens], flat[slots.page_table] = r.kv_lens, r.page_table
            if r.cu_seqlens_q is not None:
                flat[slots.cu_seqlens_q] = r.cu_seqlens_q
        try:
            return p.launch(flat, self._call, q, out, lse, machine.current.is_capturing())
        except Exception:
            plan.raise_reason(self._call._replace(q=q, k=kv[0], v=kv[1], requests=r, out=out, lse=lse))
            raise
