"""The only part of the simulator that knows this project: small problems for its kernels, run and compared."""

from collections.abc import Callable
from typing import Any

from .attention import attention_cases, run_attention
from .common import SMS, Outcome, distance, simulated
from .topk import run_topk, topk_cases

__all__ = ["CASES", "FEATURES", "RUN", "SMS", "STRUCTURES", "Outcome", "distance", "simulated"]

CASES: dict[str, Callable[..., list[Any]]] = {"attention": attention_cases, "topk": topk_cases}  # by operator family
RUN: dict[str, Callable[..., Outcome]] = {"attention": run_attention, "topk": run_topk}
# Problems that reach every feature, run through the public function by whatever kernel dispatch chooses.
FEATURES: dict[str, Callable[[], list[Any]]] = {"attention": list, "topk": list}
# Of the shipped specs, those that stand for the structures of all.
STRUCTURES: dict[str, Callable[[list[Any]], list[Any]]] = dict.fromkeys(CASES, lambda shipped: shipped[::6])
