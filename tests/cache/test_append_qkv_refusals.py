"""Scripted bad calls of `append_qkv`, as in test_bad_calls.py: each field of the tuples that it takes is an argument.

A message begins with the field as the caller wrote it (`cache.kv (K)`, `rope.positions`), or with the argument or field
with which a bad value does not agree, and then names both or shows the sizes that differ.
"""

import math
import re
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

import wrappers
from tests.host import test_bad_calls
from tests.support import bad_values as shared
from tests.support.bad_values import FAR, HOSTS, KINDS, MISMATCH, NONE, NUMBERS, OF_TWO, SIZES, VALUES
from wrappers import BlockTable, KVCacheTarget, PageLists, QueryOutput, RMSNorm, RotaryEmbedding, append_qkv
from wrappers.host import machine

E4M3 = torch.float8_e4m3fn
one_thread = shared.one_thread
CLASSES = {
    "cache": (KVCacheTarget,), "places": (PageLists, BlockTable), "norm": (RMSNorm,), "rope": (RotaryEmbedding,),
    "out": (QueryOutput,),
}  # fmt: skip


# ---- good calls: field -> value. A dot separates an argument from its field


def rows(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, 32).bfloat16()


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


QKV = {"q": rows(3, 4), "k": rows(3, 2), "v": rows(3, 2)}
TABLE = torch.rand(9, 32)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xA5, dtype=torch.uint8).view(dtype)


GOOD: dict[str, dict[str, Any]] = {
    "slots, bf16": {
        "k": QKV["k"], "v": QKV["v"], "cache.kv": tuple(poisoned(6, 4, 2, 32, dtype=torch.bfloat16) for _ in "kv"),
        "places": torch.tensor([5, -1, 23]),
    },
    "slots, bf16, in one tensor, with Q": QKV | {
        "cache.kv": poisoned(6, 2, 4, 2, 32, dtype=torch.bfloat16), "places": ints(5, 0, 23),
        "rope.positions": ints(7, 8, 9), "out.out": poisoned(3, 4, 32, dtype=torch.bfloat16),
    },
    "lists, e4m3, norm, angles": QKV | {
        "cache.kv": tuple(poisoned(6, 2, 4, 32, dtype=E4M3) for _ in "kv"), "cache.layout": "HND",
        "cache.k_scale": 0.5, "cache.v_scale": torch.tensor([0.25, 2.0]),
        "places.batch_indices": ints(0, 2, 2), "places.positions": ints(6, 7, 8),
        "places.kv_indices": ints(0, 1, 2, 3, 4), "places.kv_indptr": ints(0, 2, 2, 5),
        "norm.q_weight": torch.rand(4, 32).bfloat16(), "norm.k_weight": torch.rand(32).bfloat16(), "norm.eps": 1e-5,
        "norm.offset": 1.0, "rope.rotary_dim": 16, "rope.scale": 8.0, "rope.theta": 5e5,
        "rope.llama31": (1.0, 4.0, 8192),
    },
    "block table, NVFP4, cos and sin, 8-bit Q": QKV | {
        "cache.kv": tuple(poisoned(6, 4, 2, 16, dtype=torch.uint8) for _ in "kv"),
        "cache.sf": tuple(poisoned(6, 4, 2, 2, dtype=E4M3) for _ in "kv"), "cache.k_scale": torch.tensor([0.5]),
        "cache.v_scale": 0.25, "cache.v_sf_interleaved": True,
        "places.block_table": ints([0, 5], [1, 2]), "places.seq_lens": ints(6, 5), "places.cu_seqlens_q": ints(0, 1, 3),
        "rope.positions": ints(3, 4, 5), "rope.cos_sin_cache": TABLE, "rope.interleaved": True,
        "out.dtype": E4M3, "out.scale": 0.5,
    },
    "an 8-bit Q in the caller's memory": QKV | {
        "cache.kv": poisoned(6, 2, 4, 2, 32, dtype=E4M3), "places": ints(5, 0, 23), "cache.k_scale": 0.5,
        "out.out": poisoned(3, 4, 32, dtype=E4M3), "out.scale": torch.tensor([0.5, 1.0, 2.0, 4.0]),
    },
}  # fmt: skip


