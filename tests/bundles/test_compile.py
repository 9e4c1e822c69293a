"""Shipped kernels compile without a GPU and hold the instructions they should: those of `kernels.ordinary`, with
--all every one. Reads the manifests of bundles."""

import platform
import re
import shutil
import subprocess
from collections import Counter

import pytest

from cute_kernels import archs, build, catalog, cubin, manifest
from cute_kernels.attention.latent import roles as few_rows
from cute_kernels.attention.latent import tile_table as latent_rows
from cute_kernels.attention.sm90 import tile_table as sm90_tiles
from cute_kernels.attention.sm90.roles import roles
from cute_kernels.attention.sm100 import roles as sm100
from cute_kernels.attention.sm100 import tile_table as sm100_tiles
from cute_kernels.cache_write import rows
from cute_kernels.device import umma
from cute_kernels.device.roles import launch_registers
from cute_kernels.indexer.logits import roles as indexer
from cute_kernels.latent import read, write
from cute_kernels.merge_states import rows as merged_rows
from cute_kernels.records import RECORDS
from cute_kernels.topk import radix, sort
from cute_kernels.topk.spec import SortSpec
from tests.conftest import ROOT, whole_bundle
from tests.support.kernels import BLACKWELL, COVERING, LATER, RECORDS_SPILLED, SHIPPED, SPILLED

pytestmark = pytest.mark.kernels
MANY_VALUES = 128 * 128  # scores or outputs of a tile, from which on registers are short
RESERVED = 1024  # bytes that the system adds to each CTA's; the manifest counts them
REGISTERS = 65536  # of an SM
BUNDLE_BYTES = 65_500_000
TILES = {"attention.sm90": sm90_tiles, "attention.sm100": sm100_tiles}
NO_SHARED = {
    "cache_write.rows": rows,
    "latent.read": read,
    "latent.write": write,
    "merge_states.rows": merged_rows,
}  # kernels without shared memory


@pytest.fixture(scope="session")
def held(bundle) -> manifest.Manifest:
    return manifest.read(bundle)


def test_a_bundle_holds_what_is_shipped(held, request):
    """Without --all, twins may lie in it that were built before."""
    wanted = SHIPPED.keys() - (() if whole_bundle(request.config) else LATER)
    assert [label for label in wanted if held.find(*SHIPPED[label]) is None] == []
    for field in ("name", "symbol", "key"):
        assert len({entry[field] for entry in held.kernels}) == len(held.kernels) <= len(SHIPPED), field


@pytest.mark.full
def test_a_bundle_is_small(bundle, held):
    """With the DSL's runtime library, which is most of it."""
    files = [manifest.FILE, *(file["file"] for file in (held.runtime, *held.libraries.values()))]
    assert sum((bundle / name).stat().st_size for name in files) <= BUNDLE_BYTES


@pytest.mark.skipif(platform.machine() not in build.HOST_CPUS or not shutil.which("objdump"), reason="x86, binutils")
@pytest.mark.parametrize("family", catalog.FAMILIES)
def test_host_code_runs_on_other_processors(bundle, held, family):
    """A bundle may be built on another machine: no instructions of AVX, which all begin with v, as no others do."""
    library = bundle / held.libraries[family]["file"]
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--section=.ltext", str(library)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = Counter(re.findall(r"^\s*[0-9a-f]+:\s+(\w+)", text, re.MULTILINE))
    assert found["movaps"] + found["movups"] > 0
    assert not [name for name in found if name.startswith("v")]


def disassembled(held, op, spec):
    """The entry of a kernel, which spills nothing, or a few values of a tile."""
    entry = held.find(op, spec)
    assert entry is not None, held.refusal(op, spec)
    # with the 1,024 bytes that CUDA reserves, which no CTA may ask for: `build` checks the others
    assert (op in NO_SHARED) == (entry["shared"] == 0) and entry["shared"] <= archs.of(held.arch).smem_per_sm
    if entry["instructions"] is None:
        pytest.skip(f"nothing can disassemble: {cubin.INSTALL}")
    large = op == "attention.sm90" and spec.tile.m * max(spec.tile.n, spec.head_dim_vo) >= MANY_VALUES
    large = large or (op == "attention.sm100" and spec.tile.m == 128 and spec.padded_vo == 64)
    most = SPILLED if large else 0
    if op.startswith("attention") and spec.kv.record:
        most = RECORDS_SPILLED[spec.kv.extra]
    spills = sum(entry["instructions"].get(name, 0) for name in ("LDL", "STL"))
    assert entry["stack"] <= most and spills <= most, "spills"
    return entry


def as_dispatch_counts(entry, spec):
    """`ctas_per_sm` must not promise CTAs that an SM has no room for."""
    kernel = sort if isinstance(spec, SortSpec) else radix
    assert 0 < entry["registers"] * spec.threads * kernel.ctas_per_sm(spec) <= REGISTERS
    assert entry["shared"] <= kernel.smem_bytes(spec) + RESERVED


def ptx_of(entry):
    return (ROOT / "build" / "obj" / f"{entry['key']}.ptx").read_text()


