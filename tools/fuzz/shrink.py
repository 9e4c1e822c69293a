"""Make a failing call smaller while it still fails."""

import time
from collections.abc import Iterator
from dataclasses import replace

from .call import Call, plain
from .check import FAILED, Check, Verdict
from .families import FAMILIES
from .tally import general

SIZES = ("q_lens", "kv_lens", "heads_q", "heads_kv", "rows", "width", "k", "tokens", "heads", "dims", "page_size",
         "pages", "head_dim_qk", "head_dim_vo", "n", "m", "dim", "function", "dtype", "kv_dtype", "cache")  # fmt: skip


def simpler(call: Call) -> Iterator[Call]:
    """Yield calls with one part less: first the mode and the modifiers, then smaller sizes."""
    if call.mode != "eager":
        yield replace(call, mode="eager")
    if call.choice != "shape":
        yield replace(call, choice="shape")
    for name in call.extra:
        if name not in ("form",):
            yield replace(call, extra={key: value for key, value in call.extra.items() if key != name})
    module = FAMILIES[call.family].builds
    if call.family != "small":
        for name in call.case:
            if name not in SIZES:
                yield replace(call, case={key: value for key, value in call.case.items() if key != name})
    for case in module.smaller(call):
        yield replace(call, case=plain(case))


def kind_of(verdict: Verdict) -> str:
    """Return the first words of a reason: a smaller call must fail in the same way."""
    return general(verdict.reason).split(":")[0]


def shrink(call: Call, verdict: Verdict, check: Check, seconds: float = 30.0) -> tuple[Call, Verdict]:
    """Return the smallest failing call that is found in the given time, and its verdict."""
    end, seen = time.monotonic() + seconds, {str(call)}
    searching = True
    while searching:
        searching = False
        for candidate in simpler(call):
            if time.monotonic() > end:
                return call, verdict
            if str(candidate) in seen:
                continue
            seen.add(str(candidate))
            found = check(candidate)
            if found.word == FAILED and kind_of(found) == kind_of(verdict):
                call, verdict, searching = candidate, found, True
                break
    return call, verdict
