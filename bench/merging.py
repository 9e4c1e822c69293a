"""Inputs, providers and checks of merged states, measured by `append`."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import wrappers
from wrappers.host import machine

from .cases import merge_states as cases
from .cases.merge_states import PAIR, STATES, MergeCase

SHAPE = "h32-d128"
CASES = (
    *(f"merge-states-n65536-s{states}-{SHAPE}" for states in (2, 4, 8)),
    f"merge-states-n8192-s8-{SHAPE}",
    f"merge-states-n64-s4-{SHAPE}",
    *(f"merge-state-n{tokens}-{SHAPE}" for tokens in (65536, 64)),
)
CHECKED = 48  # tokens of which the rows are compared
TOLERANCE = 2**-7  # relative error of bf16 outputs


class MergeInputs(NamedTuple):
    """A case, and the arguments of its function."""

    case: MergeCase
    given: dict[str, torch.Tensor]

    @property
    def bytes(self) -> int:
        """Return the bytes that are read and written."""
        read = sum(t.numel() * t.element_size() for t in self.given.values())
        return read + self.case.tokens * self.case.heads * (2 * self.case.dim + 4)


def make(name: str, device: str, seed: int) -> MergeInputs:
    """Make the inputs of a case 'merge-states-n<tokens>-s<states>-h<H>-d<D>' or 'merge-state-n<tokens>-h<H>-d<D>'."""
    found = re.fullmatch(r"merge-state(s?)-n(\d+)(?:-s(\d+))?-h(\d+)-d(\d+)", name)
    if not found or bool(found[1]) != bool(found[3]):
        raise ValueError(f"case {name!r}: must look like merge-states-n64-s4-{SHAPE} or merge-state-n64-{SHAPE}")
    tokens, states, heads, dim = (int(x or 0) for x in found.groups()[1:])
    case = MergeCase(STATES if states else PAIR, "bf16", tokens, states, heads, dim)
    return MergeInputs(case, {name: t.clone() for name, t in cases.make_inputs(case, device, seed).items()})


def called(module: Any, i: MergeInputs) -> Any:
    """Call the function of a module that has FlashInfer's."""
    return getattr(module, i.case.function)(**i.given)


def ours(i: MergeInputs) -> Any:
    return called(wrappers, i)


def flashinfer(i: MergeInputs) -> Any:
    import flashinfer as peer

    return called(peer, i)


PROVIDERS: dict[str, Callable[[Any], Any]] = {"ours": ours, "flashinfer": flashinfer}


def check(i: MergeInputs, got: Any) -> str | None:
    """Return None if some rows are close to the reference, else the reason."""
    token = torch.linspace(0, i.case.tokens - 1, min(CHECKED, i.case.tokens)).long()
    with machine.override(machine.HostMachine()):
        want = called(wrappers, i._replace(given={name: t.cpu()[token] for name, t in i.given.items()}))
    for found, wanted, tolerance in zip(got, want, (TOLERANCE, 1e-4), strict=True):
        apart = (found.cpu()[token].double() - wanted.double()).abs() / (1 + wanted.double().abs())
        if not bool((apart <= tolerance).all()):
            return "far from the reference"
    return None
