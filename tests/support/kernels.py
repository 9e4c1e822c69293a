"""The kernels that the tests compile and simulate: one of each structure that no other one stands for, and of Hopper's
some more, so that every value of a field has a kernel. With --all they are all that is shipped."""

import json
import re
from typing import Any

from cute_kernels import catalog, manifest
from cute_kernels.attention import sm90, sm100
from tests.conftest import ARCH
from tests.sim import workloads
from tests.sim.workloads.attention import structure

SHIPPED = {manifest.label(op, spec): (op, spec) for op, spec in catalog.shipped(ARCH)}


def family_of(op: str) -> str:
    return op.split(".")[0]


def structures() -> list[str]:
    """Return the labels of kernels that represent all structures."""
    found = []
    for family, choose in workloads.STRUCTURES.items():
        of_family = {spec: label for label, (op, spec) in SHIPPED.items() if family_of(op) == family}
        found += [of_family[spec] for spec in choose(list(of_family))]
    return found


def untyped(op: str, spec: Any) -> str:
    """Return a text of a spec with bf16 and fp16 replaced by one word. Kernels with equal texts are twins."""
    return re.sub("bf16|fp16", "half", f"{op} {manifest.canonical(manifest.to_json(spec))}")


FP16 = {label for label, (_, spec) in SHIPPED.items() if '"fp16"' in manifest.canonical(manifest.to_json(spec))}
OTHERS = {untyped(*SHIPPED[label]): label for label in SHIPPED if label not in FP16}
TWINS = {  # the fp16 kernel -> the bf16 kernel, by label
    label: OTHERS[text] for label in SHIPPED if label in FP16 and (text := untyped(*SHIPPED[label])) in OTHERS
}

# The first twin of each op and of each type of cache shows that types alone differ.
FIRST = {re.split(r"_[a-z]*\d*$|_[dct]\d", twin)[0]: twin for twin in reversed(TWINS)}


def words(value: Any, name: str = "") -> dict[str, str]:
    """Return the fields of a spec that hold no number, with their values. value: the spec as JSON."""
    if isinstance(value, dict):
        return {key: text for inner in value for key, text in words(value[inner], f"{name}.{inner}").items()}
    return {name: str(value)} if isinstance(value, str | bool | list) else {}


# Pairs of fields: some code depends on the values of both.
TOGETHER = ((".kv.dtype", ".kv.source"), (".mask.custom", ".mask.causal"))


def shown(label: str) -> set[Any]:
    """Return what a kernel shows, apart from sizes: every value of a field, and every pair of values of fields in
    TOGETHER. The fields of twins have equal values. One code reads a record in the first cache and in a second one. A
    first cache without a record has rows of 16 bits; without a second record there is no second cache."""
    op, _, spec = untyped(*SHIPPED[label]).partition(" ")
    fields = words(json.loads(spec))
    shared = {name: name.replace(".extra_record", ".record") if value else name for name, value in fields.items()}
    values = {(op, shared[name], value) for name, value in fields.items()}
    return values | {(op, fields.get(a), fields.get(b)) for a, b in TOGETHER}


