"""Calls of `append_latent`, their inputs, and what must be written.

Rows are views of wider tensors, unused rows and page tails hold arbitrary bytes, and nothing but rows of tokens may
change.
"""

from dataclasses import dataclass
from typing import Any

import torch

import wrappers
from cute_kernels.records import INDEX, RECORDS, ROWS
from wrappers import BlockTable, IndexerRows, LatentCache, LatentNorm, LatentQuery, PageLists, RotaryEmbedding
from wrappers.reference.latent import latent_values

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
E4M3, BYTE = torch.float8_e4m3fn, torch.uint8
POSITIONS = 40  # of a table of cosines and sines
WORST = (-(1 << 62), -(1 << 31), -123456, -1, 1 << 31, (1 << 62) + 5)  # values that name no row
SPECIAL = (0.0, -0.0, 1e-38, 6e-8, 3e4, float("inf"), float("-inf"), float("nan"))
ROUNDED = 2.0**-18  # a few roundings of fp32, in units of the largest value that takes part
FILL = 0x5A  # of bytes that nothing may change


@dataclass(frozen=True)
class LatentCase:
    """One call.

    apart: the rotated part has a cache of its own. places: "slots", "lists" or "table"; "rows": slots in order, which
    `mla_arguments` needs. int32: the dtype of index tensors, which otherwise is int64. mixed: bit i says that index
    tensor i, in the order of the fields of its class, has the other dtype; bit 4 is for the positions of the rotation,
    bit 5 for the indexer's own slots. hostile: some of them name no row. gap: bytes behind each page. shift: elements
    before rows and tables, so that they are not aligned. alone: the operand that is not aligned while all others are:
    "latent" (or an indexer's keys), "rotated", "cache" or "rotated cache". norm: "", "latent" or "both" parts. rope:
    "", "fp32" or "rows", the type of the table. positions: of the rotation are given. heads: of the query, 0 for none;
    nope: it has that part. in_place: the rotated parts are rotated in place. q8: the query is quantised. index: heads
    of the indexer's query, 0 for none, -1 for no indexer. data: "normal" or "special".
    """

    record: str = ROWS
    dtype: str = "bf16"
    tokens: int = 9
    latent: int = 512
    rotated: int = 64
    pages: int = 5
    page_size: int = 4
    apart: bool = False
    places: str = "slots"
    int32: bool = False
    mixed: int = 0
    hostile: bool = False
    gap: int = 0
    shift: int = 0
    alone: str = ""
    norm: str = ""
    rope: str = ""
    interleaved: bool = False
    positions: bool = True
    heads: int = 0
    nope: bool = True
    in_place: bool = False
    q8: bool = False
    scale_tensor: bool = False
    power_of_two: bool = True
    index: int = -1
    data: str = "normal"

    def ints(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Return values as an index tensor, of the dtype that its number in `mixed` has; far ones are clamped."""
        is_int32 = self.int32 != bool(self.mixed >> number & 1)
        return values.clamp(-(1 << 31), (1 << 31) - 1).int() if is_int32 else values.long()

    @property
    def exact(self) -> bool:
        """Whether the bytes must be those of the reference: nothing is normalised or rotated."""
        return not (self.norm or self.rope or self.index >= 0)


def of_record(record: str, **fields: Any) -> LatentCase:
    """Return a case with the parts of a record."""
    form = RECORDS[record]
    if not form.latent:
        return LatentCase(record, **fields)
    if record == INDEX:
        return LatentCase(record, **{"rotated": 0, "index": 2} | fields)
    latent = form.latent - (form.rotated if form.rotated_as == "codes" else 0)
    return LatentCase(record, **{"latent": latent, "rotated": form.rotated} | fields)


def _wide(t: torch.Tensor, shift: int) -> torch.Tensor:
    """Return a view of a wider tensor with the same values, `shift` elements behind its beginning."""
    whole = torch.full((*t.shape[:-1], t.shape[-1] + 8 + shift), 3.0, dtype=t.dtype, device=t.device)
    part = whole[..., shift : shift + t.shape[-1]]
    return part.copy_(t)


def _rows(case: LatentCase, gen: torch.Generator, *shape: int) -> torch.Tensor:
    t = torch.randn(shape, generator=gen) * torch.exp2(torch.randint(-5, 6, (*shape[:-1], 1), generator=gen))
    if case.data == "special":
        where = torch.rand(shape, generator=gen) < 0.05
        t[where] = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (int(where.sum()),), generator=gen)]
        t[1:2] = t[1:2].nan_to_num(0.0, 0.0, 0.0).clamp(-1.0, 1.0)
        t[1:2, ..., ::16] = 1.75  # the scale is 2^-8
        t[2:3] = t[2:3].nan_to_num(0.0, 0.0, 0.0).clamp(-1.0, 1.0) * 2.0**-24  # the scale is the least one
    return _wide(t.to(DTYPES[case.dtype]), case.shift)


def _cache(case: LatentCase, width: int, dtype: torch.dtype, before: int = 0) -> torch.Tensor:
    """Return a cache that begins `before` bytes behind an aligned address."""
    size = width * dtype.itemsize
    page = case.page_size * size + case.gap
    whole = torch.full((before + case.pages * page,), FILL, dtype=BYTE)[before:].view(case.pages, page)
    rows = whole.as_strided((case.pages, case.page_size, size), (whole.stride(0), size, 1))
    return rows if dtype is BYTE else rows.view(dtype)


def _places(case: LatentCase, gen: torch.Generator, number: int = 0) -> Any:
    """Return the places of the tokens, each another row; each request has up to 5 tokens. number: of slots."""
    if case.places == "rows":
        return torch.arange(case.tokens)
    slots = torch.randperm(case.pages * case.page_size, generator=gen)[: case.tokens]
    if case.places == "slots":
        if case.hostile:
            slots[::2] = torch.tensor(WORST)[torch.randint(len(WORST), (len(slots[::2]),), generator=gen)]
            slots[:1] = case.pages * case.page_size
        return case.ints(number, slots)
    each = -(-5 // case.page_size)  # pages of a request
    requests = min(case.pages // each, -(-case.tokens // 5))
    table = torch.randperm(case.pages, generator=gen)[: requests * each].view(requests, each)
    if case.hostile:
        table[-1, 0] = 1 << 30
        table[0, 0] = case.pages
    token = torch.arange(case.tokens)
    request, position = token // 5, token % 5
    if case.places == "lists":
        if case.hostile:
            request[1::3] = -7
        starts = torch.arange(requests + 1) * each
        return PageLists(*map(case.ints, range(4), (request, position, table.flatten(), starts)))
    starts = (torch.arange(requests + 1) * 5).clamp(max=case.tokens)
    lens = starts.diff()
    return BlockTable(*map(case.ints, range(3), (table, lens, starts)))


def _table(case: LatentCase, gen: torch.Generator, width: int) -> torch.Tensor:
    angles = torch.rand(POSITIONS, width // 2, generator=gen) * 6
    table = _wide(torch.cat([angles.cos(), angles.sin()], 1), case.shift)
    return table if case.rope == "fp32" else _wide(table.to(DTYPES[case.dtype]), case.shift)


def make_inputs(case: LatentCase, device: "torch.device | str" = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return the arguments of `append_latent`, with outputs that hold NaN."""
    gen, form, dtype = torch.Generator().manual_seed(seed), RECORDS[case.record], DTYPES[case.dtype]
    width = case.latent + (0 if case.apart else case.rotated)
    kind = dtype if case.record == ROWS else BYTE
    cache = LatentCache(
        _cache(case, form.token_bytes or width, kind, form.unit * (case.alone == "cache")), case.record,
        power_of_two=case.power_of_two,
    )  # fmt: skip
    if case.apart:
        cache = cache._replace(rotated=_cache(case, case.rotated, kind, form.unit * (case.alone == "rotated cache")))
    if case.record == "e4m3":
        cache = cache._replace(scale=torch.tensor([0.75]) if case.scale_tensor else 0.5)
    given: dict[str, Any] = {"latent": _rows(case, gen, case.tokens, case.latent), "cache": cache}
    given["rotated"] = _rows(case, gen, case.tokens, case.rotated) if case.rotated else None
    if isinstance(given.get(case.alone), torch.Tensor):
        given[case.alone] = _wide(given[case.alone], 1)
    given["places"] = _places(case, gen)
    if case.record == INDEX:
        given |= {"latent": None, "cache": None}
    positions = torch.randint(POSITIONS, (case.tokens,), generator=gen)
    if case.hostile:
        positions[2::5] = POSITIONS
    positions = case.ints(4, positions)
    if case.norm and case.record != INDEX:
        count = case.latent + (case.rotated if case.norm == "both" else 0)
        weight = (torch.rand(count, generator=gen) + 0.5).to(dtype)
        given["norm"] = LatentNorm(_wide(weight, case.shift), 1e-5, 0.25)
    if case.rope and case.record != INDEX:
        table = _table(case, gen, case.rotated)
        given["rope"] = RotaryEmbedding(positions if case.positions else None, table, case.interleaved)
    if case.in_place and case.rotated:
        given["rotated_out"] = given["rotated"]
    if case.heads:
        nope = _rows(case, gen, case.tokens, case.heads, case.latent) if case.nope else None
        pe, out = _rows(case, gen, case.tokens, case.heads, case.rotated), None
        if case.in_place and not case.nope:
            out = pe
        else:
            columns = case.rotated + (case.latent if case.nope else 0)
            out = torch.full((case.tokens, case.heads, columns), torch.nan).to(E4M3 if case.q8 else dtype)
        scale = torch.tensor([0.5]) if case.scale_tensor and case.q8 else 0.25 if case.q8 else 1.0
        given["query"] = LatentQuery(nope, pe, out, scale=scale)
    if case.index >= 0:
        given["index"] = _indexer(case, gen, positions)
    return {name: moved(value, torch.device(device)) for name, value in given.items()}


def _indexer(case: LatentCase, gen: torch.Generator, positions: torch.Tensor) -> IndexerRows:
    dtype, heads = DTYPES[case.dtype], case.index
    own = _places(case, gen, 5) if case.places == "slots" and case.hostile else None
    weight = bias = rope = None
    if case.norm:
        weight, bias = (_wide((torch.rand(128, generator=gen) + 0.5).to(dtype), case.shift) for _ in range(2))
        bias = bias if case.norm == "both" else None
    if case.rope:
        rope = RotaryEmbedding(positions, _table(case, gen, 64), not case.interleaved)
    k = _rows(case, gen, case.tokens, 128)
    cache = _cache(case, 132, BYTE, RECORDS[INDEX].unit * (case.alone == "cache"))
    found = IndexerRows(
        _wide(k, 1) if case.alone == "latent" else k, cache, own, weight, bias, 1e-5, rope, case.power_of_two
    )  # fmt: skip
    if not heads:
        return found
    return found._replace(
        q=_rows(case, gen, case.tokens, heads, 128), weights=torch.randn(case.tokens, heads, generator=gen),
        weight_scale=0.125, q_out=torch.full((case.tokens, heads, 128), torch.nan).to(E4M3),
        weights_out=torch.full((case.tokens, heads), torch.nan),
    )  # fmt: skip


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device, in their layout."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        memory = torch.empty(0, dtype=BYTE).set_(value.untyped_storage()).to(device)
        new = torch.empty(0, dtype=value.dtype, device=device)
        return new.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    if hasattr(value, "_fields"):
        return type(value)(*(moved(part, device) for part in value))
    return value


def run(given: dict[str, Any]) -> None:
    wrappers.append_latent(**given)


def run_case(case: LatentCase, given: dict[str, Any]) -> None:
    """Run a case by the function that has its places."""
    if case.places == "rows":
        wrappers.mla_rope_quantize_fp8(**mla_arguments(given))
    else:
        run(given)


def mla_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which `mla_rope_quantize_fp8` does the same.

    The cache is a page that all rows fill, and the rotated part has its own."""
    cache, query, rope = given["cache"], given["query"], given["rope"]
    latent = given["latent"].shape[1]
    return {
        "q_rope": query.rotated, "k_rope": given["rotated"], "q_nope": query.nope, "k_nope": given["latent"],
        "cos_sin_cache": rope.cos_sin_cache, "pos_ids": rope.positions, "is_neox": not rope.interleaved,
        "quant_scale_q": 1.0 / query.scale, "quant_scale_kv": 1.0 / cache.scale,
        "q_rope_out": query.out[..., latent:], "q_nope_out": query.out[..., :latent],
        "k_rope_out": cache.rotated[0].view(E4M3), "k_nope_out": cache.cache[0].view(E4M3),
    }  # fmt: skip


def outputs(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a call may write."""
    found = {"rotated": given.get("rotated_out")}
    if given["cache"] is not None:
        found |= {"cache": given["cache"].cache, "rotated cache": given["cache"].rotated}
    if given.get("query") is not None:
        found["query"] = given["query"].out
    if given.get("index") is not None:
        index = given["index"]
        found |= {"index cache": index.cache, "index q": index.q_out, "index weights": index.weights_out}
    return {name: t for name, t in found.items() if t is not None}


def written(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return all bytes of what a call may write, with those between rows and behind pages."""
    found = outputs(given)
    return {name: torch.empty(0, dtype=BYTE, device=t.device).set_(t.untyped_storage()) for name, t in found.items()}


def values(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the bytes of the elements of what a call may write."""
    return {name: t.contiguous().view(BYTE).flatten() for name, t in outputs(given).items()}


def decoded(case: LatentCase, name: str, t: torch.Tensor) -> torch.Tensor:
    """Return the values of an output in fp32."""
    if t.dtype is not BYTE:
        return t.float()
    record = INDEX if name == "index cache" else "e4m3" if name == "rotated cache" else case.record
    return latent_values(record, t, DTYPES[case.dtype])


def row_maxima(t: torch.Tensor) -> torch.Tensor:
    """Return the largest finite magnitude of each row."""
    return t.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)


def step_of(case: LatentCase, name: str, t: torch.Tensor) -> float:
    """Return how far apart values may be that were rounded from almost equal ones, in units of the larger one."""
    if t.dtype is torch.float32:
        return 2.0**-16
    if t.dtype in DTYPES.values():
        return 2.0**-6 if t.dtype is torch.bfloat16 else 2.0**-9
    return 0.5 if name == "cache" and RECORDS[case.record].codes == "e2m1" else 0.25


def difference(case: LatentCase, got: dict[str, Any], want: dict[str, Any], whole: bool = True) -> str:
    """Return what is wrong with the outcome of a call, given that of the reference; "" if it is right.

    If the call normalises or rotates, values may be a step apart, one in ten of them by more than fp32 rounds. whole:
    bytes that belong to no element are compared, too.
    """
    wrong, bytes_of = [], written if whole else values
    for name, theirs in outputs(want).items():
        a, b = (bytes_of(given)[name].cpu() for given in (got, want))
        if torch.equal(a, b):
            continue
        x, y = (decoded(case, name, t.cpu()) for t in (outputs(got)[name], theirs))
        apart, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
        nothing = x.isnan() & y.isnan()  # bits of what is no number are not certain
        close = apart <= step_of(case, name, theirs) * larger + ROUNDED * row_maxima(y)
        alike = nothing | (apart <= ROUNDED * larger) | (x == y)
        if case.exact:
            close = alike = nothing | (x == y) & (x.signbit() == y.signbit()) & (theirs.dtype in DTYPES.values())
        if not (alike | close).all() or (~alike).float().mean() > 0.1:
            wrong.append(f"{name}: {int((~alike).sum())} other values, {int((a != b).sum())} other bytes")
        elif whole:
            own = torch.empty(0, dtype=theirs.dtype).set_(
                a.untyped_storage(), theirs.storage_offset(), theirs.shape, theirs.stride()
            )
            own.copy_(theirs.cpu())
            if not torch.equal(a, b):
                wrong.append(f"{name}: bytes that belong to no element")
    return ", ".join(wrong)


__all__ = ["INDEX", "LatentCase", "difference", "make_inputs", "of_record", "outputs", "run", "values", "written"]
