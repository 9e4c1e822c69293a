"""Parts of the scripted bad calls in test_bad_calls.py and test_append_qkv_refusals.py: bad values by the kind of an
argument, hosts, and what is wrong with a refusal."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import wrappers
from tests.support import emulated
from tests.support.fake_machine import FakeMachine
from wrappers import fp4
from wrappers.host import machine

E4M3 = torch.float8_e4m3fn
POISON = 0xA5
REFUSALS = (TypeError, ValueError, NotImplementedError)
NONE: dict[str, Any] = {"None": None}
FAR = 1 << 70
NUMBERS = {"str": "3", "list": [3], "numpy": np.ones(2), "nan": math.nan, "inf": math.inf, "complex": 1j}
KINDS: dict[str, dict[str, Any]] = {
    "int": NONE | NUMBERS | {"float": 3.0, "True": True, "tensor": torch.ones(2), "far": FAR, "negative": -3},
    "flag": NONE | NUMBERS | {"no": "no", "yes": "yes", "one": 1, "zero": 0, "1.0": 1.0, "tensor": torch.ones(1)},
    "number": NONE | NUMBERS | {
        "True": True, "-inf": -math.inf, "zero": 0.0, "negative": -1.0, "tensors": [torch.ones(1)],
        "one": torch.ones(1), "two": torch.ones(2),
    },
    "scale": NONE | NUMBERS | {
        "True": True, "-inf": -math.inf, "zero": 0.0, "negative": -1.0,
        "two": torch.ones(2), "double": torch.ones(1).double(), "int tensor": torch.ones(1).int(),
        "meta": torch.ones(1, device="meta"), "sparse": torch.ones(1).to_sparse(),
        "nan tensor": torch.tensor([math.nan]), "inf tensor": torch.tensor([math.inf]), "empty": torch.ones(0),
    },
    "layout": {"None": None, "lower": "hnd", "HDN": "HDN", "int": 3, "list": ["HND"], "empty": ""},
    "name": {"None": None, "other": "fa9", "int": 3, "empty": "", "True": True},
    "dtype": {
        "name": "bfloat16", "class": float, "int": 16, "fp64": torch.float64, "int32": torch.int32,
        "list": [torch.float16],
    },
    "shape": NONE | {
        "int": 16, "str": "516", "floats": (5.0, 2, 16), "negative": (-5, 2, 16), "short": (16,), "odd": (5, 2, 7),
        "True": (True, 2, 16), "tensor": torch.ones(3),
    },
    "function": NONE | {"str": "xqa", "builtin": len, "helper": fp4.load},
    "arch": {"int": 90, "list": ["sm_90a"], "other": "h100", "empty": ""},
    "device": NONE | {"str": "cpux", "int": 1 << 20, "list": ["cpu"]},
    "four": NONE | {
        "str": "none", "int": 3, "three": (0, 0, 0), "ones": (1, 1, 1, 1), "floats": (0.5, 0.5, 0.5, 0.5),
        "True": (True, True, True, True),
    },
    "fp4": NONE | {"tensor": torch.ones(5, 2, 8, dtype=torch.uint8), "str": "fp4", "list": [1]},
}  # fmt: skip
MISMATCH = ("rank + 1", "flat", "no rows", "a row less", "a row more", "no columns", "columns")
OF_TWO = ("bfloat16", "float16", "float8_e4m3fn", "uint8", "meta")  # wrong beside another tensor's


def not_tensors(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"list": [1, 2], "tuple": (1, 2), "str": "tensor", "int": 3, "numpy": np.zeros(shape), "True": True}


def tensors_like(t: torch.Tensor) -> dict[str, Any]:
    """Return values that are no tensors, and tensors that differ from `t` in one property."""
    dtypes = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float16, E4M3, torch.uint8)
    bad = NONE | not_tensors(tuple(t.shape)) | {
        "rank + 1": t[None], "meta": t.to("meta"), "sparse": torch.sparse_coo_tensor(size=t.shape, dtype=t.dtype),
        **{str(d)[6:]: torch.zeros(t.shape).to(d) for d in dtypes if d != t.dtype},
    }  # fmt: skip
    if t.ndim:
        bits = t.contiguous().view(BITS[t.element_size()])  # torch copies no e4m3
        some = {
            "flat": bits.flatten() if t.ndim > 1 else bits[0], "no rows": bits[:0], "a row less": bits[:-1].clone(),
            "a row more": torch.cat([bits, bits[:1]]), "no columns": bits[..., :0].clone(),
            "columns": bits[..., :-1].clone(), "strided": torch.stack([bits, bits], -1)[..., 0],
            "expanded columns": bits[..., :1].clone().expand(bits.shape),
        }  # fmt: skip
        bad |= {name: recast(b, t.dtype) for name, b in some.items()}
    return bad


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def recast(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Another dtype of as many bytes, whatever the strides."""
    return torch.empty(0, dtype=dtype).set_(bits.untyped_storage(), bits.storage_offset(), bits.shape, bits.stride())


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, wrappers.FP4Tensor):
        return [value.data, value.scale]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def contents(arguments: dict[str, Any]) -> list[bytes]:
    """Return the bytes of all memory that the arguments reach."""
    found = [t for t in tensors_in(list(arguments.values())) if t.layout == torch.strided and t.device.type == "cpu"]
    return [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes() for t in found]