# Kernels that others stand for without --all, by what stands for them.
LARGER = {  # another head dim, tile or number of rows per warp; features call the two with 16 rows per warp
    "attention.sm90/bf16_d192x128_causal_tma_m128n128s2",
    "attention.sm90/bf16_d256_causal_tma_m128n80s2",
    "attention.decode/bf16_d64_causalwb_cap_skip_tma_m32n128s3g1r8x2",
    "attention.decode/bf16_d64_causalwb_cap_skip_tma_m64n128s6g2r16",
    "attention.decode/bf16_kvnvfp4_d128_causalwb_cap_skip_tma_m64n256s5g2r16",
}
COMBINED = {  # two properties, each of which another kernel has
    "attention.sm90/bf16_kvnvfp4_d128_causal_tma_m64n128s2",  # NVFP4: in tiles of their own; shared keys: of e4m3
    "attention.sm90/bf16_kve4m3t_d64_causal_tma_m128n128s3r",  # e4m3: with one scale; a scale per token: in decode
    "attention.sm90/bf16_kvbf16v_d576x512_causal_gather_m64n64s2o2a",  # rows of bf16: by TMA; pages of any size: e4m3
    "attention.decode/bf16_kve4m3_d64_causalwb_cap_skip_gather_m64n256s6g2r8",  # e4m3: by TMA; any size: bf16, NVFP4
    "attention.decode/fp16_kvnvfp4_d64_causalwb_cap_skip_tma_m64n512s4g2r8",  # NVFP4: for bf16; fp16: over e4m3
    "attention.sm90/bf16_kv528_fp32v_d512_full_slots_m64n64s2o2a",  # factors in fp32: of 656; this record: few rows
    "attention.sm90/bf16_kv584vx584_d512_full_slots_m64n64s2o2a",  # ue8m0: of 528; its planar pages: few rows
    "attention.sm90/bf16_kv352v_d576x512_full_slots_m64n64s2o2a",  # e2m1: of 288; its rotated part: few rows
    "cache_write.rows/bf16_e4m3_transform",  # transformed: bf16, and e4m3 by token; one scale: copied
    "cache_write.rows/bf16_nvfp4_transform",  # likewise; NVFP4: copied
    "cache_write.rows/fp16_e4m3_append",  # fp16: to e4m3 by token; one scale: of bf16
    "cache_write.rows/fp16_nvfp4_append",  # likewise; NVFP4: of bf16
    "indexer.logits/e4m3_h32_d128_r8_bf16",  # 256 rows: of 64 heads; bf16: rounded where fp32 is stored
    "latent.write/bf16_528_fp32",  # fp32: of 656; the columns: of 528
    "latent.write/bf16_528_planar",  # ue8m0: of 528; planar: 584
    "latent.write/bf16_288",  # e2m1: of 352; a rotated part among the codes: of 528
    "latent.write/bf16_rows_index",  # keys of an indexer: beside 656; rows: alone
}


def ordinary() -> set[str]:
    """Return the labels of the kernels that run without --all: those that stand for a structure, the first twins, and
    others that show a value of a field which no kernel before them shows. Those of LARGER and COMBINED are left out."""
    chosen = dict.fromkeys([*structures(), *FIRST.values()])
    seen = set().union(*map(shown, chosen))
    for label in SHIPPED:
        if not shown(label) <= seen:
            chosen[label] = None
            seen |= shown(label)
    return set(chosen) - LARGER - COMBINED


LATER = SHIPPED.keys() - ordinary()  # kernels that only --all compiles


def resized() -> set[str]:
    """Return the attention kernels of `structures` that differ from one before them in sizes alone: a head dim, a tile,
    rows per warp."""
    seen: list[set[Any]] = []
    found = set()
    for label in structures():
        (op, spec), own = SHIPPED[label], shown(label)
        if own in seen and family_of(op) == "attention" and not spec.kv.shares_v:
            found.add(label)
        seen.append(own)
    return found


RESIZED = resized()


# Kernels of RESIZED that features and test_parts.py simulate: they compile without --all, and --all runs their cases.
CALLED = {
    "attention.decode/bf16_d128_causalwb_cap_skip_tma_m64n128s3g2r8",
    "attention.decode/bf16_kvnvfp4_d128_causalwb_cap_skip_tma_m48n384s3g3r8",
}


def reordered() -> set[str]:
    """Return the kernels of `structures` that also run in a second mode without --all. Asynchronous copies and MMAs of
    attention and of the indexer may end in many orders, so all of their kernels do, except those in RESIZED. Each other
    op has one kernel, and top-k one more, a cluster. The mode `random` takes 3 to 8 times as long as `eager`."""
    ops = {SHIPPED[label][0]: label for label in reversed(structures())}
    some = {label for label in structures() if family_of(SHIPPED[label][0]) in ("attention", "indexer")}
    return some - RESIZED | set(ops.values()) | {"topk.radix/fp32_c3t512_n46080"}


