"""Calls that compute logits of an indexer, their inputs, and what must come out.

Unused pages, the ends of pages and what lies behind a page hold NaN in codes and scales, and table entries behind the
keys of a request are hostile.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

import wrappers
from wrappers.host.machine import HostMachine, override
from wrappers.indexer import logits
from wrappers.indexer.logits import LogitsCall, serve

BYTE, E4M3 = torch.uint8, torch.float8_e4m3fn
RAGGED, RAGGED_FP4 = "fp8_mqa_logits", "fp8_fp4_mqa_logits"
PAGED, PAGED_FP4 = "fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits"
SEGMENTS = "dsa_indexer_topk"  # its logits, of queries and keys in bf16: the function itself returns the largest alone
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCALE = 0.1  # of all keys that SEGMENTS selects from
NO_PAGE, NAN = 2147480000, 0xFF  # an entry of a table that names no page; a byte of NaN in e4m3 and in fp32
KEY_DIMS = 2  # of a tensor of keys; one of queries has more
HOSTILE = (-(1 << 31), -1, 0, (1 << 31) - 1)
# Rounding of the tensor cores' sums of e4m3 products, in units of the sum of their magnitudes, for one head: the
# errors of heads are independent, so that their sum grows with the root of their number. On an H200 at f7e42fe11, calls
# with 5 or 8 heads were off by up to 2.02 * 2^-14, and none with 16 or more heads by more than 2^-14.
ROUNDING = 2.0**-11
BF16_ROUNDING = 2.0**-17  # the same of products of bf16
HALF_ULP = {"fp32": 2.0**-20, "bf16": 2.0**-8}  # of sums in any order, or of the output


@dataclass(frozen=True)
class LogitsCase:
    """One call. dtype: of the logits.

    Ragged, or SEGMENTS: `lens` has a number of tokens and of keys, and `windows` says what tokens see: "causal",
    "random" keys in the middle, or "hostile" numbers. compressed: columns of the result, 0 for all keys.

    Paged: `lens` has the keys of each request, of `next_n` tokens. own: each token has a length of its own. gap: bytes
    behind each page. more: columns behind those of the longest request; hostile: some pages and lengths do not exist.

    shift: bytes before the keys, which makes their addresses no multiples of 16. strided: queries, weights, index
    tensors and scales of a prompt have gaps. data: "normal", or "zeros" in some queries and keys, or "large" scales and
    weights, or "nan" in some keys."""

    function: str = RAGGED
    lens: tuple[int, ...] = (5, 150)
    heads: int = 64
    dim: int = 128
    dtype: str = "fp32"
    clean: bool = True
    windows: str = "causal"
    compressed: int = 0
    next_n: int = 1
    own: bool = False
    page_size: int = 64
    gap: int = 0
    more: int = 3
    hostile: bool = False
    shift: int = 0
    strided: bool = False
    data: str = "normal"

    @property
    def kind(self) -> torch.dtype:
        return torch.bfloat16 if self.function == SEGMENTS else E4M3

    @property
    def paged(self) -> bool:
        return self.function in (PAGED, PAGED_FP4)


def make_inputs(case: LogitsCase, device: "torch.device | str" = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return the arguments of the function."""
    gen = torch.Generator().manual_seed(seed)
    found = (_paged if case.paged else _ragged)(case, gen)
    if case.function in (RAGGED_FP4, PAGED_FP4):
        found |= {"q": (found["q"], None), "logits_dtype": DTYPES[case.dtype]}
    return moved(found, torch.device(device))


def moved(value: Any, device: torch.device) -> Any:
    """Return arguments on a device, with their strides."""
    if isinstance(value, torch.Tensor):
        target = torch.empty(0, dtype=value.dtype, device=device).set_(
            value.untyped_storage().clone() if device.type == "cpu" else value.untyped_storage().to(device=device),
            value.storage_offset(), value.shape, value.stride(),
        )  # fmt: skip
        return target
    if isinstance(value, tuple):
        return tuple(moved(x, device) for x in value)
    return {name: moved(x, device) for name, x in value.items()} if isinstance(value, dict) else value


def _values(case: LogitsCase, gen: torch.Generator, *shape: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=gen)
    if case.data == "zeros":
        x *= torch.rand(*shape[:-1], 1, generator=gen) < 0.7
    if case.data == "nan" and len(shape) == KEY_DIMS:
        x[torch.rand(shape[0], generator=gen) < 0.2, 0] = torch.nan
    return x


