"""The only part of the simulator that knows this project: small problems for its kernels, run and compared."""

from collections.abc import Callable
from typing import Any

from .attention import attention_cases, run_attention
from .common import SMS, Outcome, distance, simulated
from .topk import run_topk, topk_cases, topk_features, topk_structures

__all__ = ["CASES", "FEATURES", "RUN", "SMS", "STRUCTURES", "Outcome", "distance", "simulated"]

CASES: dict[str, Callable[..., list[Any]]] = {"attention": attention_cases, "topk": topk_cases}  # by operator family
RUN: dict[str, Callable[..., Outcome]] = {"attention": run_attention, "topk": run_topk}
FEATURES: dict[str, Callable[[], list[Any]]] = {"topk": topk_features}  # the covering set, each case with its kernel
STRUCTURES: dict[str, Callable[[list[Any]], list[Any]]] = {"topk": topk_structures}  # kernels that stand for all
