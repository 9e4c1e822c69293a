"""Cases of merged states, and their inputs, shared by tests, benchmarks and tools."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import wrappers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCES = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 1e-5}  # relative, and of the values' size, about 1
STATES, PAIR, IN_PLACE = "merge_states", "merge_state", "merge_state_in_place"
GUARD = 16  # elements around the states that belong to none
LSE_ATOL = 1e-5


@dataclass(frozen=True)
class MergeCase:
    """One call. function: the public one. states: of `merge_states`. layout: "packed"; "strided": tokens and heads lie
    apart, and S has heads before tokens; "columns": the elements of a row lie apart. shift: elements by which V is off
    an aligned address; of two states, those of `shifted` alone. mask: of `merge_state_in_place`, "", "bool" or "uint8".
    data: "normal", or "special": infinite and NaN S, and NaN in V of states without keys. scale: of S."""

    function: str = STATES
    dtype: str = "bf16"
    tokens: int = 5
    states: int = 3
    heads: int = 3
    dim: int = 128
    layout: str = "packed"
    shift: int = 0
    shifted: tuple[int, ...] = (0, 1)
    mask: str = ""
    data: str = "normal"
    scale: float = 3.0


def laid_out(case: MergeCase, values: torch.Tensor, shift: int) -> torch.Tensor:
    """Return the values in the case's layout, inside memory that holds NaN."""
    *rest, last = values.shape
    width = {"packed": last, "strided": last + 8, "columns": 2 * last}[case.layout]
    flat = torch.full(
        (math.prod(rest) * width + 2 * GUARD + shift,), math.nan, dtype=values.dtype, device=values.device
    )  # fmt: skip
    inside = flat[GUARD + shift : -GUARD].view(*rest, width)
    found = inside[..., ::2] if case.layout == "columns" else inside[..., :last]
    found.copy_(values)
    return found


def make_state(case: MergeCase, shape: tuple[int, ...], gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return V of a shape and its S."""
    v = torch.randn(shape, generator=gen, device=gen.device)
    s = case.scale * torch.randn(shape[:-1], generator=gen, device=gen.device)
    if case.data == "special":
        kind = torch.randint(8, shape[:-1], generator=gen, device=gen.device)
        s[kind < 3] = -math.inf
        v[kind < 2] = math.nan
        s[kind == 3] = math.nan
        s[kind == 4] = 3e38
        s[kind == 5] = -3e38
        s[0] = -math.inf  # a token without keys
        v[-1, ..., 0], s[-1] = math.inf, 1.0  # infinite values stay so
    turned = case.layout == "strided"
    return (
        laid_out(case, v.to(DTYPES[case.dtype]), case.shift),
        laid_out(case, s.transpose(0, -1), 0).transpose(0, -1) if turned else laid_out(case, s, 0),
    )  # fmt: skip


def make_inputs(case: MergeCase, device: Any = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return the arguments of the case's function."""
    gen = torch.Generator(device).manual_seed(seed)
    if case.function == STATES:
        v, s = make_state(case, (case.tokens, case.states, case.heads, case.dim), gen)
        return {"v": v, "s": s}
    of = (replace(case, shift=case.shift if i in case.shifted else 0) for i in range(2))
    first, other = (make_state(one, (case.tokens, case.heads, case.dim), gen) for one in of)
    if case.function == PAIR:
        return {"v_a": first[0], "s_a": first[1], "v_b": other[0], "s_b": other[1]}
    found: dict[str, Any] = {"v": first[0], "s": first[1], "v_other": other[0], "s_other": other[1]}
    if case.mask:
        mask = torch.randint(2, (case.tokens,), generator=gen, device=gen.device)
        found["mask"] = mask.bool() if case.mask == "bool" else (3 * mask).to(torch.uint8)
    return found


def run(case: MergeCase, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the case's function and return the merged V and S."""
    found = getattr(wrappers, case.function)(**inputs)
    return (inputs["v"], inputs["s"]) if case.function == IN_PLACE else found


def difference(case: MergeCase, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> float:
    """Return the error of V and S over their tolerances. Infinities and NaN must be equal."""
    error = 0.0
    for found, wanted, tolerance in zip(got, want, (TOLERANCES[case.dtype], LSE_ATOL), strict=True):
        x, y = found.double(), wanted.double()
        same = (x == y) | (x.isnan() & y.isnan())
        apart = (x - y).abs() / (tolerance * (1 + y.abs()))
        error = max([error, *torch.where(same, 0.0, apart.nan_to_num(math.inf, math.inf)).flatten().tolist()])
    return error


def outside(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's storage that are none of its own, in order."""
    whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    size = t.element_size()
    own = torch.zeros(len(whole), dtype=torch.bool, device=t.device)
    own.as_strided((*t.shape, size), (*(stride * size for stride in t.stride()), 1), t.storage_offset() * size).fill_(
        True
    )
    return whole[~own]
