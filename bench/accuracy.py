"""Measure the error of attention against fp64, for each type and length, beside peers on the same values, and count the
calls that repeat their bits.

An error is relative to the RMS of the right output. The right output is fp64 attention of the values that the cache
stores, so the error is the kernel's; `format_error` is the difference that storing makes: between fp64 attention of
the stored values and of the same values in bf16. The provider "rounded" is the right output in the output's dtype: no
kernel has a smaller error.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from wrappers.host import machine

from . import decode, harness, providers
from .cases import precision
from .cases.attention import AttentionCase
from .cases.choice import by_function
from .cases.precision import BF16, CaseDtypes
from .results import AccuracyRow, DeterminismRow, Environment
from .workload import Inputs, shape_of, tokens, unpaged

TYPES = {  # Q, K and V
    "bf16": BF16,
    "fp16": CaseDtypes("fp16", "", "fp16"),
    "kve4m3": CaseDtypes("bf16", "fp8"),
    "kve5m2": CaseDtypes("bf16", "e5m2"),
    "kvnvfp4": CaseDtypes("bf16", "nvfp4"),
    "qe4m3": CaseDtypes("fp8", "fp8"),
    "qe4m3kvnvfp4": CaseDtypes("fp8", "nvfp4"),
}
HALVES = ("bf16", "fp16")  # types that peers have on Hopper
LENGTHS = 1 << 10, 1 << 15, 1 << 18
SHARP = 4.0  # standard deviation of the logits of "sharp" data; 1 of "normal" data
HEADS, DIM, PAGE = (8, 2), 128, 64
# Query tokens of each request; they are the last of its keys. "prefill": by the kernels of whole prompts, in which one
# CTA reads all keys of a tile; "extend": by shapes, so that CTAs share the keys if they are many.
FORMS = {"prefill": (64,), "extend": (64,), "decode": (1,) * 4}
LOGITS = 1 << 27  # fp64 logits at a time: 1 GiB
REPEATS = 20
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class AccuracyCase:
    """A case: its form, types, data and keys."""

    form: str
    types: str
    data: str
    keys: int

    @property
    def name(self) -> str:
        return f"accuracy-{self.form}-{self.types}-{self.data}-s{self.keys}"

    def attention(self, types: CaseDtypes | None = None) -> AttentionCase:
        """Return the case for `bench.cases`, in other types if they are given: of the same random values."""
        rows = FORMS[self.form]
        scale = DIM**-0.5 * (SHARP if self.data == "sharp" else 1.0)
        case = AttentionCase(self.name, "bf16", rows, (self.keys,) * len(rows), *HEADS, DIM, DIM, PAGE, scale=scale)
        return precision.typed(replace(case, lse=False), types or TYPES[self.types])


def all_cases() -> Iterator[AccuracyCase]:
    for form in FORMS:
        for types in TYPES:
            for keys in LENGTHS:
                yield AccuracyCase(form, types, "normal", keys)
            yield AccuracyCase(form, types, "sharp", LENGTHS[1])


CASES = {case.name: case for case in all_cases()}


# ---- the right output


def attention64(inputs: Inputs, causal: bool = True) -> torch.Tensor:
    """Return fp64 attention (tokens, heads, head_dim) of the stored values of a call."""
    shape, scale, found = shape_of(inputs), float(inputs["bmm1_scale"]), []
    for b, q in enumerate(inputs["query"].float().double().split(shape.q_lens)):
        n, m = shape.kv_lens[b], shape.q_lens[b]
        k, v = (t.float().double().transpose(0, 1)[:, None] for t in tokens(inputs, b, n))  # (Hkv, 1, n, D)
        grouped = q.unflatten(1, (shape.heads_kv, -1)).permute(1, 2, 0, 3)  # (Hkv, group, m, D)
        rows, at = max(1, LOGITS // (n * shape.heads_q)), torch.arange(n, device=q.device)
        parts = []
        for first in range(0, m, rows):
            logits = scale * (grouped[:, :, first : first + rows] @ k.transpose(-1, -2))
            if causal:
                own = n - m + first + torch.arange(logits.shape[2], device=q.device)
                logits.masked_fill_(at > own[:, None], float("-inf"))
            parts.append(logits.softmax(-1) @ v)
        found.append(torch.cat(parts, 2).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(found) * float(inputs["bmm2_scale"])


def relative(error: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Return the largest error and the RMS error, in units of the right output's RMS."""
    unit = right.square().mean().sqrt()
    return float(error.abs().max() / unit), float(error.square().mean().sqrt() / unit)


