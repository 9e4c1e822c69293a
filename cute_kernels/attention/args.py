"""Dynamic facts of an attention launch: the only statement of the kernel's launch ABI.

The same tuple is filled with fake tensors at compile time (`fake`), with torch tensors at launch, and holds CuTe
tensors on the device. An optional tensor that is absent has size 0 in its first mode (an empty tensor), never None, so
that presence needs no compile-time variant.
"""

from typing import Any, NamedTuple


class AttentionArgs(NamedTuple):
    q: Any  # (T, Hq, Dqk)            16-bit, any token and head stride, last stride 1
    k: Any  # (pages, Hkv, P, Dqk)    as q, e4m3, or uint8 of half the width: packed e2m1; any strides, last stride 1
    v: Any  # (pages, Hkv, P, Dvo)
    o: Any  # (T, Hq, Dvo)            any token and head stride, last stride 1
    lse: Any  # (T | 0, Hq)           fp32, base 2, includes the sink; any strides
    cu_seqlens_q: Any  # (B + 1,)     int32
    kv_lens: Any  # (B,)              int32
    page_table: Any  # (B, 2, M)      int32: [:, 0] pages of K, [:, 1] pages of V; any strides (0 where K and V share)
    tickets: Any  # (N,)              int32, zero, and left so: counters of the tile scheduler, of parts done
    sink: Any  # (Hq | 0,)            fp32, natural-log units
    scale: Any  # (1 | 0,)            fp32 device factor on the logits, times scale_log2
    out_scale: Any  # (1 | 0,)        fp32 device factor on the output, times out_factor
    k_scales: Any  # (pages | 0, Hkv, P, Dqk / 16)  e4m3 as uint8, of NVFP4 caches; any strides, last 1
    v_scales: Any  # (pages | 0, Hkv, P, Dvo / 16)
    o8: Any  # (T | 0, Hq, Dvo)       e4m3 as uint8, instead of o, which is then (0, Hq, Dvo); read where spec.split
    drafts: Any  # (T | 0, W)         int32, bit t of a token's row: it sees draft t, not causal; where spec.split
    part: Any  # (slots | 0, R, Dvo + 4)  fp32 scratch of spec.split, a tile has at most R rows: O, then LSE
    scale_log2: Any  # Float32        logit scale x log2(e)
    out_factor: Any  # Float32        factor on the normalised output
    soft_cap: Any  # Float32          natural units, read where spec.soft_cap, or, 0 for none, spec.split
    skip: Any  # Float32              skip-softmax: log2 of the threshold times kv_len, -inf for none
    window_left: Any  # Int32         read only where spec.mask.window
    chunk: Any  # Int32               with spec.split, KV blocks of a part; 0: equal shares of the CTAs
    interleaved: Any  # Int32         V scales of 4 tokens are interleaved
    grid: Any  # Int32                CTAs to launch (persistent)
    ticket: Any  # Int32              counter of this launch, no other launch in flight may share it; -1: static rounds.
    #                                   spec.split: the first of as many as CTAs, or, with chunk, slots
    enable_pdl: Any  # Int32          launch with programmatic stream serialisation