# A shape, a count or a bound of some, and where a message shows a value.
SIZES = r"\((\d+,.*)?\)|\d+ (tokens|rows|columns|entries|elements)|head_dim \d+|\[0, \d+[)\]]"
BEFORE = re.compile(
    r": |\(|\b(a|an|dtype|layout|device|shape|is|kv|and V|with query|out|paged|the query's,|that of \w+,|"
    r"of the scores,) "
)
WANTED = "a torch.Tensor", "an FP4Tensor", "a tuple", "None:"  # what else may be refused by its type alone
KERNELS_NAMES = {torch.float16: "fp16", E4M3: "e4m3"}


def shows(said: str, value: Any) -> bool:
    """Whether a message shows a value where values stand; of a tensor, what is wrong with it."""
    if value is None:
        return re.search(r"(: |\()(None|NoneType), (must|required)", said) is not None
    if isinstance(value, int) and value == FAR:
        return str(FAR) in said
    words = {f"{type(value).__name__}, must be {wanted}" for wanted in WANTED}
    if isinstance(value, (list, tuple)):
        words |= {f"{type(value).__name__} of {len(value)},"} | {type(v).__name__ for v in value}
        words |= {"None, required"} if any(v is None for v in value) else set()
    for t in tensors_in(value):
        words |= {str(t.dtype), str(t.layout), str(t.device), str(tuple(t.shape))}
        words |= {KERNELS_NAMES[t.dtype]} if t.dtype in KERNELS_NAMES else set()
        if t.layout == torch.strided:
            words |= set() if t.is_contiguous() else {"stride", "strides"}  # of the logical order
            words |= {str(t.item())} if t.numel() == 1 and t.device.type == "cpu" else set()
    places = [found.end() for found in BEFORE.finditer(said)]
    if any(stands_at(said, place, word) for place in places for word in words):
        return True
    if any(t.numel() > 64 for t in tensors_in(value)):  # no message prints these
        return False
    printed = {repr(value)} | ({str(tuple(value))} if isinstance(value, (list, tuple)) else set())  # takes long
    return any(stands_at(said, place, word) for place in places for word in printed)


def stands_at(said: str, place: int, word: str) -> bool:
    """Return whether a word of a message begins at a place and ends there as a word."""
    return said.startswith(word, place) and re.match(r"\w", said[place + len(word) :][:1]) is None


class Kernels(FakeMachine):
    """Kernels in torch, which check what compiled code does."""

    def __init__(self) -> None:
        super().__init__(lambda op, spec: emulated.emulate(op, spec, []))


HOSTS = ("cpu", "new", "known")


def machine_of(host: str, good_call: Callable[[], Any]) -> machine.HostMachine:
    """The CPU, a new machine with kernels, or one that has the plan of the good call."""
    here = machine.HostMachine() if host == "cpu" else Kernels()
    if host == "known":
        with machine.override(here):
            good_call()
    return here


def outcome(here: machine.HostMachine, call: Any, arguments: dict[str, Any], fault: Callable[[Any], str | None]) -> str:
    """Return the fault of a refusal, "accepted" if the call was served, or "" if the refusal is right. fault: returns
    the fault of an error."""
    before = contents(arguments)
    try:
        with machine.override(here):
            call(arguments)
    except BaseException as error:  # noqa: BLE001
        if not isinstance(error, REFUSALS):
            wrong: str | None = f"raises {type(error).__name__}"
        elif error.__cause__ is not None or error.__context__ is not None and not error.__suppress_context__:
            wrong = "comes with a chain"
        else:
            wrong = fault(error)
        if wrong is not None:
            return f"{wrong}: {type(error).__name__}: {str(error)[:170]}"
        return "writes before it refuses" if contents(arguments) != before else ""
    return "accepted"


def faults_of(
    hosts: Sequence[str], good_call: Callable[[], Any], values: dict[str, Any], allowed: Callable[[str], set[str]],
    attempt: Callable[[machine.HostMachine, str, Any], str],
) -> list[str]:  # fmt: skip
    """Try every bad value on every host. allowed: host -> the values that it accepts. attempt: `outcome` of a value."""
    found = []
    for host in hosts:
        here, accepted = machine_of(host, good_call), allowed(host)
        for bad, value in values.items():
            if host == "new":
                here.plans.clear()
            wrong = attempt(here, bad, value)
            if wrong != ("accepted" if bad in accepted else ""):
                found.append(f"{host}: {bad}: {wrong or 'refused'}")
    return found


VALUES = {"nan tensor", "inf tensor"}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
