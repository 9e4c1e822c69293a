"""Inputs, providers and checks of merged states, measured by `append`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import wrappers
from wrappers import reference

SHAPE = "h32-d128"
CASES = (
    *(f"merge-states-n65536-s{states}-{SHAPE}" for states in (2, 4, 8)),
    f"merge-states-n8192-s8-{SHAPE}",
    f"merge-states-n64-s4-{SHAPE}",
    *(f"merge-state-n{tokens}-{SHAPE}" for tokens in (65536, 64)),
)
CHECKED = 48  # tokens of which the rows are compared
TOLERANCE = 2**-7  # relative error of bf16 outputs


@dataclass(frozen=True)
class MergeInputs:
    """States (N, S, H, D), (N, S, H) of `merge_states`; or pairs of (N, H, D), (N, H) of `merge_state`."""

    v: tuple[torch.Tensor, ...]
    s: tuple[torch.Tensor, ...]

    @property
    def output(self) -> torch.Size:
        """The shape of the output."""
        shape = self.v[0].shape
        return torch.Size((shape[0], *shape[-2:]))

    @property
    def bytes(self) -> int:
        """Return the bytes that are read and written."""
        read = sum(t.numel() * t.element_size() for t in (*self.v, *self.s))
        return read + self.output.numel() * 2 + self.output[:-1].numel() * 4


def make(name: str, device: str, seed: int) -> MergeInputs:
    """Make the inputs of a case 'merge-states-n<tokens>-s<states>-h<H>-d<D>' or 'merge-state-n<tokens>-h<H>-d<D>'."""
    found = re.fullmatch(r"merge-state(s?)-n(\d+)(?:-s(\d+))?-h(\d+)-d(\d+)", name)
    if not found or bool(found[1]) != bool(found[3]):
        raise ValueError(f"case {name!r}: must look like merge-states-n64-s4-{SHAPE} or merge-state-n64-{SHAPE}")
    gen = torch.Generator(device).manual_seed(seed)
    tokens, heads, dim = int(found[2]), int(found[4]), int(found[5])
    shape = (tokens, int(found[3]), heads) if found[3] else (tokens, heads)
    count = 1 if found[3] else 2
    options: dict[str, Any] = {"generator": gen, "device": device}
    return MergeInputs(
        tuple(torch.randn(*shape, dim, dtype=torch.bfloat16, **options) for _ in range(count)),
        tuple(3 * torch.randn(*shape, **options) for _ in range(count)),
    )


def called(module: Any, i: MergeInputs) -> Any:
    """Call the function of a module that has FlashInfer's."""
    if len(i.v) == 1:
        return module.merge_states(i.v[0], i.s[0])
    return module.merge_state(i.v[0], i.s[0], i.v[1], i.s[1])


def ours(i: MergeInputs) -> Any:
    return called(wrappers, i)


def flashinfer(i: MergeInputs) -> Any:
    import flashinfer as peer

    return called(peer, i)


PROVIDERS: dict[str, Callable[[Any], Any]] = {"ours": ours, "flashinfer": flashinfer}


def check(i: MergeInputs, got: Any) -> str | None:
    """Return None if some rows are close to the reference, else the reason."""
    token = torch.linspace(0, len(i.v[0]) - 1, min(CHECKED, len(i.v[0])), device=i.v[0].device).long()
    v, s = ([t[token].cpu() for t in side] for side in (i.v, i.s))
    want = reference.merge_states(v[0], s[0]) if len(v) == 1 else reference.merge_state(v[0], s[0], v[1], s[1])
    for found, wanted, tolerance in zip(got, want, (TOLERANCE, 1e-4), strict=True):
        apart = (found[token].cpu().double() - wanted.double()).abs() / (1 + wanted.double().abs())
        if not bool((apart <= tolerance).all()):
            return "far from the reference"
    return None
