"""Launches that keep their plan and all their arguments but the query, K and V, the requests, and the outputs."""

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, NamedTuple

import torch

from ..host import machine
from ..host.checks import raise_reason
from ..host.plain import traced
from . import checks, op, optional, plan
from .call import AttentionCall, SequenceBatch, renumbered, sequences_of, slot_sequences

_is_grad_enabled, _Tensor = torch.is_grad_enabled, torch.Tensor  # module globals: each saves a look-up, 20 ns


def tensors_of(given: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, also those in tuples and lists.

    A launch that is kept has views of some of them, which do not follow a tensor that gets other memory or another
    layout (`t.set_(...)`, `t.data = ...`). So whoever keeps a launch compares `memory_of` these tensors, too.
    """
    found: list[torch.Tensor] = []
    for value in given:
        if isinstance(value, _Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_of(value)
    return found


def memory_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return where the memory of tensors begins, and their layouts."""
    return [(t.data_ptr(), t.shape, t.stride()) for t in tensors]


class BoundLaunch:
    """A launch of calls that differ in their queries, K and V, and perhaps in their requests.

    All other arguments are checked and put in their places once. Tensors among them are read at each launch, so their
    values may change in place, but not their memory. No query, K, V or output of a call is kept.
    """

    __slots__ = ("_flat", "_plan", "call")

    def __init__(self, call: AttentionCall, found: plan.LaunchPlan) -> None:
        """Bind a call to its plan. Use `bound`, which knows the calls that can be bound."""
        self._plan, self._flat = found, found.bind(call, False)
        self._flat[found.slots.k] = self._flat[found.slots.v] = None
        q, k, v = (t.to("meta") for t in (call.q, call.k, call.v))  # their shapes and dtypes
        rope = None if call.q_rope is None else call.q_rope.to("meta")
        self.call = call._replace(q=q, k=k, v=v, out=None, lse=None, q_rope=rope)

    def fits(self, q: Any, kv: tuple[Any, ...], out: Any, rope: Any = None) -> bool:
        """Return whether `launch` may be called with a query, an output, and K and V that are those of the call. rope:
        the call's q_rope, if it has one."""
        p, call = self._plan, self.call
        return not (
            call.q_rope is not None and not self._takes_rope(rope)
            or traced(q) or q.shape != call.q.shape or q.dtype != call.q.dtype
            or out is not None and out.dtype != p.dtype
            or _is_grad_enabled() and (q.requires_grad or kv[0].requires_grad or kv[1].requires_grad
                                       or call.sinks is not None and call.sinks.requires_grad
                                       or call.alibi_slopes is not None and call.alibi_slopes.requires_grad)
            or not p.single_device and machine.current.current_device() != p.device.index
        )  # fmt: skip

    def _takes_rope(self, rope: Any) -> bool:
        known: Any = self.call.q_rope
        return (isinstance(rope, _Tensor) and rope.shape == known.shape and rope.dtype == known.dtype
                and not (_is_grad_enabled() and rope.requires_grad))  # fmt: skip

    def takes(self, kv: tuple[Any, ...]) -> bool:
        """Return whether K and V, in the form of `AttentionCall`, may replace those of the call."""
        call, k, v = self.call, kv[0], kv[1]
        if len(kv) > 2 and kv[2] is not None and kv[2].shape[:3] != k.shape[:3]:
            return False
        return k.shape == call.k.shape and v.shape == call.v.shape and k.dtype == call.k.dtype

    def launch(
        self, q: torch.Tensor, kv: Any, requests: SequenceBatch | None, out: Any, lse: Any, rope: Any = None
    ) -> Any:
        """Return the result of the call with tensors that fit.

        kv: K and V, and perhaps k_rope. requests: None for those of the call, or others of their shape_id. Both have no
        offsets of queries, or both have some. rope: replaces q_rope, in calls that have it.
        """
        p, r = self._plan, requests or self.call.requests
        flat, slots = self._flat.copy(), p.slots
        flat[slots.k], flat[slots.v] = kv[:2]
        if len(kv) > 2 and kv[2] is not None:
            flat[slots.k_rope] = kv[2]
        if requests is not None:
            flat[slots.kv_lens], flat[slots.page_table] = r.kv_lens, r.page_table
            if r.cu_seqlens_q is not None:
                flat[slots.cu_seqlens_q] = r.cu_seqlens_q
        call = self.call
        if rope is not None:
            flat[slots.q_rope], call = rope, call._replace(q_rope=rope)
        try:
            return p.launch(flat, call, q, out, lse, machine.current.is_capturing())
        except Exception:
            failed = call._replace(q=q, k=kv[0], v=kv[1], requests=r, out=out, lse=lse)
            raise_reason(checks.validate_launch, failed)
            raise


def bound(call: AttentionCall) -> BoundLaunch | None:
    """Return the launch of a call, or None if there is work to do at each call.

    That is so if something traces the call, if the reference runs it, in a capture, which owns the memory that is made
    in it, with a rotation, a quantised output or a custom mask that must be copied, and on a device that is not the
    current one.
    """
    call = op.prepared(call)
    if call.requests.shape_id is None or call.rope is not None or optional.between_words(call.custom_mask):
        return None
    found, here = plan.plan_of(call), machine.current
    if found is None or not found.out_is_16bit or found.checked:
        return None
    current = found.single_device or here.current_device() == found.device.index
    return BoundLaunch(call, found) if current and not here.is_capturing() else None


class StepTensors(NamedTuple):
    """The tensors of a layer's call that differ from step to step. form: "table" or "slots", of `SequenceBatch`."""

    q: Any  # (T, Hq, D)
    table: Any  # (B, M), a row of pages per request; slots: (T, K)
    lens: Any  # (B,); slots: (T / n,)
    offsets: Any = None  # (B + 1,), of the queries, or None
    out: Any = None
    rope: Any = None  # (T, Hq, D), q_rope of a call that has it
    form: str = "table"

    def requests(self, plain: bool = True) -> SequenceBatch:
        """Return where the tokens are, in the form of an `AttentionCall`. plain: as in `sequences_of`."""
        if self.form == "slots":
            return slot_sequences(self.table, self.lens, plain)
        return sequences_of(self.table, self.lens, self.offsets, plain)


class LayerLaunch:
    """The launch of a model's layer, for whoever calls that layer at each step and keeps its cache.

    The second step in a row that asks for the same is bound, and later ones repeat the launch: see `serve`. Nothing of
    a capture is kept.
    """

    __slots__ = ("_asked", "_given", "_kv", "_launch", "_memory", "_tensors", "_tried")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the launch and what it holds: its cache is no longer used."""
        self._asked: tuple[Any, ...] | None = None  # of the last step
        self._given: tuple[Any, ...] = ()  # its other tensors, or None
        self._tensors: list[torch.Tensor] = []
        self._memory: list[Any] = []
        self._launch: BoundLaunch | None = None
        self._kv: Any = None
        self._tried = False  # whether this call was bound, or cannot be

    def serve(
        self, step: StepTensors, asked: tuple[Any, ...], tensors: tuple[Any, ...], make: Callable[[], AttentionCall]
    ) -> Any:
        """Return the result of a step, by the launch that is kept if that fits.

        asked: numbers and names on which the call depends beside its tensors. tensors: its other tensors, or None; a
        step with other objects, or with other memory of the same ones, is bound anew. The cache must be among them,
        unless the caller calls `forget` when it changes. make: makes the call.
        """
        if traced(step.q):
            return op.serve(make())
        asked = *asked, step.q.shape, step.q.dtype
        same = (asked == self._asked and all(map(is_, tensors, self._given))
                and (not self._tensors or memory_of(self._tensors) == self._memory))  # fmt: skip
        launch, kv = self._launch, self._kv
        if same and launch is not None and launch.fits(step.q, kv, step.out, step.rope):
            requests = step.requests()
            if requests.shape_id == launch.call.requests.shape_id:
                return launch.launch(step.q, kv, requests, step.out, None, step.rope)
        call, here = make(), machine.current
        if not same and here.may_keep(step.q.device):
            self.forget()
            self._asked, self._given, self._tensors = asked, tensors, tensors_of(tensors)
            self._memory = memory_of(self._tensors)
        elif same and not self._tried and here.may_keep(step.q.device):
            self._tried, self._kv = True, (call.k, call.v)
            read = any(map(here.is_host, self._tensors))  # its value is part of the call
            self._launch = None if read else bound(call)
        return op.serve(call)


class Reshaping(NamedTuple):
    """How the query, the output and the result of a function differ from those of its calls.

    rows: (call, q, out) -> the query and the output as the call takes them, after a check. The output may be None, and
    the query a pair, q and q_rope.
    result: (call, its result, q, out) -> the result of the function.
    """

    rows: Callable[[AttentionCall, Any, Any], tuple[Any, Any]]
    result: Callable[[AttentionCall, Any, Any, Any], Any]


class BoundCall:
    """A call of a public function that is repeated with other queries. See `wrappers.bind`."""

    __slots__ = ("_call", "_kv", "_launch", "_new", "_out", "_reshaping", "_shape")

    def __init__(self, call: AttentionCall, reshaping: Reshaping | None = None, out: Any = None) -> None:
        """Bind a call. reshaping: that of its function. out: the output for runs that are given none."""
        self._launch, self._kv, self._new, self._shape = bound(call), (call.k, call.v), False, call.q.shape
        self._reshaping, self._out = reshaping, out
        self._call: Any = call._replace(q=None, out=None, lse=None, q_rope=None)  # type: ignore[arg-type]

    def __getstate__(self) -> tuple[Any, ...]:
        """Return what a copy or a pickle holds: the call and the shape of its query, without the launch."""
        return self._call, self._shape, self._reshaping, self._out

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restore a copy, or an object of another process. Its first run with such a query makes the launch."""
        call, self._shape, self._reshaping, self._out = state
        self._call, self._kv = call._replace(requests=renumbered(call.requests)), (call.k, call.v)
        self._launch, self._new = None, True

    def run(self, q: torch.Tensor, out: Any = None, lse: Any = None) -> Any:
        """Return the result of the call with another query.

        q: of the dtype, heads and head_dim of the call; with its number of tokens this takes the least host time. out,
        lse: receive the results; None: new tensors, and for `xqa` the output of the call. Raises as the function that
        was bound does.
        """
        if self._reshaping is None:
            return self._run(q, out, lse)
        if lse is not None:
            raise TypeError(f"lse: {type(lse).__name__}, must be None: the function that was bound has no lse")
        call, out = self._call, self._out if out is None else out
        rows, output = self._reshaping.rows(call, q, out)
        return self._reshaping.result(call, self._run(rows, output, None), q, out)

    def _run(self, q: Any, out: Any, lse: Any) -> Any:
        """Return the result of the call with another query, in its own terms."""
        call, launch, rope = self._call, self._launch, None
        if q.__class__ is tuple:
            q, rope = q
            call = call._replace(q_rope=rope)
        if self._new and not traced(q) and getattr(q, "shape", None) == self._shape:
            self._launch = launch = bound(call._replace(q=q))
            self._new = launch is None and machine.current.is_capturing()
        if launch is not None and isinstance(q, _Tensor) and launch.fits(q, self._kv, out, rope):
            return launch.launch(q, self._kv, None, out, lse, rope)
        return op.serve(call._replace(q=q, out=out, lse=lse))
