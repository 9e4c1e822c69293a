"""Measure the prefill family against the context function.

One batch runs through the context function and through the wrapper classes, in pages of 64 tokens, in pages of one
token and ragged. Decode also runs with pages of one token. Each modifier (RoPE, ALiBi) and each kind of bit mask has a
case of its own instead, in which "own-bf16" is the same class without it.

The provider of a row is "ours" (the function with pages of 64) or "ours-FORM"; the csv's ratio is its time over that of
"ours".
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import wrappers

from . import decode
from .cases import attention as cases
from .cases import precision
from .cases.attention import AttentionCase
from .harness import Ceilings, Measurement, Setup, calls_of, host_times
from .prefill import HOST_CASE, case_of
from .timing import Call, exactly, interleave
from .workload import Inputs, check, csr, pages, shape_of, unpaged

PREFILL = replace(case_of("family-bf16-causal-b2-s8192-h32x8-d128", (8192,) * 2, True), spare_pages=8)
DECODE = replace(cases.decoding(64, 8192, (64, 8), 128, 64), name="family-decode-bf16-b64-s8192-h64x8-d128")
HOST = "host-family"
DRAFTS = 64  # tokens of a tree, the last ones of a request
SPAN = 1024  # tokens that see each other, from the middle of a request on, beside the causal mask
MODIFIED = {  # case -> (provider of FORMS, what it changes in PREFILL)
    f"prefill-{kind}-b2-s8192-h32x8-d128-p64": (form, change)
    for kind, form, change in (
        ("mask-causal", "ours-mask", {}), ("mask-tree", "ours-mask-tree", {}),
        ("mask-drafts", "ours-mask-tree", {"q_lens": (DRAFTS,) * 2}),
        ("mask-random", "ours-mask-random", {"causal": False}), ("rope-causal", "ours-rope", {}),
        ("alibi-causal", "ours-alibi", {}), ("ranges-none", "ours-ranges-none", {}),
        ("ranges-span", "ours-ranges-span", {}),
    )
}  # fmt: skip
OWN = (replace(PREFILL, name=name, **change) for name, (_, change) in MODIFIED.items())  # type: ignore[arg-type]
CASES = {case.name: case for case in (PREFILL, DECODE, *OWN)}
OWN_CASE = {form for form, _ in MODIFIED.values()}  # forms that the case of the family leaves to these
Run = Callable[[], torch.Tensor]
THETA = 1e4  # RoPE's theta: the default of the classes


def mask_of(kind: str, shape: Any, device: torch.device) -> torch.Tensor:
    """Return the mask of each request, bool (query rows, keys). kind: "causal"; "tree": the last `DRAFTS` tokens are
    the nodes of a binary tree, and see their ancestors alone among these; "random": each bit is set with 1/2; "span":
    causal, but the tokens of a `SPAN` see each other."""
    (rows,), (keys,) = set(shape.q_lens), set(shape.kv_lens)
    if kind == "random":
        return torch.rand(rows, keys, device=device, generator=torch.Generator(device).manual_seed(0)) < 0.5
    mask = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    if kind == "tree":
        count = min(DRAFTS, rows)
        tree = torch.eye(count, dtype=torch.bool)
        for node in range(1, count):
            tree[node] |= tree[(node - 1) // 2]
        mask[-count:, -count:] = tree.to(device)
    if kind == "span":
        span = slice(rows // 2, rows // 2 + SPAN)
        mask[span, span] = True
    return mask


def paged(
    inputs: Inputs, kind: Any = None, scales: tuple[torch.Tensor, ...] = (), run: dict[str, Any] | None = None,
    **given: Any,
) -> Run:  # fmt: skip
    """Return the call of a paged class, ours or a peer's, on the pages of the inputs. The plan is outside the timed
    call.

    scales: those of Q, K and V, as flashinfer's `run` takes them. run: its keywords.
    """
    shape, query, cache = shape_of(inputs), inputs["query"], pages(inputs)
    space = torch.empty(256 << 20, dtype=torch.uint8, device=query.device)
    wrapper: Any = (kind or wrappers.BatchPrefillWithPagedKVCacheWrapper)(space, "HND")
    heads = shape.heads_q, shape.heads_kv, shape.dim_qk, cache[0].shape[2]
    wrapper.plan(*csr(inputs), *heads, **{"causal": shape.causal} | given, **_types(inputs))
    out = inputs["out"]
    return lambda: wrapper.run(query, cache, *scales, out=out, **run or {})


def ragged(inputs: Inputs, kind: Any = None, **given: Any) -> Run:
    """Return the call of a ragged class on contiguous K and V."""
    shape, query = shape_of(inputs), inputs["query"]
    k, v = unpaged(inputs)
    space = torch.empty(256 << 20, dtype=torch.uint8, device=query.device)
    wrapper: Any = (kind or wrappers.BatchPrefillWithRaggedKVCacheWrapper)(space, "NHD")
    starts = csr(inputs)[0]
    heads = shape.heads_q, shape.heads_kv, shape.dim_qk
    wrapper.plan(starts, starts, *heads, **{"causal": shape.causal} | given, **_types(inputs))
    out = inputs["out"]
    return lambda: wrapper.run(query, k, v, out=out)


def _types(inputs: Inputs) -> dict[str, Any]:
    dtype = inputs["query"].dtype
    return {"sm_scale": float(inputs["bmm1_scale"]), "q_data_type": dtype, "kv_data_type": dtype}


def flashinfer(form: str) -> Any:
    """Return flashinfer's class for a form ("Paged", "Ragged"), with its Hopper kernels (fa3)."""
    import flashinfer as peer

    return partial(getattr(peer, f"BatchPrefillWith{form}KVCacheWrapper"), backend="fa3")


