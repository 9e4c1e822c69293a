"""A launch of `append_qkv` that keeps its plan and all its arguments but the rows, their places and their positions."""

from typing import Any

import torch

from ..host import machine
from ..host.checks import check_strided, raise_reason
from ..host.launch import bindable
from ..host.overlap import AddressBounds
from ..host.plain import traced
from . import checks, op, plan
from .call import CacheWriteCall

_is_grad_enabled = torch.is_grad_enabled  # a module global: saves an attribute look-up, 20 ns


class BoundAppend:
    """A call of `append_qkv` that is repeated with other rows. See `wrappers.bind`."""

    __slots__ = ("_bounds", "_call", "_dtype", "_flat", "_forms", "_kv", "_new", "_out", "_plan", "_sf")

    def __init__(self, call: CacheWriteCall, kv: Any, sf: Any, out: torch.Tensor | None = None) -> None:
        """Bind a call. kv, sf: as `op.serve` takes them. out: the output of Q that the caller gave."""
        t = call.transform
        self._kv, self._sf, self._out, self._new = kv, sf, out, False
        self._flat: list[Any] | None = None
        self._forms = _forms(*rows_of(call))
        self._dtype = None if t is None or t.q is None else t.q_out.dtype
        # the rows would stay allocated as long as the launch is kept
        self._call = call._replace(k=None, v=None, transform=t and t._replace(q=None, q_out=None))
        if not traced(call.k):
            self._bind(call)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return what a copy or a pickle holds: the call, without its launch."""
        return self._call, self._kv, self._sf, self._out, self._dtype, self._forms

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restore a copy, or an object of another process. Its first run with such rows makes the launch."""
        self._call, self._kv, self._sf, self._out, self._dtype, self._forms = state
        self._flat, self._new = None, True

    def _bind(self, call: CacheWriteCall) -> None:
        """Make the launch of a call with rows, unless each call must be served like a new one."""
        found, here, rows = bindable(plan.FAMILY, call), machine.current, rows_of(call)
        if found is not None:
            caches = call.k_cache, call.v_cache, call.k_sf, call.v_sf
            self._plan, self._bounds = found, AddressBounds.of((*caches, *rows), plan.WRITTEN)
            kept = [None if x is rows[2] or x is rows[3] else x for x in plan.bind(found, call)[0]]
            kept[plan.K] = kept[plan.V] = None
            self._flat = [here.argument(x) if isinstance(x, torch.Tensor) else x for x in kept]

    def run(self, q: Any, k: Any, v: Any, places: Any = None, positions: Any = None, out: Any = None) -> Any:
        """Write other rows, and return Q.

        q, k, v: of the dtypes of the call; with its shapes and strides this takes the least host time. q is None if it
        is in the call. places: another slot mapping, if the call has one. positions: those of another rotation, if
        `rope` has some. None: those of the call. out: receives Q; None: that of the call, or a new tensor. Raises as
        `append_qkv` does.
        """
        t = self._call.transform
        if (q is None) != (self._dtype is None) or q is None and out is not None:
            self._refuse(q, out)
        if q is not None and out is None:
            out = self._out
            if out is None:
                if not isinstance(q, torch.Tensor):
                    check_strided("q", q, 3)
                out = torch.empty(q.shape, dtype=self._dtype, device=q.device)
        if self._new and not traced(k) and _forms(k, v, q, out) == self._forms:
            self._bind(self._with(q, k, v, None, None, out))
            self._new = False
        if traced(k) or not self._fits(q, k, v, places, positions, out):
            op.serve(self._with(q, k, v, places, positions, out), self._kv, self._sf)
            return out
        flat, p = self._flat.copy(), self._plan  # type: ignore[union-attr]
        flat[plan.K], flat[plan.V] = (k.view(torch.uint8), v.view(torch.uint8)) if p.as_bytes else (k, v)
        if places is not None:
            flat[plan.SLOTS] = plan.words(places)
        if t is not None:
            plan.put_rows(flat, p.at, q, out, positions)
        try:
            p.fn(*flat)
        except Exception:
            raise_reason(checks.validate, self._with(q, k, v, places, positions, out))
            raise
        return out

    def _fits(self, q: Any, k: Any, v: Any, places: Any, positions: Any, out: Any) -> bool:
        """Return whether the launch that is kept serves these rows."""
        rows = k, v, q, out
        if self._flat is None or _forms(*rows) != self._forms:
            return False
        call, p = self._call, self._plan
        for new, old in ((places, call.slots), (positions, call.transform and call.transform.rope_positions)):
            if new is not None and not (
                isinstance(new, torch.Tensor) and old is not None and new.dtype == old.dtype and new.shape == old.shape
            ):
                return False
        if _is_grad_enabled() and any(x is not None and x.requires_grad for x in rows):
            return False
        if not p.single_device and machine.current.current_device() != p.device.index:
            return False
        bounds = self._bounds
        addresses = [*bounds.addresses[:4], *(0 if x is None else x.data_ptr() for x in rows)]
        if addresses != bounds.addresses:
            if bounds.may_overlap(addresses):
                return False
            self._bounds = bounds._replace(addresses=addresses)
        return True

    def _with(self, q: Any, k: Any, v: Any, places: Any, positions: Any, out: Any) -> CacheWriteCall:
        """Return the call with other rows."""
        call, t = self._call._replace(k=k, v=v), self._call.transform
        if places is not None:
            if call.slots is None:
                raise ValueError(f"places: {type(places).__name__}, must be None: the bound call has no slot mapping")
            call = call._replace(slots=places)
        if positions is not None:
            if t is None or t.rope_positions is None:
                raise ValueError(f"positions: {type(positions).__name__}, must be None: the bound call has none")
            t = t._replace(rope_positions=positions)
        return call._replace(transform=t and t._replace(q=q, q_out=out))

    def _refuse(self, q: Any, out: Any) -> None:
        """Raise on a Q that the bound call lacks, on one that is absent, and on an output without Q."""
        if q is None and self._dtype is not None:
            raise TypeError("q: None, must be a torch.Tensor, as in the bound call")
        name, value = ("q", q) if q is not None else ("out", out)
        raise ValueError(f"{name}: {type(value).__name__}, must be None: the bound call has no q")


def rows_of(call: CacheWriteCall) -> tuple[Any, ...]:
    """Return K, V, Q and the output of Q; the last two are None if the call has none."""
    t = call.transform
    return call.k, call.v, t and t.q, t and t.q_out


def _forms(*rows: Any) -> list[Any]:
    """Return the properties of rows on which a launch depends; None for rows that are absent."""
    return [(x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in rows]