def as_its_op(entry, op, spec):
    """The instructions that a kernel of `op` should hold, and the resources that dispatch counts with."""
    if op.startswith("topk."):
        return as_dispatch_counts(entry, spec)
    if op in NO_SHARED:
        kernel = NO_SHARED[op]
        assert 0 < entry["registers"] * kernel.THREADS * kernel.ctas_per_sm(spec) <= REGISTERS
        return None
    if op in TILES:
        counted = TILES[op].smem_bytes(spec, spec.tile, (spec.padded_qk, spec.padded_vo))
        assert entry["shared"] == counted + RESERVED, "what `supports` refuses tiles by"
    counts = entry["instructions"]
    if op == "indexer.logits":  # keys, in boxes of 128 bytes, and scales by TMA or, of other caches, by cp.async
        assert counts["LDGSTS"] > 0 and counts["UTMALDG"] == -(-spec.row_bytes // 128) + 1
        assert counts["WARPGROUP"] < counts["QGMMA" if spec.keys == "e4m3" else "HGMMA"], (
            "the compiler fences and waits around every single WGMMA"
        )
        assert entry["registers"] == launch_registers(indexer.roles(spec).warps()), "what setmaxnreg shares"
        return None
    if op == "attention.latent":  # rows by bulk copies, factors of planar records by cp.async, Q by loads; HMMA alone
        assert entry["shared"] <= latent_rows.smem_bytes(spec).smem + RESERVED, "what `supports` refuses tiles by"
        assert counts["HMMA"] > 0 and not counts.keys() & {"HGMMA", "QGMMA", "UTMALDG"}
        assert ("LDGSTS" in counts) == any(RECORDS[record].planar for record in latent_rows.records(spec))
        wanted = sum(role.warps * role.registers for role in few_rows.roles(spec).table)
        assert wanted <= entry["registers"] * few_rows.roles(spec).warps(), "a warpgroup would wait for ever"
        return None
    if spec.kv.source in ("gather", "slots"):  # K and V, or Q, by cp.async; a box of Q is 128 bytes wide
        assert counts["LDGSTS"] > 0
        assert counts.get("UTMALDG", 0) == (0 if spec.schedule == "stream_k" else spec.head_dim_qk // 64)
    else:
        assert counts["UTMALDG"] > 0
    if op == "attention.decode":
        assert counts["HMMA"] > 0 and "HGMMA" not in counts
    elif op == "attention.sm100":
        size = 1 if spec.q == spec.kv.dtype == "e4m3" else 2
        first, block = (columns * size // umma.STEP for columns in (spec.head_dim_qk, spec.head_dim_qk + spec.tile.n))
        mmas = counts["UTCQMMA" if size == 1 else "UTCHMMA"]
        halves = 2 * sm100.SLOTS * block  # Q K^T of the first block, the loop, P V of the last block
        one_half = sm100.SLOTS * first + sm100.groups(spec) * block  # Q K^T of a block per slot, and the loop
        steps = sum(one_half if m == sm100.ROWS else halves for m in spec.tile.m_choices)
        assert mmas == steps, "one MMA a step, no copy of loops"
        assert entry["registers"] == launch_registers(sm100.roles(spec).warps()), "what `Roles.of` takes for granted"
    else:
        mmas = counts["QGMMA" if spec.q == spec.kv.dtype == "e4m3" else "HGMMA"]
        assert mmas > 0
        assert counts["WARPGROUP"] < mmas, "the compiler fences and waits around every single WGMMA"
        wanted = sum(role.warps * role.registers for role in roles(spec).table)
        assert wanted <= entry["registers"] * roles(spec).warps(), "a warpgroup would wait for registers for ever"
        if "nvfp4" not in spec.out:  # of whose stores ptxas makes copies
            assert counts["FFMA"] == ptx_of(entry).count("fma.rn.f32"), "ptxas contracts nothing"


@pytest.mark.parametrize(
    ("op", "spec"),
    [pytest.param(*k, id=k[1].name, marks=pytest.mark.full if x in LATER else ()) for x, k in SHIPPED.items()],
)
def test_shipped(held, op, spec):
    as_its_op(disassembled(held, op, spec), op, spec)


@pytest.mark.parametrize(
    ("arch", "op", "spec"),
    [pytest.param(*k, id=f"{k[0]}-{k[2].name}", marks=() if k in COVERING else pytest.mark.full) for k in BLACKWELL],
)
def test_shipped_for_blackwell(blackwell, arch, op, spec):
    as_its_op(disassembled(blackwell(arch), op, spec), op, spec)


def test_opcodes_are_counted_with_and_without_predicates():
    text = """
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], !UPT ;
        /*0010*/              @!P0 UTMALDG.4D [UR8], [UR4] ;
        /*0020*/              @UP1 UTMALDG.4D [UR8], [UR4] ;
        /*0030*/                   STL.64 [R1], R2 ;
        /*0040*/                   LDG.E R1, [R2] ;
        /*0050*/              @P1  BRA 0x40 ;
    """
    assert cubin.instructions(text) == {"HGMMA": 1, "UTMALDG": 2, "STL": 1, "total": 6}
