"""A launch that keeps its plan and all its arguments but the scores and the output."""

from typing import Any

import torch

from ..host.checks import raise_reason
from ..host.launch import bindable
from ..host.plain import traced
from . import op, plan
from .checks import PER_ROW, TOP_K, TopKCall, validate, with_ints

_is_grad_enabled = torch.is_grad_enabled  # a module global: saves an attribute look-up, 20 ns


class BoundTopK:
    """A call of a top-k function that is repeated with other scores. See `wrappers.bind`."""

    __slots__ = ("_call", "_flat", "_layout", "_new", "_plan")

    def __init__(self, call: TopKCall) -> None:
        call = with_ints(call)
        self._call: Any = call._replace(scores=None)  # they would stay allocated
        self._layout, self._new = _layout(call.scores), False  # new: the next run with such scores makes the launch
        self._plan: plan.TopKPlan | None = None
        self._flat: list[Any] = []
        if not traced(call.scores):
            self._bind(call)

    def _bind(self, call: TopKCall) -> None:
        """Make the launch of a call with scores, unless each call must be served like a new one."""
        found, self._new = bindable(plan.FAMILY, call), False
        if found is not None and found.single_device:
            self._plan, self._flat = found, plan.bind_inputs(found, call)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return what a copy or a pickle holds: the call and the layout of its scores, without the launch."""
        return self._call, self._layout

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restore a copy, or an object of another process. Its first run with such scores makes the launch."""
        (self._call, self._layout), self._new = state, True
        self._plan, self._flat = None, []

    def run(self, scores: torch.Tensor, out: torch.Tensor | None = None) -> Any:
        """Return what the bound function returns, for other scores.

        scores: of the dtype of the call; with its shape and strides this takes the least host time. out: replaces the
        function's output or indices; None: those of the call, or a new tensor.
        """
        call = self._call._replace(scores=scores)
        if out is not None:
            call = call._replace(**{"raw" if call.function in PER_ROW else "out": out})
        fits = (
            isinstance(scores, torch.Tensor) and not traced(scores) and _layout(scores) == self._layout
            and not (scores.requires_grad and _is_grad_enabled())
        )  # fmt: skip
        if self._new and fits:
            self._bind(call)
        p = self._plan
        if p is None or out is not None or not fits:
            return self._result(op.serve(call))
        flat = self._flat.copy()
        try:
            found = plan.bind_scores(p, flat, call)
            p.fn(*flat)
        except Exception:
            raise_reason(validate, call)
            raise
        return self._result(found)

    def _result(self, found: plan.Results) -> Any:
        function = self._call.function
        return found[1:] if function == TOP_K else None if function in PER_ROW else found[0]


def _layout(scores: torch.Tensor) -> tuple[Any, ...]:
    return scores.dtype, scores.shape, scores.stride()
