"""Static facts of an attention kernel: the compile key, the artifact's name and the test id.

Presence is static, values are dynamic: what a spec does not name (lengths, page size, strides, scales, window size, the
presence of sinks and LSE, PDL) is an argument of the compiled kernel; see `args.AttentionArgs`.
"""

from dataclasses import dataclass, field

DTYPES = ("bf16", "fp16")
KV_DTYPES = ("e4m3", "nvfp4")  # beside the query's
FEW_ROWS = 8  # query rows that a warp has with split, half of those of a wide kernel


@dataclass(frozen=True)
class MaskSpec:
    """causal: bottom-right aligned. window: key j needs j >= p_i - window_left (the size is an argument)."""

    causal: bool = True
    window: bool = False


@dataclass(frozen=True)
class KVSpec:
    """source: "paged", pages of 8, 16, 32, ... rows fetched by TMA. dtype: "" for the query's, "e4m3", or "nvfp4":
    packed e2m1, two a byte, with an e4m3 scale factor per 16."""

    source: str = "paged"
    dtype: str = ""

    @property
    def bits(self) -> int:
        return {"": 16, "e4m3": 8, "nvfp4": 4}[self.dtype]


@dataclass(frozen=True)
class TileSpec:
    """m query rows (with spec.split: at most) x n keys a CTA; `stages` K tiles and as many V tiles in flight, and
    `q_stages` Q tiles. q_registers: Q is a register operand of Q K^T, which spares shared memory a third of its
    reads. groups: warpgroups that compute with spec.split; without, one for 64 rows."""

    m: int = 128
    n: int = 128
    stages: int = 2
    q_stages: int = 2
    q_registers: bool = False
    groups: int = 0

    @property
    def warpgroups(self) -> int:
        return self.groups or self.m // 64


@dataclass(frozen=True)
class AttentionSpec:
    """A forward attention kernel. pack_gqa: rows of a tile are (token, query head of the KV head's group). split: all
    CTAs get the same number of KV blocks, whatever tile these belong to; `combine` merges the parts of a tile. Such a
    kernel is for decoding: any soft cap, mask of drafts and type of output are arguments of it. wide: a warp of it has
    16 query rows instead of 8, so that these share the reading and converting of a key."""

    dtype: str = "bf16"
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    mask: MaskSpec = field(default_factory=MaskSpec)
    kv: KVSpec = field(default_factory=KVSpec)
    soft_cap: bool = False
    pack_gqa: bool = False
    split: bool = False
    wide: bool = False
    tile: TileSpec = field(default_factory=TileSpec)

    @property
    def warp_rows(self) -> int:
        """Query rows of a warp with split."""
        return 2 * FEW_ROWS if self.wide else FEW_ROWS

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        head = f"d{self.head_dim_qk}" + (f"x{self.head_dim_vo}" if self.head_dim_vo != self.head_dim_qk else "")
        flags = [
            "causal" if self.mask.causal else "full",
            "window" if self.mask.window else "",
            "cap" if self.soft_cap else "",
            "pack" if self.pack_gqa else "",
            "split" if self.split else "",
            "wide" if self.wide else "",
            self.kv.source,
            f"m{self.tile.m}n{self.tile.n}s{self.tile.stages}"
            + ("r" if self.tile.q_registers else "")
            + (f"g{self.tile.groups}" if self.tile.groups else ""),
        ]
        kv = f"kv{self.kv.dtype}" if self.kv.dtype else ""
        return "_".join(filter(None, [self.dtype, kv, head, *flags]))
