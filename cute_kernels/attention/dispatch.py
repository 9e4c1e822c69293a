"""The choice of the kernel that serves a request. Plain Python: it runs without the DSL.

A kernel either computes whole tiles (`schedule.tiles`), in which one CTA reads all keys of its query rows, or splits
the keys of a sequence among CTAs (`schedule.stream_k`). `splits_pay` decides which of the two is asked first, from
shapes alone: the public function that was called does not matter.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from .. import shipped as policy
from ..dtypes import BITS
from . import decode, latent, sm90, sm100
from .request import KernelRequest, Refusal
from .spec import outputs

OPS = {"attention.sm90": sm90, "attention.sm100": sm100, "attention.decode": decode, "attention.latent": latent}
# (op, whether it splits keys), in the order in which they are asked
SPLIT = (("attention.sm90", True), ("attention.sm100", True), ("attention.decode", True))
WHOLE = (("attention.sm90", False), ("attention.sm100", False))
LATENT = (("attention.latent", True),)  # asked first, where V lies in K
FIXED = SPLIT[2:]  # the kernels that split at multiples of a fixed number of keys
# Query rows of a KV head: one MMA of `decode`, two of them, one tile of the other kernels that split keys
FEW_ROWS, MORE_ROWS, MANY_ROWS = 8, 16, 64
# A CTA of whole tiles could read keys so many times faster than its share of the memory's rate, by bits of a stored
# element: 2.5 times in 16 bits. Quantised keys take longer to convert than to read. Measured on an H100, where 3.2 and
# 1.1 are exact, and lowered for the H200's faster memory.
READ_RATE = {16: 2.5, 8: 0.95, 4: 0.56}
# The time of a merge, in keys that a CTA reads meanwhile: with up to MORE_ROWS, up to MANY_ROWS, and more rows.
MERGES = {MORE_ROWS: 550, MANY_ROWS: 2500, None: 2000}


class Kind(NamedTuple):
    """A kind of kernels in `shipped`. meaning: what they serve. split: they split keys. change: fields in which a
    request that such a kernel serves differs from the default."""

    meaning: str
    split: bool
    change: dict[str, Any]


CHOSEN = {"source": "slots", "causal": False}  # fields of a request of which tokens choose their keys
KINDS = {
    "causal": Kind("a causal mask, no modifier", False, {}),
    "full": Kind("no mask, and no modifier", False, {"causal": False}),
    "modified": Kind("any mask but a custom one, windows, soft caps", False, {"window": True}),
    "quantised output": Kind("modified, and outputs of e4m3 or NVFP4", False, {"window": True, "out": "nvfp4"}),
    "gather": Kind("causal, with pages of any size", False, {"page_size": 1}),
    "gather modified": Kind("modified, with pages of any size", False, {"page_size": 1, "window": True}),
    "custom mask": Kind("a custom mask, no modifier", False, {"causal": False, "custom_mask": "bits"}),
    "custom mask modified": Kind(
        "a custom mask, windows and soft caps", False, {"causal": False, "custom_mask": "bits", "window": True}
    ),
    "ranges": Kind("causal, or inside a range of keys per token", False, {"causal": False, "custom_mask": "ranges"}),
    "ranges modified": Kind(
        "ranges, and soft caps", False, {"causal": False, "custom_mask": "ranges", "soft_cap": True}
    ),
    "prefix": Kind("causal, and a prefix that all tokens see", False, {"prefix": True}),
    "skip": Kind("causal, with skip-softmax", False, {"skip": True}),
    "split": Kind("causal, and CTAs share the keys of a sequence", True, {}),
    "split modified": Kind("split, with windows and soft caps", True, {"window": True}),
    "latent": Kind("causal, CTAs share keys, and V lies in K", True, {"shares_v": True, "rows": MANY_ROWS}),
    "latent full": Kind("the same without a mask", True, {"shares_v": True, "causal": False, "rows": MANY_ROWS}),
    "latent modified": Kind(
        "latent, with windows and soft caps", True, {"shares_v": True, "window": True, "rows": MANY_ROWS}
    ),
    "latent pairs": Kind("latent, and two CTAs share the loads of keys", True, {"shares_v": True}),
    "latent full pairs": Kind("the same without a mask", True, {"shares_v": True, "causal": False}),
    "latent modified pairs": Kind("latent pairs, with windows and soft caps", True, {"shares_v": True, "window": True}),
    "latent gather": Kind("latent, with pages of any size", True, {"shares_v": True, "page_size": 1}),
    "latent slots": Kind("latent, with keys that each token chooses", True, {"shares_v": True} | CHOSEN),
    "latent shared slots": Kind(
        "latent slots, of which neighbouring tokens share the keys",
        True,
        {"shares_v": True, "share_keys": True} | CHOSEN,
    ),
    "latent two caches": Kind(
        "latent slots, and slots of a second cache",
        True,
        {"shares_v": True, "extra": True} | CHOSEN,
    ),
    "causal factors": Kind("causal, and a factor per token and head", False, {"kv_scales": "token"}),
    "modified factors": Kind(
        "modified, and a factor per token and head", False, {"window": True, "kv_scales": "token"}
    ),
    "8 rows": Kind("few query rows and every modifier: 8 rows per warp", True, {"rows": 8}),
    "16 rows": Kind("the same with 16 rows per warp", True, {"rows": 16}),
    "8 rows window": Kind(
        f"8 rows, and a window of at most {decode.WINDOW_KEYS} keys",
        True,
        {"rows": 8, "visible_keys": decode.WINDOW_KEYS},
    ),
    "8 rows many": Kind(
        "8 rows, and many tiles", True, {"rows": 8, "kv_heads": decode.MANY_PER_SM * KernelRequest.sms}
    ),
    "8 rows factors": Kind("8 rows, and a factor per token and head", True, {"rows": 8, "kv_scales": "token"}),
    "16 rows factors": Kind("16 rows, and a factor per token and head", True, {"rows": 16, "kv_scales": "token"}),
    "8 rows gather": Kind("8 rows, with pages of any size", True, {"rows": 8, "page_size": 1}),
    "16 rows gather": Kind("16 rows, with pages of any size", True, {"rows": 16, "page_size": 1}),
    "8 rows slots": Kind("8 rows, with keys that each token chooses", True, {"rows": 8} | CHOSEN),
    "16 rows slots": Kind("16 rows, with keys that each token chooses", True, {"rows": 16} | CHOSEN),
}


PACKED = {  # kind over 16-bit rows -> records of the first and of a second cache that kernels are shipped for
    "latent gather": (("e4m3", ""), ("656", "")),
    "latent slots": tuple((record, "") for record in ("e4m3", "656", "352", "528_fp32", "584", "528")),
    "latent shared slots": (("656", ""), ("e4m3", "")),
    "latent two caches": (("584", "584"), ("528", "288"), ("528", "528")),
}
for _rows in (8, 16):
    KINDS[f"latent slots {_rows} rows"] = Kind(
        f"latent slots of prompts, for up to {_rows} rows",
        True,
        KINDS["latent slots"].change | {"rows": _rows, "split_kv": "never"},
    )
for _kind, _records in PACKED.items():
    for _first, _second in _records:
        _both = _first + (f", {_second}" if _second else "")
        _meaning, _change = f"{_kind} over packed records, {_both}", {"record": _first, "extra_record": _second}
        _change |= KINDS[_kind].change
        KINDS[f"{_kind} {_both}"] = Kind(_meaning, KINDS[_kind].split, _change)
        if "share_keys" in _change:
            continue
        for _rows in (8, 16):  # of `attention.latent`, if a request has few
            _name = f"{_kind} {_both} {_rows} rows"
            KINDS[_name] = Kind(f"{_meaning}, for up to {_rows} rows", True, _change | {"rows": _rows})


class Answer(NamedTuple):
    """An op's answer to a request: the spec that it would run, and None or the reason why it refuses. spec: None if the
    op does not have the architecture."""

    op: str
    spec: Any
    reason: Refusal | None


def refusals(answers: Iterable[tuple[str, Any, Any]]) -> list[tuple[str, Any]]:
    """Return (op, reason) of the answers that refuse, each once: first those that a caller can act on.

    Kernels for another number of rows come behind them, and kernels for another architecture last.
    """
    found = dict.fromkeys((op, reason) for op, _, reason in answers if reason is not None)
    return sorted(found, key=lambda each: {"rows": 1, "arch": 2}.get(getattr(each[1], "field", ""), 0))


class UnsupportedRequest(NotImplementedError):
    """No op serves a request. field: the field of the request that was refused; "rows" or "arch" only if no other
    field was."""

    def __init__(self, answers: tuple[Answer, ...]):
        found = refusals(answers)
        super().__init__("; ".join(f"{op}: {reason}" for op, reason in found))
        self.field = found[0][1].field if found else "arch"


def splits_pay(request: KernelRequest) -> bool:
    """Return whether CTAs should share the keys of a sequence.

    They should if too few tiles read keys at once, and if that saves more than the merge takes. All numbers are
    measured (bench/notes/dispatch.md). If keys are many or rows few, both take the same time with sequences of one
    length; sharing balances other lengths.
    """
    if request.source == "ragged":  # split keys without pages are simulated, but no device has run them
        return False
    rows, heads, keys, sms = request.packed_rows, request.kv_heads, request.keys, request.sms
    bits, tiles = BITS[request.kv], heads * -(-rows // 128)
    if rows > MANY_ROWS:  # each MANY_ROWS rows read the keys: at the same time, or the keys are not in the L2
        idle = min(1 - 4.1 * heads / sms, 1 - 1.6 * tiles / sms)
        return heads * -(-rows // MANY_ROWS) <= sms and keys * idle > MERGES[None]
    saved = keys * (1 - READ_RATE[bits] * tiles / sms)
    if rows <= FEW_ROWS:  # a merge takes next to nothing
        if heads >= sms:
            return bits < 16 or request.page_size != 8  # boxes of 8 rows cost `decode` 2 %
        return bits < 16 or saved > 0 or not 512 < keys < 1024
    if rows <= MORE_ROWS:
        return bits == 4 or bits == 8 and keys <= 512 or keys >= 8192 or saved > MERGES[MORE_ROWS]
    return bits == 4 and keys >= 8192 or saved > MERGES[MANY_ROWS]


def answer(op: str, request: KernelRequest, arch: str, split: bool) -> Answer:
    """Return an op's answer to a request. split: whether to ask for a kernel that splits keys."""
    module = OPS[op]
    if arch not in module.ARCHS:
        return Answer(op, None, Refusal("arch", f"{arch}: needs {' or '.join(module.ARCHS)}"))
    spec: Any = module.candidate(request, arch, split)
    if module is decode and (op, spec) not in _held(arch):
        spec = decode.for_all_calls(spec, arch)
    if request.source == "ragged" and spec.kv.shares_v:
        return Answer(op, spec, Refusal("source", "ragged: caches of which V lies in K have pages"))
    if request.source == "ragged" and spec.kv.layout.exists:
        return Answer(op, spec, Refusal("source", "ragged: caches with scale factors have pages"))
    return Answer(op, spec, module.supports(spec))


