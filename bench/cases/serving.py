"""The shapes that engines serve: mixed batches, prompt chunks, single prompts, small batches and ragged batches."""

import math
import random
from dataclasses import replace
from statistics import NormalDist

from .attention import AttentionCase, decoding, headline

SHAPE = "h32x8-d128-p16"  # default heads, head_dim and page size
CHUNK, BEHIND = 1024, (2048, 6144, 10240, 14336)  # chunks of a mixed batch: their query tokens, and all their tokens
FIRST, LAST = 1024, 7168  # tokens of its shortest and longest decoding request
CONTEXTS = (4096, 8192, 16384, 32768)  # all tokens of the requests that compute a chunk


def _batch(name: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> AttentionCase:
    return AttentionCase(f"{name}-{SHAPE}", "bf16", q_lens, kv_lens, 32, 8, 128, 128, 16, lse=False, spare_pages=8)


def mixed(name: str, count: int) -> AttentionCase:
    """Return a batch of one chunk for each of four requests, and `count` requests of one query token and evenly spaced
    lengths."""
    lens = (FIRST + (LAST - FIRST) * i // max(1, count - 1) for i in range(count))
    return _batch(name, (CHUNK,) * len(BEHIND) + (1,) * count, (*BEHIND, *lens))


def chunks(name: str, size: int) -> AttentionCase:
    """Return a batch of the next `size` tokens of each of four requests."""
    return _batch(name, (size,) * len(CONTEXTS), CONTEXTS)


def alone(length: int) -> AttentionCase:
    """Return a batch of one prompt."""
    return replace(headline("causal", 1, length, (32, 8), 128, 16), name=f"prefill-bf16-one-s{length}-{SHAPE}")


def log_normal(count: int, mean: float, sigma: float, least: int, most: int) -> tuple[int, ...]:
    """Return lengths in a fixed random order; their quantiles follow a log-normal distribution, clamped to [least,
    most].

    >>> log_normal(5, 100, 1.0, 20, 1000)
    (61, 36, 20, 218, 102)
    """
    normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
    places = [(i + 0.5) / count for i in range(count)]
    random.Random(0).shuffle(places)
    return tuple(min(max(round(math.exp(normal.inv_cdf(place))), least), most) for place in places)


RAGGED = log_normal(256, 2048, 1.2, 64, 32768)


def ragged(kv_dtype: str) -> AttentionCase:
    """Return a decode batch with RAGGED lengths."""
    name = f"decode-{kv_dtype or 'bf16'}-ragged-b{len(RAGGED)}-h64x8-d128-p16"
    return replace(decoding(len(RAGGED), 0, (64, 8), 128, 16, kv_dtype), name=name, kv_lens=RAGGED)


def windowed(keys: int, kv_dtype: str) -> AttentionCase:
    """Return a decode batch in which each token sees its last `keys` keys, as in GPT-OSS."""
    case = decoding(64, 8192, (64, 8), 64, 64, kv_dtype)
    return replace(case, name=case.name.replace("-b64", f"-window{keys}-b64"), window_left=keys - 1)


def windowed_prompts(keys: int, heads: tuple[int, int], dim: int) -> AttentionCase:
    """Return prompts in which each token sees its last `keys` keys."""
    case = headline("causal", 2, 8192, heads, dim, 64, f"bf16-window{keys}")
    return replace(case, window_left=keys - 1)


OTHER_DIMS = (32, 80, 96, 112, 160, 192)  # a bundle holds no kernels of these head dims


def other(dim: int) -> AttentionCase:
    """Return a prefill case with a head_dim of OTHER_DIMS."""
    return replace(headline("causal", 2, 8192, (32, 8), dim, 64), name=f"prefill-bf16-d{dim}-causal-b2-s8192-h32x8-p64")


PREFILL = {
    case.name: case
    for case in (
        replace(
            headline("causal", 1, 8192, (16, 16), 192, 64),
            name="prefill-bf16-d192x128-b1-s8192-h16x16-p64",
            head_dim_vo=128,
        ),
        replace(headline("causal", 1, 8192, (16, 8), 256, 64), name="prefill-bf16-d256-b1-s8192-h16x8-p64"),
        alone(512),
        alone(1024),
        windowed_prompts(128, (64, 8), 64),
        windowed_prompts(1024, (32, 8), 128),
        *(other(dim) for dim in OTHER_DIMS),
        replace(headline("causal", 1, 8192, (8, 4), 512, 64), name="prefill-bf16-d512-causal-b1-s8192-h8x4-p64"),
    )
}
DECODE = {
    case.name: case
    for case in (
        *(decoding(batch, n, (32, 8), 128, 16) for batch, n in ((1, 1024), (1, 8192), (4, 4096), (8, 1024))),
        *(ragged(kv_dtype) for kv_dtype in ("", "fp8", "nvfp4")),
        *(decoding(64, 8192, (64, 8), dim, 64, kv_dtype) for kv_dtype in ("", "fp8", "nvfp4") for dim in OTHER_DIMS),
        *(decoding(64, 8192, (16, 4), 512, 64, kv_dtype) for kv_dtype in ("", "fp8", "nvfp4")),
        *(windowed(128, kv_dtype) for kv_dtype in ("", "fp8", "nvfp4")),
    )
}
SERVE = {case.name: case for case in (mixed("serve-bf16-mixed", 60), chunks("serve-bf16-chunks", 512))}

SWEEP_SERVE = {
    case.name: case
    for case in (
        *(mixed(f"sweep-serve-bf16-mixed-n{count}", count) for count in (0, 15, 30, 60, 120, 240)),
        *(chunks(f"sweep-serve-bf16-chunks-q{1 << e}", 1 << e) for e in range(4, 12)),
    )
}
