"""Limits of what no case of CI shows: the share of a kernel's PTX that never runs, and values of specs' constants.

`python -m tests.sim KERNEL --coverage` prints the former; `tests/support/lines.py` names lines that no kernel executes.
"""

from collections.abc import Iterable
from typing import Any

from ptxsim.coverage import Missing

from cute_kernels import manifest

Constant = tuple[str, str, Any]  # an op, a field of its specs, a value

# By op: the rest of these kernels is reached by features of other kernels, by types or by sizes that no small case has.
# Kernels that split keys find sequences in five places, each with code for more than 32 of them, of which a small case
# runs a few. The kernels of `latent.write` and `latent.read` have the code of queries, norms and places in common, and
# a record's cases run a part of it.
LIMITS = {
    "attention.decode": 0.16,
    "attention.latent": 0.17,
    "attention.sm90": 0.17,
    "indexer.logits": 0.11,  # of bf16 keys, which have no pages; 0.07 of the kernel for one token
    "latent.read": 0.22,
    "latent.write": 0.37,
    "topk.radix": 0.35,
}
GOAL = 0.02  # of other ops


def uncovered(label: str, found: Missing) -> list[str]:
    """Return an error if too much of a kernel never ran. found: `missing(result)` of all its cases, merged by
    `RunResult.add`."""
    most = LIMITS.get(label.split("/")[0], GOAL)
    return [f"{found.share:.1%} of its PTX never ran, at most {most:.0%} may"] if found.share > most else []


SIZE = "a size: kernels of others run the same code"
RECORD = "codes, factors and places that kernels of other records have (kernels.COMBINED)"
TWIN = "bf16's kernel with another type of MMA; on Hopper such twins have equal PTX"
WITHOUT_KERNEL: dict[Constant, str] = {  # values of shipped specs that no kernel of CI has -> why not
    ("attention.sm90", "tile.stages", 6): SIZE,
    ("attention.sm90", "tile.n", 80): SIZE,
    **{("attention.sm90", f"head_dim_{part}", size): SIZE for part, size in (("qk", 192), ("qk", 256), ("vo", 256))},
    ("attention.sm90", "kv.scales", "token"): "rows are multiplied as blocks are; decode's kernel has such scales",
    ("attention.sm90", "kv.record", "528_fp32"): "the codes and factors of 656 bytes, in rows without a rotated part",
    ("attention.decode", "tile.ctas_per_sm", 2): SIZE,
    ("attention.decode", "tile.stages", 5): SIZE,
    **{("attention.sm90", f"kv.{name}", record): RECORD
       for name, record in (("record", "352"), ("record", "584"), ("extra_record", "584"))},
    **{("latent.write", "record", record): RECORD for record in ("288", "528_fp32", "528_planar")},
    **{(op, "kv.extra_record", "528"): "the code that reads this record in the first cache"
       for op in ("attention.latent", "attention.sm90")},
    ("attention.decode", "tile.stages", 1): "head_dim 256 on sm_120a, which --all simulates",
    ("attention.decode", "tile.stages", 2): SIZE,
    ("attention.decode", "tile.stages", 8): SIZE,
    ("attention.decode", "tile.m", 128): "prompts of sm_120a, which test_sm120.py simulates",
    ("attention.decode", "kv.dtype", "e5m2"): "Blackwell's, e4m3's code with another conversion; --all simulates them",
    **{("topk.radix", "capacity", size): SIZE
       for size in (9216, 10240, 13312, 14336, 19456, 21504, 37888, 43008)},
    ("indexer.logits", "dim", 32): SIZE, ("indexer.logits", "dim", 64): SIZE, ("indexer.logits", "rows", 2): SIZE,
    ("indexer.logits", "out", "bf16"): "rounded where fp32 is stored; --all simulates it",
    ("topk.sort", "items", 8): SIZE, ("topk.sort", "items", 16): SIZE, ("topk.sort", "threads", 1024): SIZE,
    ("attention.sm100", "head_dim_qk", 192): "the loops of head_dim 128 (kernels.ALIKE)",
    ("attention.sm100", "mask.causal", "never"): "a case of kernels that take it as a value",
    ("attention.sm100", "mask.custom", "ranges"): "other bounds of the causal mask, in code that Hopper's kernel runs",
    ("attention.sm100", "mask.custom", "bits"): "words of code that Hopper's kernel runs; --all simulates them",
    ("attention.sm100", "kv.source", "gather"): "a role that Hopper's kernel has; --all simulates it",
    ("attention.sm100", "logits.skip", True): "votes that Hopper's kernel has; --all simulates them",
    ("attention.sm100", "mask.prefix", True): "another bound of the causal mask, in code that Hopper's kernel runs",
    ("attention.sm100", "kv.dtype", "e5m2"): "e4m3's code with another conversion; --all simulates them",
    **{("attention.sm100", field, "fp16"): TWIN for field in ("q", "kv.dtype")},
    ("attention.sm100", "out", ("fp16",)): TWIN,
    ("attention.sm100", "tile.ex2_emu", 2): "a size: the share of exponentials that are emulated",
    ("attention.sm100", "tile.q_stages", 2): SIZE,
    ("attention.sm100", "tile.raw_stages", 1): SIZE,
    ("attention.sm100", "tile.raw_stages", 2): SIZE,
    ("attention.sm100", "tile.raw_stages", 4): SIZE,
    ("attention.sm100", "tile.raw_stages", 6): SIZE,
    ("attention.sm100", "tile.stages", 6): SIZE,
    ("attention.sm100", "tile.stages", 8): SIZE,
}  # fmt: skip


def constants(kernels: Iterable[tuple[str, Any]]) -> set[Constant]:
    """Return the values of all fields of the specs of kernels, (op, spec)."""
    return {(op, field, value) for op, spec in kernels for field, value in _leaves(manifest.to_json(spec), "")}


def _leaves(value: Any, name: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in _leaves(value[key], f"{name}.{key}".lstrip("."))]
    return [(name, tuple(value) if isinstance(value, list) else value)]