REORDERED = reordered()

SPILLED = 24  # bytes that some tiles of prefill may spill: values of a tile, outside the loop over blocks
# Bytes, and instructions, with which kernels over packed records may spill, by whether there is a second cache. The
# warps that schedule and prefetch have 24 registers, and spill most; those that convert spill values of the role. A row
# that is loaded a block before stays in registers.
RECORDS_SPILLED = {False: 176, True: 256}
BLACKWELL = [(arch, op, spec) for arch in catalog.ARCHS if arch not in sm90.ARCHS for op, spec in catalog.shipped(arch)]


# Structures of Blackwell's prefill that others stand for, also in all modes: other head dims with the same loops; a
# cache of e4m3, which warps convert as they do NVFP4; and CTAs that share the keys of e4m3, as they do those of NVFP4,
# or keys in a window, the bounds of which are those of tiles that share none.
ALIKE = {
    (128, False), (192, False), ("e4m3", 128), ("shares", "bf16", "e4m3", 64, False),
    ("shares", "e4m3", "e4m3", 128, False), ("shares", "bf16", "bf16", 128, True),
}  # fmt: skip

# Structures that only --all compiles: NVFP4 in tiles of their own, which warps convert as they do with shared keys;
# pages of any size and skip-softmax, which Hopper's kernels have.
RARE = {("nvfp4", 64), "gathers", "skips"}


# A kernel of Blackwell with a custom mask of bits, which those of a structure lack; only --all compiles it.
MASKED = [
    (arch, op, spec) for arch, op, spec in BLACKWELL
    if (arch, op) == ("sm_100a", "attention.sm100") and (spec.q, spec.dims) == ("bf16", (64, 64))
    and spec.mask.custom == "bits"
]  # fmt: skip


def covering() -> list[tuple[str, str, Any]]:
    """Return kernels of BLACKWELL: of the op that Hopper lacks one of each structure but those in ALIKE, in turn for
    sm_100a and sm_103a, and those in MASKED; of others one for sm_100a, because Hopper's kernels have their code.
    test_sm120.py has those of other architectures."""
    found = list(MASKED)
    for op in dict.fromkeys(op for arch, op, _ in BLACKWELL if arch in sm100.ARCHS):
        for number, arch in enumerate(sm100.ARCHS):
            specs = [spec for *where, spec in BLACKWELL if where == [arch, op]]
            chosen = workloads.STRUCTURES[family_of(op)](specs)
            if op == "attention.sm100":
                chosen = [spec for spec in chosen[number :: len(sm100.ARCHS)] if structure(spec) not in ALIKE]
            else:
                chosen = chosen[: number == 0]
            found += [(arch, op, spec) for spec in chosen]
    return found


REPEATED = covering()  # which --all runs in all modes
COVERING = [  # which compile without --all
    kernel for kernel in REPEATED
    if kernel not in MASKED and not (kernel[1] == "attention.sm100" and structure(kernel[2]) in RARE)
]  # fmt: skip

# The kernels of COVERING that run, without --all, in a second simulator mode besides `eager`: (case, mode), 4 to 11
# seconds each; `random` takes three times as long. They cover pipelines with two halves, with alternating blocks and
# with blocks shared among CTAs, and one group with two slots for S.
ORDERED = {
    ("sm_100a", "bf16_d64_causal_tma_m256n128s4e4"): ("few", "late"),
    ("sm_103a", "bf16_d128_causal_tma_m128n96s3"): ("boxes", "newest"),
    ("sm_100a", "bf16_d256_causal_tma_m128n64s2"): ("ragged", "newest"),
}

# The kernels of COVERING that run all their cases without --all: those of ORDERED, and the one with a window, a cap and
# all types of outputs. The others have the pipelines of these, with another way to load or to convert K and V.
WHOLE = {*ORDERED, ("sm_103a", "bf16_oany_d64_anyw_cap_tma_m256n128s4")}
