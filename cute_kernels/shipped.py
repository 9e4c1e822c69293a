"""The shipped kernels: the only list of what bundles hold. Pure data. A call that no row covers compiles its kernel.

A new row needs a reason: the calls of most models, or a measurement (docs/design.md, "Shipping is a policy"). A row
stands for all combinations of its fields. `dispatch` of each family turns rows into specs.
"""

from itertools import product
from typing import NamedTuple

from . import archs

SAME = "q"  # a cache of the query's type
HOPPER, BLACKWELL = archs.having(archs.WGMMA), archs.having(archs.TCGEN05)
SERVERS, SMALL = (*HOPPER, *BLACKWELL), archs.lacking(archs.WGMMA, archs.TCGEN05)
HALVES = ("bf16", "fp16")
USUAL = ((64, 64), (128, 128))
WIDE = ((192, 128), (256, 256))


class AttentionRow(NamedTuple):
    """Kernels of an attention op. q: types of queries. kv: types of caches. head_dims: (head_dim_qk, head_dim_vo).
    kinds: keys of `attention.dispatch.KINDS`, the requests that the kernels serve."""

    op: str
    archs: tuple[str, ...]
    q: tuple[str, ...]
    kv: tuple[str, ...]
    head_dims: tuple[tuple[int, int], ...]
    kinds: tuple[str, ...]


class ElementRow(NamedTuple):
    """Kernels of an op other than attention. dtypes: of the rows. Top-k needs no more, because all plans of a type are
    shipped. kinds: kernels that write caches are "append", "transform", "gather" or "token", see `CacheWriteSpec`;
    kernels that merge states take "states" in one tensor or a "pair" of tensors; those of latent caches are named by
    their records. caches: types of the caches that are
    written."""

    op: str
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    archs: tuple[str, ...] = archs.NAMES


class IndexerRow(NamedTuple):
    """Kernels of an indexer. shapes: (heads, head_dim). rows: query tokens of a tile. outs: types of the logits. keys:
    type of queries and keys."""

    shapes: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    outs: tuple[str, ...]
    keys: str = "e4m3"
    archs: tuple[str, ...] = HOPPER


