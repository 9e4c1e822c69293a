"""Calls of the context function, and a machine with kernels that compute in torch from their arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from bench.cases import attention as cases
from cute_kernels.attention import args, geometry
from cute_kernels.attention.sm90 import Sm90TileConfig
from cute_kernels.attention.sm100 import Sm100TileConfig
from cute_kernels.attention.spec import LSE_MAX, PACK_GQA_MAX_Q, tokens_of_union
from tests.support import emulated_indexer, emulated_latent, emulated_merges, emulated_topk, emulated_writes
from tests.support.fake_machine import FakeMachine, promised, promised_apart
from wrappers import FP4Tensor, fp4, reference
from wrappers.attention.call import SEPARATE, AttentionCall, listed_sequences, new_sequences, slot_sequences
from wrappers.host import machine
from wrappers.reference import paged

E4M3 = torch.float8_e4m3fn
SMS = 132
PLAIN = cases.EDGE["plain"]


def inputs_of(case=PLAIN, **changes):
    return cases.make_inputs(case) | changes


def check(inputs, result, tolerance=1e-2):
    want_o, want_lse = cases.reference_of(inputs)
    o, lse = result if inputs["return_lse"] else (result, None)
    torch.testing.assert_close(o.float(), want_o, rtol=tolerance, atol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


def requests_of(spec, a):
    if spec.kv.source == "slots":
        return slot_sequences(a.page_table[:, 0], a.kv_lens)
    if not len(a.kv_starts):
        return new_sequences(a.page_table, a.kv_lens, a.cu_seqlens_q, SEPARATE)
    form = "csr" if len(a.kv_lens) else "ragged"
    return listed_sequences(a.page_table, a.kv_lens, a.cu_seqlens_q, a.kv_starts, form)


def emulate(op, spec, launches):
    """Return a kernel of `spec` for any device: it checks what its callers promise, then runs the reference. The
    arguments of each launch, by name, are appended to `launches`."""
    if op.startswith("topk"):
        return emulated_topk.emulate(op, spec, launches)
    if op.startswith("cache_write"):
        return emulated_writes.emulate(spec, launches)
    if op.startswith("merge_states"):
        return emulated_merges.emulate(spec, launches)
    if op.startswith("latent"):
        return emulated_latent.emulate(spec, launches)
    if op.startswith("indexer"):
        return emulated_indexer.emulate(spec, launches)
    names = args.fields(spec)

    def kernel(*flat):
        a = SimpleNamespace(**dict(zip(names, flat, strict=True)))
        check_promises(spec, a)
        check_schedule(spec, a)
        launches.append(a)
        factors = {
            name: scales_of(spec, getattr(a, name)) if name in names else None for name in ("k_scales", "v_scales")
        }
        window, chunk = getattr(a, "window_left", 1 << 30), getattr(a, "chunk", 1 << 30)
        drafts, kind = getattr(a, "tree_mask", ()), spec.mask.causal
        problem = AttentionCall(
            "", a.q, a.k, a.v, requests_of(spec, a), 1 if spec.kv.source == "slots" else 0,
            scale=a.softmax_scale_log2 / reference.LOG2E,
            scale_tensor=a.softmax_scale_ptr if len(a.softmax_scale_ptr) else None, out_scale=a.out_scale,
            out_scale_tensor=a.out_scale_ptr if len(a.out_scale_ptr) else None,
            causal=bool(a.causal) if kind == "value" else kind == "always" or spec.mask.custom == "ranges",
            window_left=window if window < 1 << 30 else -1, chunk=chunk % (1 << 30),
            soft_cap=getattr(a, "soft_cap", 0.0), sinks=a.sink if len(a.sink) else None,
            drafts=drafts if len(drafts) else None, custom_mask=getattr(a, "custom_mask", None),
            mask_starts=getattr(a, "mask_starts", None), ranges=getattr(a, "ranges", None),
            range_left=getattr(a, "range_left", -1), prefix_lens=getattr(a, "prefix_lens", None),
            alibi_slopes=getattr(a, "alibi_slopes", None),
            interleaved=bool(getattr(a, "v_scales_interleaved", 0)), shares_v=spec.kv.shares_v,
            lse_form=getattr(a, "lse_form", 0), q_rope=getattr(a, "q_rope", None),
            k_rope=getattr(a, "k_rope", None), extra_k=getattr(a, "extra_k", None),
            extra_k_rope=getattr(a, "extra_k_rope", None), extra_slots=getattr(a, "extra_slots", None),
            extra_lens=getattr(a, "extra_lens", None), record=spec.kv.record, extra_record=spec.kv.extra_record,
            **factors,
        )  # fmt: skip
        o, lse = reference.paged_attention(problem)
        fp8, packed = getattr(a, "o_fp8", ()), getattr(a, "o_fp4", ())
        if len(packed):
            columns = fp4.round_up(packed[0].numel() * 2 // fp4.BLOCK, fp4.SCALE_TILE[1])
            scale = a.o_sf.view(E4M3).view(-1, columns)
            reference.store(o, FP4Tensor(packed, scale, a.o_sf_start), a.o_sf_scale)
        else:
            reference.store(o, fp8.view(E4M3) if len(fp8) else a.o)
        if len(a.lse):
            a.lse.copy_(reference.formed_lse(problem, lse))

    return kernel


def scales_of(spec, factors):
    """Return scale factors, which a launch takes as bytes, as a call has them."""
    return factors.view(torch.float32).squeeze(-1) if spec.kv.layout.of_rows else factors.view(E4M3)


def check_promises(spec, a):
    """Check what callers promise, which compiled code does not notice."""
    promised_apart(vars(a), "o", "o_fp8", "o_fp4", "lse")
    tokens, heads, _ = a.q.shape
    promised(a.k.shape[1:3] == a.v.shape[1:3] and (len(a.k) == 0) == (len(a.v) == 0) and heads % a.k.shape[1] == 0)
    if hasattr(a, "k_scales"):
        promised(a.k_scales.shape[:3] == a.k.shape[:3] and a.v_scales.shape[:3] == a.v.shape[:3])
    if hasattr(a, "q_rope"):
        promised(a.q_rope.shape[:2] == a.q.shape[:2])
        promised(not hasattr(a, "k_rope") or a.k_rope.shape[:3] == a.k.shape[:3])
    for name in ("o", "o_fp8", "o_fp4", "lse", "tree_mask"):
        t, columns = getattr(a, name, a.o), heads
        if name == "lse" and getattr(a, "lse_form", 0) & LSE_MAX and len(t):
            columns *= 2
        promised(len(t) in (0, tokens) and (name == "tree_mask" or t.shape[1] == columns), name)
    promised(sum(len(getattr(a, name, ())) > 0 for name in ("o", "o_fp8", "o_fp4")) == 1 or tokens == 0)
    if len(getattr(a, "o_fp4", ())):
        columns = fp4.round_up(heads * spec.head_dim_vo // fp4.BLOCK, fp4.SCALE_TILE[1])
        rows, left = divmod(len(a.o_sf), columns)
        promised(rows % 128 == left == 0 <= a.o_sf_start <= rows - tokens and a.o_sf_scale > 0)
    batch = len(a.cu_seqlens_q) - 1
    if spec.kv.union:
        batch = check_unions(a, batch)
    if spec.kv.source == "slots":
        promised(len(a.kv_lens) and batch % len(a.kv_lens) == 0 == len(a.kv_starts))
        promised(not spec.kv.extra or len(a.extra_lens) == len(a.kv_lens) and len(a.extra_slots) == batch)
    else:
        entries = len(a.kv_lens) in (batch, 0) and len(a.kv_starts) in (batch + 1, 0)
        promised(entries and len(a.kv_lens) + len(a.kv_starts))
    promised(a.page_table.shape[:2] == (1 if len(a.kv_starts) else batch, 2))
    from cute_kernels.attention.sm90.precision import scales_rows  # imports the DSL

    per_head = isinstance(spec.tile, Sm100TileConfig) or isinstance(spec.tile, Sm90TileConfig) and scales_rows(spec)
    scales = (0, 1, heads) if per_head else (0, 1)
    promised(len(a.sink) in (0, heads) and len(a.softmax_scale_ptr) in scales and len(a.out_scale_ptr) in scales)
    promised(not hasattr(a, "mask_starts") or len(a.mask_starts) == batch + 1)
    promised(len(getattr(a, "alibi_slopes", a.q[0])) == heads)
    promised(a.softmax_scale_log2 > 0 and tokens and heads and batch)


def check_unions(a, groups):
    """Check the tokens that share keys, and the memory of their unions. Return the number of tokens."""
    tokens, width = len(a.page_table), a.page_table.shape[2]
    promised(a.cu_seqlens_q.tolist() == [n * a.union_size for n in range(groups + 1)] and tokens == len(a.q))
    promised(groups == -(-tokens // a.union_size) and a.union_size == tokens_of_union(a.q.shape[1]) > 1)
    promised(a.union_slots.shape == a.union_tokens.shape and len(a.union_slots) == len(a.union_lens) == groups)
    promised(a.union_slots.shape[1] >= a.union_size * width)
    return tokens


def check_schedule(spec, a):
    """Check that no other launch uses the counters, and that the scratch holds the splits that the kernel writes."""
    q_lens, group = a.cu_seqlens_q.diff().tolist(), a.q.shape[1] // a.k.shape[1]
    pack_factor = [group if spec.schedule == "stream_k" or n <= PACK_GQA_MAX_Q else 1 for n in q_lens]
    rows = [n * each for n, each in zip(q_lens, pack_factor)]
    tiles = sum(-(-n // spec.tile.m) * (a.q.shape[1] // each) for n, each in zip(rows, pack_factor))
    most = SMS * spec.tile.ctas_per_sm
    promised(1 <= a.grid <= most and (a.grid >= tiles or a.grid == most))
    promised(not a.counters.any() and -1 <= a.counter_base < max(1, len(a.counters)))
    promised(a.enable_pdl in (0, 1) and 0 <= getattr(a, "window_left", 0) <= 1 << 30)
    if spec.schedule == "tiles":
        return
    slots = 2 * a.grid * spec.tile.cluster
    counters = slots // 2
    if a.blocks_per_split:
        blocks = [
            -(-n // spec.tile.n) for n, *_ in paged.keys_of(SimpleNamespace(k=a.k, requests=requests_of(spec, a)))
        ]
        cut = [-(-n // geometry.tile_m(spec, n)) for n in rows]  # as the kernel splits them
        promised(not spec.kv.shares_v or max(blocks, default=0) <= a.blocks_per_split)  # tiles are whole
        slots = sum(m * max(1, -(-n // a.blocks_per_split)) for m, n in zip(cut, blocks)) * a.k.shape[1]
        slots *= not spec.kv.shares_v
        slots *= spec.tile.cluster
        counters = slots
    counters *= spec.tile.counters_per_split
    promised(a.counter_base >= 0 and len(a.counters) - a.counter_base >= counters)
    promised(len(a.o_partial) >= slots and a.o_partial.is_contiguous())
    promised(a.o_partial.shape[1:] == (spec.tile.m, spec.head_dim_vo + 4))


@contextmanager
def emulation(arch: str = "sm_90a") -> Iterator[Any]:
    """Yield a machine with kernels that compute in torch; it lists `launches` and kernel `specs` of the calls in the
    block."""
    fake: Any = FakeMachine(lambda op, spec: fake.specs.append(spec) or emulate(op, spec, fake.launches), arch)
    fake.launches, fake.specs = [], []
    with machine.override(fake):
        yield fake
