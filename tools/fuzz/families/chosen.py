"""Draw calls of attention to keys that each token chooses by slot. `attention` builds and judges them."""

from random import Random
from typing import Any

from bench.cases.attention import AttentionCase

from ..call import Call, Options, changed_fields
from .attention_draw import ANY_PAGES, HEADS, TMA_PAGES, USUAL, length

SPARSE = "sparse_paged_attention"


def draw(family: str, rng: Random, options: Options) -> Call:
    most = 200 if options.small else rng.choice((300, 1200, 5000))
    heads = rng.choice(HEADS)
    kv, out = rng.choice(("", "", "fp8")), rng.choices(("", "fp8", "nvfp4"), (80, 15, 5))[0]
    dim = rng.choice(USUAL)
    if out == "nvfp4" and heads[0] * dim % 64:
        out = ""
    batch = rng.choice((1, 2, 3, 9, 40))
    case = AttentionCase(
        "fuzz", q_lens=(rng.choice((1, 1, 1, 2, 4, 16)),) * batch, heads_q=heads[0], heads_kv=heads[1],
        kv_lens=tuple(length(rng, most) for _ in range(batch)), page_size=rng.choice(TMA_PAGES + ANY_PAGES),
        head_dim_qk=dim, head_dim_vo=dim, dtype="bf16", kv_dtype=kv, out_dtype=out, causal=False,
        layout=rng.choice(("NHD", "HND")), cache=rng.choice(("tuple", "stacked")), function="decode",
        soft_cap=rng.choice((0.0, 0.0, 9.0)), sink=rng.choice((0.0, 0.0, 1.0)), lse=rng.random() < 0.6,
        strided_q=rng.random() < 0.3, fresh=rng.random() < 0.3, invariant=rng.random() < 0.15,
        device=rng.choice(((), (), ("scale", "out"))), spare_pages=rng.choice((0, 1, 3, 9)),
        data=rng.choice(("normal", "normal", "peaks")),
    )  # fmt: skip
    mode = rng.choices(("eager", "graph", "threads", "bind"), (66, 16, 8, 10))[0]
    if mode == "graph" and out == "nvfp4":  # dequantised in torch, with a copy from the host
        mode = "eager"
    extra: dict[str, Any] = {"form": "slots"}
    return Call(family, SPARSE, rng.randrange(1 << 30), mode, "shape", changed_fields(case, "name"), extra)
