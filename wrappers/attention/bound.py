"""A launch that keeps its plan and all its arguments but the query, K and V, and the outputs."""

from typing import Any

import torch

from .. import machine
from ..plain import traced
from . import op, plan
from .call import AttentionCall

_is_grad_enabled = torch.is_grad_enabled  # a module global: saves an attribute look-up, 20 ns


class BoundLaunch:
    """An attention call that is repeated with other queries, and with other keys and values of the same shape.

    All arguments are checked and put in their places once. `run` then only replaces some of them, and launches. Tensors
    of the call are read at each launch, so lengths, page ids and the cache may change in place.
    """

    __slots__ = ("_call", "_flat", "_plan", "_shape")

    def __init__(self, call: AttentionCall) -> None:
        self._call = call = op.prepared(call)
        self._shape, self._flat = None, None
        self._plan = found = None if call.requests.shape_id is None else plan.plan_of(call)
        if found is None or call.rope is not None or not found.out_is_16bit:
            return  # the reference runs the call, something traces it, or it has work to do at each launch
        here = machine.current
        if found.single_device or here.current_device() == found.device.index:
            if not here.is_capturing():  # what `bind` makes in a capture belongs to its graph
                self._flat, self._shape = found.bind(call, False), call.q.shape

    def run(self, q: torch.Tensor, out: Any = None, lse: Any = None) -> Any:
        """Return the result of the call with another query.

        q: of the dtype, heads and head_dim of the call; with its number of tokens this takes the least host time. out,
        lse: receive the results; None: new tensors. Raises as the function that was bound does.
        """
        k, v = self._call.k, self._call.v
        if self.fits(q, k, v, out):
            return self.launch(q, k, v, out, lse)
        return op.serve(self._call._replace(q=q, out=out, lse=lse))

    def fits(self, q: Any, k: Any, v: Any, out: Any) -> bool:
        """Return whether `launch` may be called with these tensors."""
        p, call = self._plan, self._call
        return not (
            self._flat is None or p is None or traced(q) or q.shape != self._shape or q.dtype != call.q.dtype
            or k.shape != call.k.shape or v.shape != call.v.shape or k.dtype != call.k.dtype
            or out is not None and out.dtype != p.dtype
            or _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
            or not p.single_device and machine.current.current_device() != p.device.index
        )  # fmt: skip

    def launch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, lse: Any) -> Any:
        """Return the result of the call with tensors that fit. k, v: in the form of `AttentionCall`."""
        p: Any = self._plan
        flat: Any = self._flat
        flat = flat.copy()
        flat[p.slots.k], flat[p.slots.v] = k, v
        try:
            return p.launch(flat, self._call, q, out, lse, machine.current.is_capturing())
        except Exception:
            plan.raise_reason(self._call._replace(q=q, k=k, v=v, out=out, lse=lse))
            raise
