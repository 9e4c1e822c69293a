"""Static facts of the kernels that write caches: the compile key, the artifact's name and the test id.

Everything else is an argument of the launch (`args.CacheWriteArgs`): head_dim, heads, strides, page size, places, the
kind of rotary embedding and whether there are weights of a norm."""

from dataclasses import dataclass

from ..dtypes import LARGEST

BYTES = {"bf16": 2, "fp16": 2, "uint8": 1}  # per element of the rows that are read
CACHES = ("bf16", "fp16", "uint8", *LARGEST, "nvfp4")
SF_VEC_SIZE = 16  # elements that share a scale factor of NVFP4
VECTOR_BYTES = 16  # the widest access


@dataclass(frozen=True)
class CacheWriteSpec:
    """A kernel that writes rows.

    dtype: of the rows that are read; "uint8" stands for any type of one byte, which is copied. cache: the type of the
    cache; if it equals dtype, rows are copied. transform: the kernel can normalise and rotate K, and has a third
    operand, Q. gather: instead, the kernel rotates Q and K of an attention call: K is read from the cache. dtype nvfp4,
    cache fp32: instead, the kernel dequantises a tensor. scales: "token": the kernel finds a scale for each row of K
    and V, and stores it beside the cache; "": the launch has scales, NVFP4 finds factors of blocks."""

    dtype: str = "bf16"
    cache: str = "bf16"
    transform: bool = False
    gather: bool = False
    scales: str = ""

    @property
    def elements(self) -> int:
        """Elements of a row that a lane handles at a time: 16 bytes of it."""
        return VECTOR_BYTES // BYTES[self.dtype]

    @property
    def quantised(self) -> bool:
        """Whether the cache has another type than the rows."""
        return self.cache != self.dtype

    @property
    def dequantises(self) -> bool:
        """Whether codes and scale factors are read, and their values are written."""
        return self.dtype == "nvfp4"

    @property
    def by_token(self) -> bool:
        """Whether each row has a scale of its own."""
        return self.scales == "token"

    @property
    def q_cache(self) -> str:
        """The type of 8 bits that Q is written in instead of 16."""
        return "e5m2" if self.cache == "e5m2" else "e4m3"

    @property
    def stores_factors(self) -> bool:
        """Whether scale factors are stored beside the cache."""
        return self.by_token or self.cache == "nvfp4"

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        kind = "gather" if self.gather else "transform" if self.transform else "append"
        kind = "dequantise" if self.dequantises else kind
        return f"{self.dtype}_{self.cache}{'t' * self.by_token}_{kind}"