def call(given: dict[str, Any]) -> torch.Tensor | None:
    """Call the function with its fields in their tuples. An argument that is given whole replaces its tuple."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        owner, _, field = name.partition(".")
        if field:
            parts.setdefault(owner, {})[field] = value
    made = {
        owner: next(kind for kind in CLASSES[owner] if fields.keys() <= {*kind._fields})(**fields)
        for owner, fields in parts.items()
    }
    return append_qkv(**{"q": None} | made | {name: value for name, value in given.items() if "." not in name})


# ---- bad values

WHOLE: dict[str, Any] = {
    "list": [1, 2], "tuple": (1, 2), "str": "tuple", "int": 3, "numpy": np.zeros(2), "True": True,
    "tensor": torch.ones(2), "dict": {}, "other": wrappers.Explanation,
}  # fmt: skip
OWN = {  # a kind of value that only these fields have
    "cache.layout": KINDS["layout"],
    "cache.v_sf_interleaved": KINDS["flag"], "rope.interleaved": KINDS["flag"],
    "norm.eps": KINDS["number"], "norm.offset": KINDS["number"], "rope.scale": KINDS["number"],
    "rope.theta": KINDS["number"],
    "rope.rotary_dim": KINDS["int"] | {"odd": 24, "zero": 0, "wide": 64},
    "rope.llama31": NONE | NUMBERS | {
        "two": (1.0, 4.0), "four": (1.0, 4.0, 8192, 1), "words": ("1", 4.0, 8192), "None in it": (1.0, None, 8192),
        "equal": (4.0, 4.0, 8192), "swapped": (4.0, 1.0, 8192), "no length": (1.0, 4.0, 0), "nan in it":
        (1.0, math.nan, 8192), "True in it": (True, 4.0, 8192), "int": 3, "tensor": torch.ones(3), "far": FAR,
    },
    "out.dtype": NONE | KINDS["dtype"] | {"fp16": torch.float16, "e5m2": torch.float8_e5m2, "str": "e4m3"},
    "cache.k_scale": KINDS["scale"], "cache.v_scale": KINDS["scale"], "out.scale": KINDS["scale"],
}  # fmt: skip
WITHOUT_Q = {"norm.q_weight": torch.rand(32).bfloat16(), "out.out": rows(3, 4)}
DEFAULTS = {
    f"{owner}.{field}": default
    for owner, kinds in CLASSES.items() for kind in kinds for field, default in kind._field_defaults.items()
}  # fmt: skip


def fields_of(name: str) -> dict[str, Any]:
    """All arguments of a call and the fields of those that it gives, with their good values or defaults."""
    good = GOOD[name]
    owners = {field.partition(".")[0] for field in good} | {"norm", "out"}
    defaults = {field: value for field, value in DEFAULTS.items() if field.partition(".")[0] in owners}
    return {"q": None} | defaults | good | dict.fromkeys(owner for owner in CLASSES if owner not in good)


def bad_values(name: str, field: str) -> dict[str, Any]:
    good = fields_of(name)[field]
    if field in CLASSES and not isinstance(good, torch.Tensor):
        whole = dict(WHOLE) if field != "places" else {bad: WHOLE[bad] for bad in WHOLE if bad != "tensor"}
        return whole | (NONE if field in ("cache", "places") else {})
    if field in OWN:
        return OWN[field]
    if field == "q" and good is None:
        return shared.not_tensors((3, 4, 32)) | {"fp16": rows(3, 4).half()}
    if field in WITHOUT_Q and "q" not in GOOD[name]:
        return shared.not_tensors((2,)) | {"given": WITHOUT_Q[field]}
    if field == "places":
        return shared.tensors_like(good)
    return test_bad_calls.bad_values("", good)


PAIRS = [(name, field) for name in GOOD for field in fields_of(name)]


# ---- what a call does

SIDES = {"kv", "sf"}


def begins(field: str) -> tuple[str, ...]:
    """The names with which a message about a field may begin."""
    if field.partition(".")[2] in SIDES:
        return f"{field} (K): ", f"{field} (V): ", f"{field}: "
    return (f"{field}: ", f"{field}[")


def fault(error: BaseException, name: str, field: str, bad: str, value: Any) -> str | None:
    """Return the fault of a refusal, None if there is none."""
    said = str(error).strip('"')
    mismatch = bad.split(" ", 1)[1] if bad[:2] in ("K ", "V ") else bad
    own = said.startswith(begins(field))
    others = [n for n in fields_of(name) if n != field and said.startswith(begins(n))]
    if not own and not (others and mismatch in (*MISMATCH, *OF_TWO)) and (name, field, bad) not in SHOWN:
        return "does not begin with the field"
    if (name, field, bad) in SHOWN:
        return None if SHOWN[name, field, bad] in said else "says something else"
    if not re.search(r"must|required", said):
        return "does not say what is allowed"
    if not (re.search(SIZES, said) if mismatch in MISMATCH else shared.shows(said, value) or shows(said, value)):
        return "does not show the value"
    return None


def shows(said: str, value: Any) -> bool:
    """Whether a message begins with the type of a value that is of a wrong one, or with an entry of a tuple."""
    found = said.partition(": ")[2]
    if isinstance(value, tuple) and re.match(r"\w+\.\w+\[[0-2]\]: ", said):
        return any(found.startswith(f"{one!r}, ") for one in value)
    return found.startswith((f"{type(value).__name__}, ", f"{value!r}, "))


# ---- what is accepted all the same

EVERY = "every call"
PAGES = {f"{side} {bad}" for side in "KV" for bad in ("no rows", "a row less", "a row more")}  # others are not written
FEWER = {"no rows", "a row less", "no columns", "columns"}  # other rows are not written
LISTS, TABLE_CALL = "lists, e4m3, norm, angles", "block table, NVFP4, cos and sin, 8-bit Q"
STACKED, OWN_Q = "slots, bf16, in one tensor, with Q", "an 8-bit Q in the caller's memory"
ACCEPTED: dict[str, dict[str, set[str]]] = {
    EVERY: {
        "norm.eps": {"zero"}, "norm.offset": {"zero", "negative"}, "norm.q_weight": {"None"}, "norm.k_weight": {"None"},
        "places.batch_indices": {"int64"}, "places.positions": {"int64"},
        "places.kv_indices": {"int64", "a row more"} | FEWER,
        "places.kv_indptr": {"int64", "a row less", "a row more", "columns"},
        "places.block_table": {"int64", "no columns", "columns"},
        "places.seq_lens": {"int64"}, "places.cu_seqlens_q": {"int64"},
        "rope.positions": {"int64"}, "rope.rotary_dim": {"None"}, "rope.llama31": {"None"},
    },
    "slots, bf16": {
        "out.dtype": {"None"}, "cache.kv": PAGES, "places": FEWER, "k": {"a row more"}, "v": {"a row more"},
    },
    STACKED: {
        "out.dtype": {"None"}, "v": {"a row more"},
        "cache.kv": {"no rows", "a row less", "a row more", "float8_e4m3fn"},
        "places": FEWER | {"int64"}, "out.out": {"None"},
    },
    LISTS: {"cache.kv": PAGES, "cache.k_scale": {"two"}, "cache.v_scale": {"two"}, "out.dtype": {"None"}},  # per head
    TABLE_CALL: {
        "cache.sf": {"K uint8", "V uint8"}, "cache.k_scale": {"two"}, "cache.v_scale": {"two"},
        "rope.positions": {"int64", "None"}, "rope.cos_sin_cache": {"None", "a row less", "a row more"},
    },
    OWN_Q: {
        "out.dtype": {"None"}, "v": {"a row more"}, "cache.kv": {"no rows", "a row less", "a row more"},
        "cache.k_scale": {"two"}, "cache.v_scale": {"two"}, "places": FEWER | {"int64"},
    },
}  # fmt: skip
OF_CACHE = dict.fromkeys(("cache.k_scale", "cache.v_scale"), VALUES)
ON_CUDA = {  # only the device knows these values
    LISTS: OF_CACHE,
    **dict.fromkeys((TABLE_CALL, OWN_Q), OF_CACHE | {"out.scale": VALUES}),
}
SHOWN: dict[tuple[str, str, str], str] = {  # what a message says instead of the field's name and value
    (STACKED, "q", "None"): "out.out: Tensor, must be None without q",
    (TABLE_CALL, "out.dtype", "None"): "out.scale: 0.5, must be 1.0: only an 8-bit Q is divided by it",
    (OWN_Q, "q", "None"): "out.out: Tensor, must be None without q",
    (LISTS, "q", "None"): "norm.q_weight: Tensor, must be None without q",
    (TABLE_CALL, "q", "None"): "out.dtype: dtype, must be None without q",
    (TABLE_CALL, "cache.sf", "None"): "cache.v_sf_interleaved: True, must be False without cache.sf",
    **{
        (OWN_Q, "out.out", bad): "out.scale: shape (4,), must be 1.0: only an 8-bit Q is divided by it"
        for bad in ("None", "float16")
    },
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("host", HOSTS)
def test_good_calls_write(name, host):
    given = deepcopy(GOOD[name])
    with machine.override(shared.machine_of(host, lambda: call(deepcopy(GOOD[name])))):
        found = call(given)
    assert (found is None) == (given.get("q") is None)
    caches = [*shared.tensors_in(given["cache.kv"]), *shared.tensors_in(given.get("cache.sf"))]
    assert all((t.view(torch.uint8) != 0xA5).any() for t in caches)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name,field", PAIRS)
def test_one_bad_field(name, field):
    def allowed(host):
        tables = [ACCEPTED] if host == "cpu" else [ACCEPTED, ON_CUDA]
        return set[str]().union(*(table.get(of, {}).get(field, ()) for table in tables for of in (name, EVERY)))

    good = deepcopy(GOOD[name])

    def attempt(here, bad, value):
        nonlocal good
        wrong = shared.outcome(here, call, good | {field: value}, lambda error: fault(error, name, field, bad, value))
        good = deepcopy(GOOD[name]) if wrong else good  # a refusal has written nothing
        return wrong

    faults = shared.faults_of(HOSTS, lambda: call(deepcopy(GOOD[name])), bad_values(name, field), allowed, attempt)
    assert not faults, "\n".join(faults)


def test_the_tables_name_bad_values():
    """Nothing is listed that no call is given."""
    for table in (ACCEPTED, ON_CUDA):
        for name, entries in table.items():
            for field, listed in entries.items():
                names = [name] if name != EVERY else [n for n in GOOD if field in fields_of(n)]
                assert listed <= {bad for n in names for bad in bad_values(n, field)}, (name, field)
    assert all(bad in bad_values(name, field) for name, field, bad in SHOWN)
