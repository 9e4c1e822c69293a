"""The page docs/matrix.md: what each public attention function serves, and why it refuses the rest.

Nothing is written by hand but the calls (`tools.asked`). Each cell comes from `explain`, with the message that the
product itself gives. `python -m tools.matrix readme` writes the page; a test compares it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import wrappers
from bench import pages
from cute_kernels import archs
from cute_kernels.records import INDEX, ROWS
from wrappers.own.registry import call_of

from . import asked
from .asked import Wanted, WantedLatent, WantedLogits

HOPPER, BLACKWELL = "sm_90a", "sm_100a"
Options = dict[str, dict[str, Any]]  # value -> the fields of a call that ask for it


class Column(NamedTuple):
    """A public function: the head of its column, how its arguments are made, the call that all others differ from, and
    the fields of a call for which it has no argument, or the values, as `field=value`."""

    name: str
    head: str
    make: Callable[[Any], dict[str, Any]]
    base: Any
    lacks: tuple[str, ...] = ()

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(wrappers, self.name)  # type: ignore[no-any-return]


class Table(NamedTuple):
    """Functions of one kind, and what each is asked for. own: of some functions, by their head, arguments of which no
    other row shows the refusal."""

    title: str
    columns: tuple[Column, ...]
    options: dict[str, Options]
    own: dict[str, Options]


def given(**arguments: Any) -> Options:
    """Return a row for each argument that a function gets beside the others."""
    shown = {n: "a tensor" if isinstance(v, torch.Tensor) else f"`{v!r}`" for n, v in arguments.items()}
    return {f"`{n}`: {shown[n]}": {"others": ((n, value),)} for n, value in arguments.items()}


TYPES: Options = {kv: {"kv": kv} for kv in ("e4m3", "e5m2", "nvfp4")}
TOKENS: Options = {"a causal mask": {"tokens": 4}, "full attention": {"tokens": 4, "causal": False}}
DIMS: Options = {str(dim): {"dims": (dim, dim)} for dim in (64, 80, 128, 256, 320, 512)}
KV_OPTIONS: dict[str, Options] = {
    "queries, K and V": {dtype: {"q": dtype} for dtype in ("bf16", "fp16", "e4m3", "e5m2")},
    "cache under bf16 queries": TYPES
    | {f"{kv}, a scale per token": {"kv": kv, "by_token": True} for kv in ("e4m3", "int8")},
    "cache under e4m3 queries": {kv: {"q": "e4m3", "kv": kv} for kv in ("e5m2", "nvfp4")},
    "output": {out: {"out": out} for out in ("fp16", "e4m3", "nvfp4")},
    "head_dim": DIMS | {"192 with 128 of V": {"dims": (192, 128)}},
    "rows of a page": {str(size): {"page": size} for size in (1, 16, 24, 64, 128)},
    "heads": {"64 of one KV head": {"heads": (64, 1)}, "5 of 1": {"heads": (5, 1)}},
    "4 tokens of a request": TOKENS
    | {"a tree of drafts": {"tokens": 4, "mask": "drafts"}, "any mask, in bits": {"tokens": 4, "mask": "bits"}},
    "option": {
        "window": {"window": 127}, "soft cap": {"cap": 30.0}, "sinks": {"sinks": True}, "LSE": {"lse": True},
        "skip-softmax": {"skip": True}, "no split keys (batch-invariant)": {"whole": True},
        "ALiBi": {"position": "alibi"}, "RoPE": {"position": "rope"},
    },
}  # fmt: skip
NO_MASK, NO_POSITION = "mask", "position"
FLASH_ATTENTION = NO_MASK, NO_POSITION, "skip", "by_token", "kv=nvfp4", "out"
KV_COLUMNS = (
    Column(
        "trtllm_batch_context_with_kv_cache", "context", asked.context, Wanted(tokens=64),
        (NO_MASK, "position=rope", "whole"),
    ),
    Column(
        "trtllm_batch_decode_with_kv_cache", "decode", asked.decode, Wanted(), ("mask=bits", NO_POSITION, "causal")
    ),
    Column(
        "xqa", "xqa", asked.xqa, Wanted(),
        ("mask=bits", NO_POSITION, "causal", "cap", "lse", "skip", "by_token", "out=nvfp4"),
    ),
    Column("flash_attn_varlen_func", "varlen", asked.varlen, Wanted(tokens=64), FLASH_ATTENTION),
    Column("flash_attn_with_kvcache", "kvcache", asked.kvcache, Wanted(), FLASH_ATTENTION),
    Column(
        "single_prefill_with_kv_cache", "single", asked.single, Wanted(tokens=64),
        ("page", "mask=drafts", "sinks", "skip", "whole", "by_token", "kv=nvfp4", "out=nvfp4"),
    ),
    Column(
        "trtllm_ragged_attention_deepseek", "ragged", asked.ragged, Wanted(tokens=64),
        ("page", NO_MASK, NO_POSITION, "cap", "whole", "by_token", "kv=nvfp4", "out=nvfp4"),
    ),
    Column(
        "sparse_paged_attention", "slots", asked.sparse, Wanted(),
        (NO_MASK, NO_POSITION, "window", "skip", "tokens", "by_token", "kv=nvfp4"),
    ),
)  # fmt: skip
KV_OWN: dict[str, Options] = {
    "context": given(use_fp16_softmax=True, uses_spcompress=True),
    "decode": given(enable_block_sparse_attention=True, cp_world=2, bf16q_fp8kv_transform_mode="fp8"),
    "varlen": given(alibi_slopes=torch.ones(8), dropout_p=0.1)
    | {"`window_size`: `(-1, 5)`": {"causal": False, "others": (("window_size", (-1, 5)),)}},
    "kvcache": given(alibi_slopes=torch.ones(8)),
    "single": given(scale_q=torch.ones(8)),
    "ragged": given(num_elts_per_sage_attn_blk=(1, 0, 0, 0), uses_spcompress=True),
}

RECORDS = tuple(name for name in asked.RECORDS if name not in (ROWS, INDEX))
LATENT_OPTIONS: dict[str, Options] = {
    "queries and cache": {"bf16": {}, "fp16": {"q": "fp16"}, "e4m3": {"q": "e4m3", "record": "e4m3"}},
    "cache under bf16 queries, all keys": {
        name: {"record": name, "dim": asked.RECORDS[name].columns or 576} for name in RECORDS
    },
    "cache under bf16 queries, chosen keys": {
        name: {"record": name, "chosen": True, "dim": asked.RECORDS[name].columns or 576} for name in ("rows", *RECORDS)
    },
    "second cache, chosen keys": {
        f"{first} and {second}": {"record": first, "chosen": True, "second": second, "dim": dim}
        for first, second, dim in (
            ("rows", "rows", 576), ("656", "656", 576), ("584", "584", 512), ("528", "288", 512), ("rows", "656", 576),
        )
    },
    "columns of K": {str(dim): {"dim": dim} for dim in (512, 576, 1088)},
    "rows of a page": {str(size): {"page": size} for size in (1, 16, 64, 100)},
    "heads": {str(n): {"heads": n} for n in (8, 20, 64, 128)},
    "4 tokens of a request": {"a causal mask": {"tokens": 4}, "full attention": {"tokens": 4, "causal": False}},
    "option": {
        "window": {"window": 127}, "soft cap": {"cap": 30.0}, "sinks": {"sinks": True}, "LSE": {"lse": True},
        "batch-invariant": {"whole": True},
        "batch-invariant with chosen keys of 656 bytes": {"whole": True, "chosen": True, "record": "656"},
        "shared keys with 16 heads": {"share": True}, "shared keys with 128 heads": {"share": True, "heads": 128},
        "shared keys of 584 bytes": {"share": True, "record": "584", "dim": 512},
    },
}  # fmt: skip
CHOOSES = "all keys", "causal"
LATENT_COLUMNS = (
    Column("flash_mla_with_kvcache", "flash_mla", asked.flash_mla, WantedLatent(), ("window", "cap", "share")),
    Column(
        "trtllm_batch_decode_with_kv_cache_mla", "trtllm_mla", asked.trtllm_mla, WantedLatent(),
        ("window", "cap", "share", "second", "whole", "causal", "record=584", "record=288"),
    ),
    Column(
        "flash_attn_with_kvcache", "kvcache", asked.qv, WantedLatent(),
        ("chosen", "second", "share", "packed", "dim=512"),
    ),
    Column(
        "flash_mla_sparse_fwd", "sparse_fwd", asked.sparse_fwd, WantedLatent(chosen=True, causal=False, tokens=64),
        ("window", "cap", "whole", "lse", *CHOOSES),
    ),
    Column(
        "dsa_sparse_attention", "dsa", asked.dsa, WantedLatent(chosen=True, causal=False, tokens=64),
        ("window", "cap", "sinks", "whole", "share", "second", "packed", *CHOOSES),
    ),
)  # fmt: skip
LATENT_OWN: dict[str, Options] = {
    "trtllm_mla": given(
        cp_world=2, enable_dcp=True, uses_shared_paged_kv_idx=False, skip_softmax_threshold_scale_factor=1.0
    ),
    "dsa": given(dkv_acc=torch.zeros(1)),
}

LOGITS_OPTIONS: dict[str, Options] = {
    "queries": {q: {"q": q} for q in ("e4m3", "bf16", "e5m2")},
    "heads": {str(n): {"heads": n} for n in (8, 32, 64, 128)},
    "values of a head": {str(n): {"dim": n} for n in (32, 64, 96, 128, 256)},
    "rows of a page": {str(size): {"page": size} for size in (1, 16, 64, 100)},
    "tokens of a request": {str(n): {"tokens": n} for n in (1, 3, 8, 20)},
}
LOGITS_COLUMNS = (
    Column("fp8_paged_mqa_logits", "paged", asked.paged_logits, WantedLogits()),
    Column("fp8_mqa_logits", "ragged", asked.prompt_logits, WantedLogits(tokens=64), ("page", "tokens")),
    Column("select_slots", "select_slots", asked.chosen_slots, WantedLogits()),
    Column("select_rows", "select_rows", asked.chosen_rows, WantedLogits(tokens=64), ("page", "tokens")),
    Column("dsa_indexer_topk", "indexer_topk", asked.segments, WantedLogits(q="bf16", tokens=64), ("page", "tokens")),
)
TABLES = (
    Table("K and V per head", KV_COLUMNS, KV_OPTIONS, KV_OWN),
    Table("Latent attention", LATENT_COLUMNS, LATENT_OPTIONS, LATENT_OWN),
    Table("The indexer", LOGITS_COLUMNS, LOGITS_OPTIONS, {}),
)
ARCHITECTURE, ANY = "architecture", "any call"


def lacking(column: Column, option: str, facts: dict[str, Any]) -> bool:
    """Return whether a function has no argument for what is asked."""
    words = {*facts, *(f"{name}={value}" for name, value in facts.items()), *option.split(", ")[1:]}
    words |= {"packed"} if asked.RECORDS[facts.get("record", "rows")].packed else set()
    return not words.isdisjoint(column.lacks)


def reasons_of(refused: Iterable[tuple[str, str]]) -> str:
    """Return why kernels refuse, each reason once. Kernels for another number of rows, or another architecture, stand
    there only if no other one could serve the call."""
    found = list(refused)
    for field in ("arch ", "rows "):
        found = [(op, why) for op, why in found if not why.startswith(field)] or found
    by: dict[str, list[str]] = {}
    for op, why in found:
        by.setdefault(why, []).append(op)
    return "; ".join(f"{' and '.join(dict.fromkeys(ops))}: {why}" for why, ops in by.items())


def refusal(column: Column, arguments: dict[str, Any], arch: str) -> str:
    """Return "" if a kernel serves the call on an architecture, else the reason that the product gives."""
    try:
        found = wrappers.explain(**arguments, function=column.function, arch=arch)
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)
    return "" if found.runs else reasons_of(found.refused)


class RefusalReasons(NamedTuple):
    """Why a call is refused on Hopper and on Blackwell; "" if it is served."""

    hopper: str
    blackwell: str

    @property
    def cell(self) -> str:
        """Return the text of a cell."""
        return {(True, True): "yes", (True, False): "Hopper", (False, True): "Blackwell"}.get(
            (not self.hopper, not self.blackwell), "no"
        )


Answers = dict[tuple[str, str], RefusalReasons]  # (option, value) -> the answer of one function


def mistaken(column: Column, wanted: Any, arguments: dict[str, Any]) -> bool:
    """Return whether a function takes the rows of a latent cache for those of another record with as many bytes."""
    if not isinstance(wanted, WantedLatent) or not asked.RECORDS[wanted.record].packed:
        return False
    try:
        return bool(call_of(column.function, **arguments).record != wanted.record)
    except (NotImplementedError, TypeError, ValueError):
        return False


def answers_of(table: Table, column: Column) -> Answers:
    """Return the answers of a function, also those of its own arguments. Its first one is that of any call."""
    found: Answers = {}
    base: Options = {ANY: {}}
    every = {"": base} | table.options | {"argument": table.own.get(column.head, {})}
    for option, values in every.items():
        for value, facts in values.items():
            wanted = replace(column.base, **facts)
            if lacking(column, option, facts) or mistaken(column, wanted, arguments := column.make(wanted)):
                continue
            found[option, value] = RefusalReasons(*(refusal(column, arguments, arch) for arch in (HOPPER, BLACKWELL)))
    return found


def grid(table: Table, answers: dict[str, Answers]) -> str:
    """Return the table of a kind of functions: a row per value of an option, a column per function."""
    lines = []
    for option, values in table.options.items():
        for value in values:
            found = [answers[c.head].get((option, value)) for c in table.columns]
            lines.append([option, value, *(answer.cell if answer else "" for answer in found)])
    for arch in archs.TABLE[1:]:
        served = [not refusal(column, column.make(column.base), arch.name) for column in table.columns]
        lines.append([ARCHITECTURE, f"{arch.name} ({arch.product})", *("yes" if yes else "no" for yes in served)])
    shown = (["" if i and lines[i - 1][0] == line[0] else line[0], *line[1:]] for i, line in enumerate(lines))
    return pages.table(["", "", *(column.head for column in table.columns)], shown, len(table.columns) + 2)


def refused(answers: Answers) -> Iterator[list[str]]:
    """Yield the refusals of a function: what was asked, where it is refused, and why. Values with one reason share a
    row, and the reason that refuses any call on Blackwell stands there once."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (option, value), (hopper, blackwell) in answers.items():
        if hopper:
            rows.setdefault((option, "", hopper), []).append(value)
        elif blackwell and (value == ANY or blackwell != answers["", ANY].blackwell):
            rows.setdefault((option, BLACKWELL, blackwell), []).append(value)
    for (option, where, reason), values in rows.items():
        yield [option, ", ".join(values), where, re.sub(r"\s+", " ", reason).replace("|", "\\|")]


def section(table: Table) -> Iterator[str]:
    """Yield the paragraphs of a kind of functions."""
    answers = {column.head: answers_of(table, column) for column in table.columns}
    yield f"## {table.title}"
    yield "\n".join(f"- {c.head}: `{c.name}`{' with `qv`' if c.make is asked.qv else ''}" for c in table.columns)
    yield grid(table, answers)
    for column in table.columns:
        if lines := list(refused(answers[column.head])):
            yield f"### Refused by {column.name}" + (" with qv" if column.make is asked.qv else "")
            yield pages.table(["what", "value", "where", "reason"], lines, 4)


def markdown() -> str:
    """Return the generated part of the page."""
    return "\n\n".join(part for table in TABLES for part in section(table))


if __name__ == "__main__":
    print(markdown())