def scaled(inputs: Inputs, kind: Any = None) -> Run:
    """Plan a paged class, ours or a peer's, on e4m3 inputs. Return its call with one scale per head; it writes to its
    own output."""
    shape, device = shape_of(inputs), inputs["query"].device
    scales = tuple(torch.ones(n, device=device) for n in (shape.heads_q, shape.heads_kv, shape.heads_kv))
    inputs = inputs | {"out": torch.full_like(inputs["out"], math.nan)}
    return paged(inputs, kind, scales, o_data_type=inputs["out"].dtype)


def context(inputs: Inputs) -> Run:
    return lambda: wrappers.trtllm_batch_context_with_kv_cache(**inputs)


def masked(inputs: Inputs, kind: str = "causal") -> Run:
    shape = shape_of(inputs)
    bits = wrappers.packbits(mask_of(kind, shape, inputs["query"].device).flatten(), "little")
    return paged(inputs, packed_custom_mask=bits.repeat(shape.batch), causal=False)


def ranged(inputs: Inputs, span: int = 0) -> Run:
    """Return the call with ranges of keys: of the `span` tokens from the middle of each request on."""
    shape, query = shape_of(inputs), inputs["query"]
    own = torch.full((shape.length, 2), -1, dtype=torch.int32, device=query.device)
    first = shape.length // 2
    own[first : first + span] = torch.tensor([first, first + span - 1], dtype=torch.int32)
    return paged(inputs, run={"bidirectional_ranges": own.repeat(shape.batch, 1)})


FORMS: dict[str, tuple[int, Callable[[Inputs], Run]]] = {  # provider -> page size of its inputs, maker of its call
    "ours": (64, context),
    "ours-paged": (64, paged),
    "ours-paged-p1": (1, paged),
    "ours-ragged": (64, ragged),
    "ours-mask": (64, masked),
    "ours-mask-tree": (64, partial(masked, kind="tree")),
    "ours-mask-random": (64, partial(masked, kind="random")),
    "ours-ranges-none": (64, ranged),
    "ours-ranges-span": (64, partial(ranged, span=SPAN)),
    "ours-rope": (64, partial(paged, pos_encoding_mode="ROPE_LLAMA")),
    "ours-alibi": (64, partial(paged, pos_encoding_mode="ALIBI")),
    "flashinfer-paged": (64, lambda inputs: paged(inputs, flashinfer("Paged"))),
    "flashinfer-paged-p1": (1, lambda inputs: paged(inputs, flashinfer("Paged"))),
    "flashinfer-ragged": (64, lambda inputs: ragged(inputs, flashinfer("Ragged"))),
}


