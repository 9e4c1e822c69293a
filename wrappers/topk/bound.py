"""A launch that keeps its plan and all its arguments but the scores and the output."""

from typing import Any

import torch

from ..host import machine
from ..host.checks import raise_reason
from ..host.plain import traced
from . import op, plan
from .checks import PER_ROW, TOP_K, TopKCall, validate, with_ints


class BoundTopK:
    """A call of a top-k function that is repeated with other scores. See `wrappers.bind`."""

    __slots__ = ("_call", "_flat", "_layout", "_new", "_plan")

    def __init__(self, call: TopKCall) -> None:
        self._call = call._replace(scores=None)  # they would stay allocated as long as the launch is kept
        self._new = False  # the next run with such scores makes the launch
        self._flat: list[Any] | None = None
        self._plan: plan.TopKLaunchPlan | None = None
        self._layout = _layout(call.scores)
        if not traced(call.scores):
            self._bind(call)

    def _bind(self, call: TopKCall) -> None:
        """Make the launch of a call with scores, unless the reference serves it."""
        op.refuse_grad(call)
        self._plan = found = plan.plan_of(call)
        if found.single_device and machine.current.device_info(found.device) is not None:
            self._flat = plan.bind(found, call)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return what a copy or a pickle holds: the call and the layout of its scores, without the launch."""
        return self._call, self._layout

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restore a copy, or an object of another process. Its first run with such scores makes the launch."""
        (self._call, self._layout), self._new = state, True
        self._flat = self._plan = None

    def run(self, scores: torch.Tensor, out: torch.Tensor | None = None) -> Any:
        """Return what the bound function returns, for other scores.

        scores: of the dtype of the call; with its shape and strides this takes the least host time. out: replaces the
        function's output or indices; None: those of the call, or a new tensor.
        """
        call = self._call._replace(scores=scores)
        if out is not None:
            call = call._replace(**{"raw" if call.function in PER_ROW else "out": out})
        fits = isinstance(scores, torch.Tensor) and not traced(scores) and _layout(scores) == self._layout
        if self._new and fits:
            self._bind(call)
            self._new = False
        p, flat = self._plan, self._flat
        if flat is None or p is None or out is not None or not fits:
            return self._result(op.serve(call))
        try:
            return self._result(plan.launch(p, flat.copy(), call))
        except Exception:
            raise_reason(validate, with_ints(call))
            raise

    def _result(self, found: tuple[Any, Any, Any]) -> Any:
        function = self._call.function
        return found[1:] if function == TOP_K else None if function in PER_ROW else found[0]


def _layout(scores: torch.Tensor) -> tuple[Any, ...]:
    return scores.dtype, scores.shape, scores.stride()
