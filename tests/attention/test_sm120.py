"""Kernels of architectures without an MMA for prefill (sm_120a, sm_121a): dispatch, shared memory, code and results."""

from dataclasses import replace

import pytest

from cute_kernels import archs, catalog, manifest
from cute_kernels.attention import decode, dispatch
from cute_kernels.attention.decode import tile_table
from cute_kernels.attention.request import KernelRequest
from tests.conftest import finish, run_python, specs_of, start_python

ARCHS = decode.ALONE
PROMPT = KernelRequest(page_size=64, qhead_per_kvhead=4, rows=4096)
SIMULATED = {  # architecture -> what tests.support.on_sm120 runs there
    "sm_120a": (
        "prompts", "topk.sort/fp32", "topk.radix/bf16_c8", "cache_write.rows/bf16_bf16", "merge_states.rows/fp32_pair",
        "latent.write/bf16_656", "latent.read/read_uint8_132",
    ),
    "sm_121a": ("attention.decode/bf16_kvnvfp4_d64",),
}  # fmt: skip
# Without --all: a loop and a cluster that other architectures lack. Hopper's kernels have the code of all others.
FEW = ("prompts", "topk.radix/bf16_c8")
NO_SHARED = ("cache_write.rows", "latent.read", "latent.write", "merge_states.rows")


def test_these_architectures_have_neither_wgmma_nor_tensor_memory():
    assert ARCHS == ("sm_120a", "sm_121a")
    for arch in ARCHS:
        assert not {op for op, _ in catalog.shipped(arch)} & {"attention.sm90", "attention.sm100"}
        assert catalog.shipped(arch) == catalog.shipped(ARCHS[0])


def test_an_architecture_without_a_row_is_named():
    with pytest.raises(ValueError, match="arch: 'sm_80', must be one of sm_90a, sm_100a"):
        archs.of("sm_80")


@pytest.mark.parametrize("arch", archs.NAMES)
def test_every_tile_of_decode_fits(arch):
    tiles = tile_table.tiles_of(arch)
    large = tile_table.TileKey("half", 512, 8)  # the smallest tile of two stages takes 113 KiB, of 99 that there are
    lacks = {large} if arch in ARCHS else set()
    measured = {key for key in tile_table.measured(False) if arch == "sm_90a" or key.work == tile_table.ANY}
    assert tiles.keys() == measured - lacks
    for key, tile in tiles.items():
        row = archs.of(arch)
        room = min(row.smem_per_cta, row.smem_per_sm // tile.ctas_per_sm - 1024)
        assert tile_table.resources(key, tile, room).excess is None
        kv = "bf16" if key.kind == "half" else key.kind
        spec = decode.spec_of("bf16", kv, key.head_dim, key.rows, arch, key.work)
        assert spec.tile == tile and decode.supports(spec) is None


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("way", ["auto", "always", "never", "fixed"])
def test_prompts_are_served_by_the_loop_of_decode(arch, way):
    """In tiles of 16 rows per warp; in those of 8 if bits must not depend on the rows of other sequences."""
    for change in ({}, {"window": True}, {"kv": "e4m3"}, {"kv": "nvfp4"}, {"source": "ragged", "page_size": 0}):
        op, spec = dispatch.select(replace(PROMPT, split_kv=way, **change), arch)
        assert op == "attention.decode" and spec in specs_of("attention.decode", arch)
        assert spec.tile.rows_per_warp == (8 if way == "fixed" else 16) and spec.tile.alternates_m_blocks == (
            way != "fixed"
        )
    _, full = dispatch.select(replace(PROMPT, split_kv=way, causal=False), arch)
    assert full.mask.causal == "value"


def test_bits_without_split_keys_do_not_depend_on_the_longest_request():
    found = {dispatch.select(replace(PROMPT, split_kv="never", rows=rows), ARCHS[0])[1] for rows in (1, 64, 1 << 20)}
    assert len(found) == 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "change", [{"custom_mask": "bits"}, {"alibi": True}, {"head_scales": True}, {"head_dim_qk": 192}]
)
def test_what_no_kernel_serves_is_named(arch, change):
    with pytest.raises(dispatch.UnsupportedRequest, match="attention.decode: " + next(iter(change))[:8]):
        dispatch.select(replace(PROMPT, **change), arch)


@pytest.fixture(scope="module")
def ran(request):
    """Architecture -> lines of tests.support.on_sm120, for the names of the selected tests."""
    chosen = {ARCHS[0]: ["large"]}
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and "name" in params:
            chosen.setdefault(params["arch"], []).append(params["name"])
    started = {
        arch: start_python("-m", "tests.support.on_sm120", arch, *names, CUTE_DSL_ARCH=arch)
        for arch, names in chosen.items()
    }
    return {arch: finish(process) for arch, process in started.items()}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        pytest.param(arch, name, marks=() if name in FEW else pytest.mark.full)
        for arch, names in SIMULATED.items()
        for name in names
    ],
)
def test_kernels_fit_spill_nothing_and_are_right_in_the_simulator(ran, arch, name):
    done = ran[arch]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(f"{name} ")]
    assert len(lines) == 1, done.stderr[-2000:]
    _, kernel, error, shared, spills = lines[0]
    assert kernel in {manifest.label(*one) for one in catalog.shipped(arch)}
    assert 0 <= float(error) <= 1
    assert int(spills) <= 0
    assert int(shared) <= archs.of(arch).smem_per_cta and (int(shared) > 0) == (kernel.split("/")[0] not in NO_SHARED)
    if kernel.startswith("attention."):
        spec = next(spec for _, spec in catalog.shipped(arch) if kernel.endswith(f"/{spec.name}"))
        kind = tile_table.kind_of(spec.kv.dtype)
        assert 0 <= tile_table.smem_bytes(kind, spec.padded_qk, spec.tile) - int(shared) <= 1024, (
            "what tiles are chosen by"
        )


@pytest.mark.kernels
def test_a_kernel_that_needs_more_shared_memory_is_not_built(ran):
    assert "large is refused" in ran[ARCHS[0]].stdout.splitlines(), ran[ARCHS[0]].stderr[-2000:]


@pytest.mark.full
def test_full_attention_in_the_simulator():
    done = run_python("-m", "tests.support.on_sm120", ARCHS[0], "full", CUTE_DSL_ARCH=ARCHS[0])
    name, kernel, error, *_ = done.stdout.split()
    assert name == "full" and "anywb" in kernel and float(error) <= 1