def explain(request: KernelRequest, arch: str) -> tuple[Answer, ...]:
    """Return the answers to a request, those that are asked first at the beginning.

    With few rows, a kernel that is shipped comes before one that would have to be compiled. A kernel of decode that
    serves some calls only (`decode.TileKey.work`) is chosen only if it is shipped.
    """
    order: tuple[tuple[str, bool], ...] = (*WHOLE, *FIXED)
    if request.shares_v:  # its kernels share keys, and the host says how many a CTA may leave to another
        order = (*LATENT, *SPLIT, *WHOLE)
    elif request.split_kv == "fixed":
        order = (*FIXED, *WHOLE)
    elif request.split_kv == "always" or request.split_kv == "auto" and splits_pay(request):
        order = (*SPLIT, *WHOLE)
    found = [answer(op, request, arch, split) for op, split in order]
    if request.split_kv == "auto" and request.packed_rows <= MANY_ROWS:
        held = _held(arch)
        found.sort(key=lambda a: a.reason is not None or (a.op, a.spec) not in held)
    return tuple(found)


def select(request: KernelRequest, arch: str) -> tuple[str, Any]:
    """Return (op, spec) of the kernel that serves the request. Raise `UnsupportedRequest`, which names every op's
    reason, if there is none."""
    answers = explain(request, arch)
    for op, spec, reason in answers:
        if reason is None:
            return op, spec
    raise UnsupportedRequest(answers)


def requests(row: policy.AttentionRow) -> Iterator[tuple[bool, KernelRequest]]:
    """Return, for each kernel of a row of `shipped`, whether it splits keys, and a request that it serves."""
    for q, kv, dims, kind in product(row.q, row.kv, row.head_dims, row.kinds):
        request = KernelRequest(q, q if kv == policy.SAME else kv, outputs(q)[0], *dims)
        yield KINDS[kind].split, replace(request, **KINDS[kind].change)


def shipped(arch: str) -> list[tuple[str, Any]]:
    """Return all (op, spec) of a bundle for `arch`, each once. Other kernels are compiled at their first call."""
    rows = [row for row in policy.ATTENTION if arch in row.archs]
    found = ((row.op, OPS[row.op].candidate(one, arch, split)) for row in rows for split, one in requests(row))
    return list(dict.fromkeys(found))


@cache
def _held(arch: str) -> frozenset[tuple[str, Any]]:
    return frozenset(shipped(arch))