def rotate(t: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Apply rotate-half RoPE to t (..., D) in fp32 and round to its dtype. `position` broadcasts with t[..., 0]."""
    half = t.shape[-1] // 2
    angle = position[..., None] * THETA ** (-torch.arange(half, dtype=torch.float64, device=t.device) / half)
    turned = torch.complex(*t.float().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    return torch.cat([turned.real, turned.imag], -1).to(t.dtype)


def rotated(inputs: Inputs) -> Inputs:
    """Return the same call with RoPE already applied to Q and K."""
    shape, (k, v), starts = shape_of(inputs), pages(inputs), csr(inputs)
    row = torch.arange(shape.length, device=k.device)
    k = k.clone()
    for own in starts[2].view(shape.batch, -1).long():
        k[own] = rotate(k[own], torch.arange(own.numel() * k.shape[2], device=k.device).view(-1, 1, k.shape[2]))
    query = rotate(inputs["query"], row.repeat(shape.batch)[:, None])
    return inputs | {"query": query, "kv_cache": (k, v), "kv_layout": "HND"}


def slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Return the ALiBi slopes. The number of heads must be a power of two."""
    assert heads & (heads - 1) == 0
    return 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)


def checked(provider: str, inputs: Inputs, out: torch.Tensor) -> str | None:
    if provider.endswith("-rope"):
        return check(rotated(inputs), out)
    bias = slopes(out.shape[1], out.device) if provider.endswith("-alibi") else None
    kind = provider.rpartition("-")[2]
    mask = mask_of(kind, shape_of(inputs), out.device) if kind in ("tree", "random", "span") else None
    return check(inputs, out, slopes=bias, mask=mask)


def collect(case: AttentionCase, setup: Setup, forms: Collection[str] | None = None) -> dict[str, Call]:
    """Return the calls of the forms (None: all) of the chosen providers that pass the check."""
    calls: dict[str, Call] = {}
    inputs = {page: cases.make_inputs(replace(case, page_size=page), setup.device) for page in (64, 1)}
    for name, (page, make) in ((name, FORMS[name]) for name in forms or FORMS):
        if name.partition("-")[0] in setup.providers:
            inputs[page]["out"].fill_(math.nan)  # remove the previous form's result
            calls |= calls_of(name, partial(make, inputs[page]), partial(checked, name, inputs[page]))
    return calls


def measure(case: AttentionCase, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure the forms of a case, interleaved."""
    print(case.name, flush=True)
    if case.name.startswith("family-decode"):
        return measure_decode(case, top, setup)
    if case.name in MODIFIED:
        names = {MODIFIED[case.name][0]: "ours", "ours-paged": "own-bf16"}
        calls = {names[form]: call for form, call in collect(case, setup, names).items()}
    else:
        calls = collect(case, setup, [name for name in FORMS if name not in OWN_CASE])
    if not calls:
        return []
    times = interleave(calls, setup.clock, 1, setup.rounds)
    shape = shape_of(cases.make_inputs(case, setup.device))
    found = [Measurement(case.name, p, t, shape.flops / t.median / 1e6) for p, t in times.items()]
    floor = shape.flops / top.tflops / 1e6
    return [*found, Measurement(case.name, "floor", exactly(floor), top.tflops)]


def measure_decode(case: AttentionCase, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure the decode function with pages of the case's size and with pages of one token."""
    calls: dict[str, Call] = {}
    for suffix, page in (("", case.page_size), ("-p1", 1)):
        inputs = cases.make_inputs(replace(case, page_size=page), setup.device)
        calls |= {name + suffix: call for name, call in decode.collect([inputs], ("ours",)).items()}
    times, size = interleave(calls, setup.clock, 1, setup.rounds), decode.kv_bytes(case)
    found = [Measurement(case.name, p, t, gbps=size / t.median / 1e3) for p, t in times.items()]
    floor = size / top.gbps / 1e3
    return [*found, Measurement(case.name, "floor", exactly(floor), gbps=top.gbps)]


def host(setup: Setup) -> list[Measurement]:
    """Measure host times on a tiny case: a call of each form, an e4m3 call with one scale per head, and `plan` with
    index tensors on the host."""
    print(HOST, flush=True)
    case = replace(case_of(HOST_CASE, (128,), True), name=HOST)
    calls = collect(case, setup)
    if "ours" in setup.providers:
        low = precision.make_inputs(precision.typed(case, precision.KINDS["fp8"]), setup.device)
        calls |= calls_of("ours-scales", partial(scaled, low), partial(check, low))
    if "ours-paged" in calls:
        inputs = cases.make_inputs(case, setup.device)
        shape, index = shape_of(inputs), [t.cpu() for t in csr(inputs)]
        wrapper: Any = wrappers.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=setup.device), "HND")
        heads = shape.heads_q, shape.heads_kv, shape.dim_qk, case.page_size
        calls["ours-plan"] = lambda _: wrapper.plan(*index, *heads, causal=True, **_types(inputs))
    return [Measurement(HOST, provider, t) for provider, t in host_times(calls, setup).items()]