def digest(out: torch.Tensor) -> str:
    """Return a hash of an output's bits."""
    return hashlib.sha256(out.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


# ---- providers


def ours(case: AccuracyCase, inputs: Inputs) -> Run:
    if case.form == "decode":
        return decode.ours(inputs)
    ((run, _),) = providers.ours(inputs).values()
    if case.form == "extend":
        return run
    own = machine.HostMachine()  # with plans of this choice of kernels

    def whole() -> torch.Tensor:
        with machine.override(own), by_function():
            return run()

    return whole


def flash_attn_4(case: AccuracyCase, inputs: Inputs) -> Run:
    ((run, rows),) = providers.flash_attn_4(inputs).values()
    return lambda: rows(run())


def cudnn(case: AccuracyCase, inputs: Inputs) -> Run:
    """Return the call of torch SDPA with the cuDNN backend. Its rows see all keys, because its causal mask begins at
    the first key."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    shape, scale = shape_of(inputs), float(inputs["bmm1_scale"])
    q, k, v = (t.unflatten(0, (shape.batch, -1)).transpose(1, 2) for t in (inputs["query"], *unpaged(inputs)))

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    return run


PROVIDERS: dict[str, Callable[[AccuracyCase, Inputs], Run]] = {
    "ours": ours,
    "flash-attn-4": flash_attn_4,
    "cudnn": cudnn,
}


# ---- measurements


def row_of(
    env: Environment, case: str, provider: str, out: torch.Tensor, errors: tuple[float, float], stored: float | None
) -> AccuracyRow:
    figures = {"max_error": errors[0], "rms_error": errors[1], "format_error": stored, "digest": digest(out)}
    return env.make(AccuracyRow, case=case, provider=provider, **figures)


def counted(env: Environment, case: str, provider: str, kind: str, equal: int, count: int) -> DeterminismRow:
    figures = {"equal": float(equal), "count": float(count)}
    return env.make(DeterminismRow, case=case, provider=provider, kind=kind, **figures)


def measure(case: AccuracyCase, setup: harness.Setup, env: Environment) -> tuple[list[AccuracyRow], dict[str, Run]]:
    """Return the rows of a case, and the calls that made them."""
    inputs = precision.make_inputs(case.attention(), setup.device)
    masked = attention64(inputs)
    whole = attention64(inputs, causal=False) if "cudnn" in setup.providers and case.types in HALVES else masked
    stored = None
    if case.types not in HALVES:
        unstored = attention64(precision.make_inputs(case.attention(BF16), setup.device))
        stored = relative(masked - unstored, unstored)[1]
    rows, runs = [], dict[str, Run]()

    def add(provider: str, out: torch.Tensor, right: torch.Tensor) -> None:
        rows.append(row_of(env, case.name, provider, out, relative(out.double() - right, right), stored))

    add("rounded", masked.to(inputs["out"].dtype), masked)
    for name, make in PROVIDERS.items():
        if name not in setup.providers or name != "ours" and (case.types not in HALVES or case.form == "extend"):
            continue
        run = harness.ready(name, partial(make, case, inputs), finite)
        if run is not None:
            runs[name] = run
            add(name, run(), whole if name == "cudnn" else masked)
    return rows, runs


def finite(out: torch.Tensor) -> str | None:
    return None if bool(out.isfinite().all()) else "not finite"


def repeated(run: Run, count: int) -> int:
    """Return how many of `count` further calls have the bits of a first one."""
    want = digest(run())
    return sum(digest(run()) == want for _ in range(count))


def in_batches(case: AccuracyCase, device: str, invariant: bool) -> tuple[int, int]:
    """Return how many requests of a batch of different lengths have the same bits alone, and the number of requests."""
    rows = FORMS[case.form][:1] * 6
    lens = tuple(max(rows[0], case.keys // part) for part in (1, 2, 3, 5, 9, 40))
    batch = replace(case.attention(), q_lens=rows, kv_lens=lens)
    inputs = precision.make_inputs(batch, device)
    make = decode.batch_invariant if invariant else decode.ours
    call = make if case.form == "decode" else partial(ours, case)
    together = [digest(t) for t in call(inputs)().split(rows)]
    alone = [digest(call(only(inputs, b, rows[0]))()) for b in range(len(rows))]
    return sum(a == b for a, b in zip(together, alone)), len(rows)


def only(inputs: Inputs, b: int, rows: int) -> Inputs:
    """Return the call of one request of a batch, in which each has `rows` query tokens."""
    length = int(inputs["seq_lens"][b])
    own: Inputs = {name: inputs[name][b * rows : (b + 1) * rows].clone() for name in ("query", "out")}
    starts = {"cum_seq_lens_q": rows, "cum_seq_lens_kv": length}
    for name, end in starts.items():
        own[name] = torch.tensor([0, end], dtype=torch.int32, device=inputs[name].device)
    own["block_tables"] = inputs["block_tables"][b : b + 1, : -(-length // PAGE)].contiguous()
    own["seq_lens"] = inputs["seq_lens"][b : b + 1].clone()
    return inputs | own | {"batch_size": 1, "max_kv_len": length}


def determinism(
    case: AccuracyCase, runs: dict[str, Run], setup: harness.Setup, env: Environment
) -> list[DeterminismRow]:
    """Return the rows of a case: calls that repeat their bits, in a row, alone and in a batch, and on another GPU."""
    found = []

    def add(provider: str, kind: str, equal: int, count: int) -> None:
        found.append(counted(env, case.name, provider, kind, equal, count))

    for name, run in runs.items():
        add(name, "runs", repeated(run, REPEATS), REPEATS)
    if "ours" not in runs:
        return found
    add("ours", "batch", *in_batches(case, setup.device, False))
    if case.form == "decode":
        add("ours", "batch, batch_invariant", *in_batches(case, setup.device, True))
    if setup.device.startswith("cuda") and torch.cuda.device_count() > 1:
        with torch.cuda.device(1):
            there = ours(case, precision.make_inputs(case.attention(), "cuda:1"))
            add("ours", "devices", int(digest(there()) == digest(runs["ours"]())), 1)
    return found