def _strided(case: LogitsCase, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values, with gaps between its rows if the case has them."""
    if not case.strided:
        return x
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 48, dtype=x.dtype)
    if x.dtype is E4M3:
        wide.view(BYTE).fill_(NAN)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _queries(case: LogitsCase, gen: torch.Generator, *tokens: int) -> dict[str, torch.Tensor]:
    q = _values(case, gen, *tokens, case.heads, case.dim).to(case.kind)
    weights = torch.randn(q[..., 0].numel() // case.heads, case.heads, generator=gen)
    weights *= 1e4 if case.data == "large" else 1.0
    return {"q": _strided(case, q), "weights": _strided(case, weights)}


def _scales(case: LogitsCase, gen: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=gen) * (1e3 if case.data == "large" else 1.0) + 0.01


def _ragged(case: LogitsCase, gen: torch.Generator) -> dict[str, Any]:
    tokens, keys = case.lens
    row = case.dim * case.kind.itemsize
    memory = torch.full((keys * row + case.shift,), NAN, dtype=BYTE)
    k = memory[case.shift :].view(keys, row)
    k[:] = _values(case, gen, keys, case.dim).to(case.kind).view(BYTE)
    start, end = torch.zeros(tokens).int(), (torch.arange(tokens) + keys - tokens + 1).int()
    if case.windows != "causal":
        both = torch.randint(-3, keys + 4, (2, tokens), generator=gen)
        start, end = both.amin(0).int(), both.amax(0).int()
        start[::5] = end[::5]
    if case.windows == "hostile":
        for t in (start, end):
            t[torch.rand(tokens, generator=gen) < 0.5] = HOSTILE[int(torch.randint(4, (), generator=gen))]
    scales = _scales(case, gen, keys)
    scales = scales.repeat_interleave(2)[::2] if case.strided else scales
    return _queries(case, gen, tokens) | {
        "kv": (k.view(case.kind), scales), "cu_seq_len_k_start": start, "cu_seq_len_k_end": end,
        "clean_logits": case.clean, "max_seqlen_k": case.compressed,
    }  # fmt: skip


def _paged(case: LogitsCase, gen: torch.Generator) -> dict[str, Any]:
    batch, size, dim = len(case.lens), case.page_size, case.dim
    counts = [-(-n // size) for n in case.lens]
    pages, row = sum(counts) + 2, size * (dim + 4)
    memory = torch.full((case.shift + pages * (row + case.gap),), NAN, dtype=BYTE)
    cache = memory[case.shift :].view(pages, row + case.gap)[:, :row]
    free = torch.randperm(pages, generator=gen)
    table = torch.full((batch, max(counts) + 1), NO_PAGE).int()
    for b, (n, count) in enumerate(zip(case.lens, counts, strict=True)):
        mine, free = free[:count], free[count:]
        table[b, :count] = mine.int()
        for i, page in enumerate(mine.tolist()):
            held = min(size, n - i * size)
            cache[page, : held * dim] = _values(case, gen, held, dim).to(E4M3).view(BYTE).flatten()
            cache[page, size * dim : size * dim + 4 * held] = _scales(case, gen, held).view(BYTE)
    lens = torch.tensor(case.lens).int()
    if case.own:
        lens = (torch.rand(batch, case.next_n, generator=gen) * (lens[:, None] + 1)).int()
        lens[:, -1] = torch.tensor(case.lens)
    if case.hostile:
        table[torch.rand(table.shape, generator=gen) < 0.3] = HOSTILE[3]
        lens[torch.rand(lens.shape, generator=gen) < 0.5] = HOSTILE[int(torch.randint(4, (), generator=gen))]
        table[:, 0] = torch.tensor((*HOSTILE[:2], pages))[torch.randint(3, (batch,), generator=gen)].int()
        table[0, 0] = pages
        cache.fill_(0x30)  # lengths reach pages that no request has
    view = cache.as_strided((pages, size, 1, dim + 4), (row + case.gap, dim + 4, dim + 4, 1))
    return _queries(case, gen, batch, case.next_n) | {
        "kv_cache": view, "context_lens": lens, "block_table": _strided(case, table), "schedule_meta": None,
        "max_context_len": max(case.lens) + case.more, "clean_logits": case.clean,
    }  # fmt: skip


def run(case: LogitsCase, given: dict[str, Any]) -> torch.Tensor:
    """Call the function, or compute the logits of SEGMENTS."""
    if case.function != SEGMENTS:
        return getattr(wrappers, case.function)(**given)
    q, (k, scale), ends, columns = given["q"], given["kv"], given["cu_seq_len_k_end"], given["max_seqlen_k"]
    return serve(LogitsCall(
        logits.SEGMENTS, q, k.view(BYTE).unsqueeze(1), given["weights"], ends, columns or len(k), case.dtype, scale,
        given["cu_seq_len_k_start"], next_n=max(len(q), 1), compressed=columns > 0, clean=given["clean_logits"],
    ))  # fmt: skip


def selectable(case: LogitsCase, seed: int = 0) -> tuple[LogitsCase, dict[str, Any]]:
    """Return the case of which all logits are computed, so that keys can be selected by them, and its arguments on the
    CPU. SEGMENTS has one segment, at the end of which its tokens are, and one scale."""
    case = replace(case, clean=True, compressed=0)
    if case.function == SEGMENTS:
        case = replace(case, windows="causal", shift=0)
    given = make_inputs(case, "cpu", seed)
    if case.function == SEGMENTS:
        given["kv"][1].fill_(SCALE)
    return case, given


def select(case: LogitsCase, given: dict[str, Any], **more: Any) -> torch.Tensor:
    """Select keys by the logits of a call: slots or rows, (tokens, top_k)."""
    if case.function == SEGMENTS:
        return select_segment(given, more["top_k"])[0]
    hints = "schedule_meta", "max_context_len", "clean_logits", "max_seqlen_k"
    function = wrappers.select_slots if case.paged else wrappers.select_rows
    found = function(**{name: value for name, value in given.items() if name not in hints}, **more)
    return found.flatten(0, -2)


def select_segment(given: dict[str, Any], top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select keys of SEGMENTS. Return their rows and scores."""
    q, k = given["q"], given["kv"][0]
    ends = (torch.arange(2, dtype=torch.int32, device=q.device) * len(t) for t in (q, k))  # in a capture, too
    return wrappers.dsa_indexer_topk(q, k, given["weights"], *ends, top_k=top_k, softmax_scale=SCALE)


def chosen(case: LogitsCase, given: dict[str, Any], logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return what tokens select by these logits, as slots of a paged cache or as rows: of equal logits the first, and
    those of SEGMENTS the last."""
    found = torch.full((len(logits), count), -1, dtype=torch.int32)
    for token, row in enumerate(logits):
        keys = (row != -torch.inf).nonzero()[:, 0]
        keys = keys.flip(0) if case.function == SEGMENTS else keys
        best = keys[row[keys].sort(descending=True, stable=True).indices[:count]].sort().values
        if case.paged:
            pages = given["block_table"][token // case.next_n].cpu()[best // case.page_size].long()
            slots = pages * case.page_size + best % case.page_size
            best = slots if case.page_size == 1 else torch.where(pages >= 0, slots, -1)
        found[token, : len(best)] = best.int()
    return found


def expected(case: LogitsCase, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits in fp32, -inf for keys that a token does not see, and how far each may be off."""
    exact = case if case.function == SEGMENTS else replace(case, function=PAGED if case.paged else RAGGED)
    plain = {name: value for name, value in moved(given, torch.device("cpu")).items() if name != "logits_dtype"}
    plain |= {"q": plain["q"][0] if isinstance(plain["q"], tuple) else plain["q"], "clean_logits": True}
    exact = replace(exact, dtype="fp32")
    with override(HostMachine()):
        found = run(exact, plain)
        largest = run(exact, _magnitudes(case, plain))
    bound = tolerance(0 if case.function == SEGMENTS else case.heads, found, largest, case.dtype)
    return found, torch.where(found != -torch.inf, bound, 0.0)


def tolerance(heads: int, logits: torch.Tensor, magnitudes: torch.Tensor, dtype: str = "fp32") -> torch.Tensor:
    """Return how far logits of so many heads of e4m3, or of bf16 for 0, may be off. magnitudes: the same sums of the
    magnitudes. dtype: of the logits."""
    rounding = ROUNDING * heads**-0.5 if heads else BF16_ROUNDING
    return rounding * magnitudes + HALF_ULP[dtype] * (logits.abs() + magnitudes * 2.0**-4)


def _magnitudes(case: LogitsCase, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the magnitudes of queries, keys and weights."""
    found = given | {"q": given["q"].float().abs().to(case.kind), "weights": given["weights"].abs()}
    if not case.paged:
        return found | {"kv": (given["kv"][0].float().abs().to(case.kind), given["kv"][1])}
    cache = given["kv_cache"].clone(memory_format=torch.preserve_format)
    pages, size = cache.shape[:2]
    flat = cache.as_strided((pages, size * case.dim), (cache.stride(0), 1))
    flat &= 0x7F
    return found | {"kv_cache": cache}


def error(case: LogitsCase, got: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the largest difference over what is allowed; inf if a key is seen that should not be, or is not."""
    logits, bound = want
    got = got.cpu().float()
    if got.shape != logits.shape:
        return torch.inf
    seen = logits != -torch.inf
    if case.clean and not torch.equal(got[~seen], logits[~seen]):
        return torch.inf
    off = (got - logits)[seen].abs() / bound[seen].clamp(min=1e-30)
    off = torch.where(((got == logits) | got.isnan() & logits.isnan())[seen], 0.0, off).nan_to_num(torch.inf)
    return float(off.max()) if off.numel() else 0.0