PREFILL, PREFILL_BLACKWELL, DECODE = "attention.sm90", "attention.sm100", "attention.decode"
LATENT_ROWS = "attention.latent"
ATTENTION = (
    AttentionRow(PREFILL, HOPPER, ("bf16",), (SAME,), (*USUAL, *WIDE), ("causal", "full", "modified")),
    AttentionRow(PREFILL, HOPPER, ("fp16", "e4m3"), (SAME,), USUAL, ("causal", "full", "modified")),
    AttentionRow(
        PREFILL,
        HOPPER,
        HALVES,
        (SAME,),
        USUAL,
        (
            "gather",
            "gather modified",
            "custom mask",
            "custom mask modified",
            "ranges",
            "prefix",
            "skip",
        ),
    ),
    AttentionRow(PREFILL, HOPPER, ("bf16",), ("e4m3", "nvfp4"), USUAL, ("causal", "modified")),
    AttentionRow(PREFILL, HOPPER, HALVES, (SAME,), USUAL, ("split",)),
    AttentionRow(PREFILL, HOPPER, ("bf16",), ("e4m3", "nvfp4"), USUAL, ("split",)),
    AttentionRow(PREFILL, HOPPER, ("bf16",), ("e4m3",), USUAL, ("causal factors", "modified factors")),
    AttentionRow(
        PREFILL,
        HOPPER,
        ("bf16",),
        (SAME,),
        ((576, 512),),
        (
            *("latent", "latent full", "latent modified", "latent gather", "latent slots", "latent two caches"),
            *("latent pairs", "latent full pairs", "latent modified pairs"),
            *("latent gather e4m3", "latent gather 656", "latent slots e4m3", "latent slots 656", "latent slots 352"),
            *("latent shared slots", "latent shared slots 656", "latent shared slots e4m3"),
        ),
    ),
    AttentionRow(
        PREFILL,
        HOPPER,
        ("bf16",),
        (SAME,),
        ((512, 512),),
        (
            *("latent", "latent pairs", "latent slots", "latent two caches", "latent slots 528_fp32"),
            "latent two caches 584, 584",
            *("latent two caches 528, 288", "latent two caches 528, 528", "latent slots 584", "latent slots 528"),
        ),
    ),
    AttentionRow(PREFILL, HOPPER, ("e4m3",), ("bf16",), ((576, 512),), ("latent gather e4m3", "latent slots e4m3")),
    # Up to 16 rows: heads of a rank under tensor parallelism. The kernels above compute 64 rows for them.
    AttentionRow(
        LATENT_ROWS,
        HOPPER,
        ("bf16",),
        (SAME,),
        ((576, 512),),
        tuple(
            f"latent {kind} {rows} rows"
            for kind, rows in product(
                ("slots", "gather e4m3", "gather 656", "slots e4m3", "slots 656", "slots 352"), (8, 16)
            )
        ),
    ),
    AttentionRow(
        LATENT_ROWS,
        HOPPER,
        ("bf16",),
        (SAME,),
        ((512, 512),),
        tuple(
            f"latent {kind} {rows} rows"
            for kind, rows in product(
                (
                    *("slots 528_fp32", "slots 584", "slots 528"),
                    *("two caches 584, 584", "two caches 528, 288", "two caches 528, 528"),
                ),
                (8, 16),
            )
        ),
    ),
    AttentionRow(
        LATENT_ROWS,
        HOPPER,
        ("e4m3",),
        ("bf16",),
        ((576, 512),),
        tuple(f"latent {source} e4m3 {rows} rows" for source, rows in product(("gather", "slots"), (8, 16))),
    ),
    AttentionRow(PREFILL_BLACKWELL, BLACKWELL, ("bf16",), (SAME,), (*USUAL, *WIDE), ("causal", "full", "modified")),
    AttentionRow(PREFILL_BLACKWELL, BLACKWELL, ("fp16", "e4m3"), (SAME,), USUAL, ("causal", "full", "modified")),
    AttentionRow(
        PREFILL_BLACKWELL,
        BLACKWELL,
        ("bf16",),
        (SAME,),
        USUAL,
        ("gather", "gather modified", "custom mask modified", "ranges modified", "prefix", "skip"),
    ),
    AttentionRow(PREFILL_BLACKWELL, BLACKWELL, ("bf16",), ("e4m3", "e5m2", "nvfp4"), USUAL, ("causal", "modified")),
    AttentionRow(PREFILL_BLACKWELL, BLACKWELL, ("e4m3",), ("nvfp4",), USUAL, ("causal", "modified")),
    AttentionRow(PREFILL_BLACKWELL, BLACKWELL, ("bf16",), (SAME, "e4m3", "nvfp4"), USUAL, ("quantised output",)),
    AttentionRow(PREFILL_BLACKWELL, BLACKWELL, ("bf16",), (SAME,), USUAL, ("split", "split modified")),
    AttentionRow(PREFILL_BLACKWELL, BLACKWELL, ("fp16", "e4m3"), (SAME,), USUAL, ("split",)),
    AttentionRow(PREFILL_BLACKWELL, BLACKWELL, ("bf16",), ("e4m3", "nvfp4"), USUAL, ("split",)),
    AttentionRow(DECODE, archs.NAMES, ("bf16",), (SAME, "e4m3", "nvfp4"), USUAL, ("8 rows", "16 rows")),
    AttentionRow(DECODE, archs.NAMES, ("bf16",), (SAME, "e4m3", "nvfp4"), ((256, 256),), ("8 rows",)),
    AttentionRow(DECODE, HOPPER, ("bf16",), (SAME, "e4m3", "nvfp4"), ((64, 64),), ("8 rows window", "8 rows many")),
    AttentionRow(DECODE, HOPPER, ("bf16",), ("e4m3", "nvfp4"), ((128, 128),), ("8 rows window",)),
    AttentionRow(DECODE, HOPPER, ("bf16",), ("e4m3",), ((128, 128),), ("8 rows many",)),
    AttentionRow(DECODE, HOPPER, ("bf16",), ("e4m3",), USUAL, ("8 rows factors", "16 rows factors")),
    AttentionRow(DECODE, SERVERS, ("fp16",), (SAME, "e4m3", "nvfp4"), USUAL, ("8 rows", "16 rows")),
    AttentionRow(DECODE, SMALL, ("fp16",), (SAME,), USUAL, ("8 rows", "16 rows")),
    AttentionRow(DECODE, SERVERS, ("e4m3",), (SAME,), USUAL, ("8 rows", "16 rows")),
    AttentionRow(DECODE, SERVERS, HALVES, (SAME, "e4m3"), USUAL, ("8 rows gather", "16 rows gather")),
    AttentionRow(DECODE, HOPPER, ("bf16",), (SAME,), USUAL, ("8 rows slots",)),
    AttentionRow(DECODE, HOPPER, ("bf16",), (SAME,), ((128, 128),), ("16 rows slots",)),
    AttentionRow(DECODE, BLACKWELL, ("bf16",), ("e5m2",), USUAL, ("8 rows", "16 rows")),
    AttentionRow(DECODE, BLACKWELL, ("e4m3",), ("nvfp4",), USUAL, ("8 rows", "16 rows")),
)
TOPK = tuple(ElementRow(op, ("fp32", "fp16", "bf16")) for op in ("topk.radix", "topk.sort"))
CACHE_WRITE = (
    ElementRow("cache_write.rows", ("uint8",), ("append",), ("uint8",)),
    ElementRow("cache_write.rows", ("nvfp4",), ("append",), ("fp32",)),
    ElementRow("cache_write.rows", ("bf16",), ("append", "transform"), ("bf16", "e4m3", "nvfp4")),
    ElementRow("cache_write.rows", ("fp16",), ("append", "transform"), ("fp16", "e4m3", "nvfp4")),
    ElementRow("cache_write.rows", ("bf16", "fp16"), ("token",), ("e4m3",)),
    ElementRow("cache_write.rows", ("bf16",), ("gather",), ("bf16",)),
    ElementRow("cache_write.rows", ("fp16",), ("gather",), ("fp16",)),
)
LATENT = (
    ElementRow(
        "latent.write", ("bf16",), ("rows", "e4m3", "656", "528_fp32", "528", "528_planar", "584", "352", "288")
    ),
    ElementRow("latent.write", ("bf16",), ("132", "rows joined", "656 joined")),
    ElementRow("latent.write", ("fp16",), ("rows", "132")),
    ElementRow("latent.read", ("bf16",), ("e4m3", "656", "528_fp32", "528", "528_planar", "584", "352", "288")),
    ElementRow("latent.read", ("uint8",), ("bytes", "132")),
    ElementRow("latent.read", ("fp16",), ("e4m3",)),
)
MERGE_STATES = (ElementRow("merge_states.rows", ("bf16", "fp16", "fp32"), ("states", "pair")),)
INDEXER = (
    IndexerRow(((64, 128), (32, 128)), (1, 2, 4, 8), ("fp32",)),  # requests of so many tokens
    IndexerRow(((64, 128), (32, 128)), (1, 9), ("bf16",)),  # 9: prompts
    IndexerRow(((64, 64), (64, 32), (32, 64), (32, 32)), (9,), ("fp32",)),
    IndexerRow(((64, 128), (32, 128)), (9,), ("fp32",), "bf16"),
)
