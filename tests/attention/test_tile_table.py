"""The tables of tiles: every row fits on an SM, a head dim is one row, and seams ask tiles for no more than their
bases declare. `test_compile.py` compares the counted bytes with those of compiled kernels."""

import ast
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

from cute_kernels.attention import decode, latent, sm90, sm100, tile
from cute_kernels.attention.decode import tile_table as decode_table
from cute_kernels.attention.sm90 import tile_table as sm90_table
from cute_kernels.attention.sm100 import tile_table as sm100_table
from cute_kernels.attention.spec import AttentionSpec, KVSpec, LogitsSpec, MaskSpec, outputs
from tests.conftest import ROOT, specs_of
from tools import tiles

TABLES: dict[str, Any] = {"attention.sm90": sm90_table, "attention.sm100": sm100_table}
OPS = {"attention.sm90": sm90, "attention.sm100": sm100}
QUERIES, CACHES = ("bf16", "fp16", "e4m3"), ("bf16", "fp16", "e4m3", "e5m2", "nvfp4")
SEAMS = [f for folder in (".", "kv", "schedule") for f in (ROOT / "cute_kernels/attention" / folder).glob("*.py")]
TILES = [sm90.Sm90TileConfig, sm100.Sm100TileConfig, decode.DecodeTileConfig, latent.LatentTileConfig]
GENERAL = {"mask": MaskSpec("value", window=True), "logits": LogitsSpec(soft_cap=True)}


def rows(op):
    """(spec, tile) of every cell of an op's table, for all types that share it."""
    table = TABLES[op]
    for q, kv, row in product(QUERIES, CACHES, table.TABLE):
        if kv == "fp16" and q != kv or kv == "bf16" and q != kv:
            continue
        plain = AttentionSpec(q, KVSpec(kv), outputs(q)[:1], *row.dims)
        general, split = replace(plain, **GENERAL), replace(plain, schedule="stream_k")
        if op == "attention.sm100":
            found = [(plain, table.tile_of(q, kv, row.dims, "sm_100a"))]
        else:
            found = [(general, table.tile_of(q, kv, row.dims, False)), (plain, table.tile_of(q, kv, row.dims, True))]
        found += [(split, table.split_tile_of(q, kv, row.dims))]
        if op == "attention.sm90" and row.dims == (512, 512) and q == kv != table.FP8:
            found += [(some, table.tile_of(q, kv, row.dims, True, shared=True)) for some in (general, plain)]
        yield from ((replace(spec, tile=t), t, row.dims) for spec, t in found if t)


@pytest.mark.parametrize("op", OPS)
def test_every_tile_fits(op):
    """Beside Q, K, V and what they are converted to, in the shared memory of its architecture; S, P and O in registers
    or tensor memory. The error has the numbers."""
    assert len(list(rows(op))) > 20
    for spec, t, dims in rows(op):
        assert TABLES[op].resources(spec, t, dims).excess is None, spec.name
        assert OPS[op].supports(spec) is None, spec.name


@pytest.mark.parametrize("spec", specs_of("attention.latent", "sm_90a"), ids=lambda spec: spec.name)
def test_every_tile_of_few_rows_over_records_fits(spec):
    """Beside Q and P. Four times the stages do not fit; the refusal of another tile names the tile of the table."""
    assert latent.supports(spec) is None and latent.smem_bytes(spec).excess is None
    larger = replace(spec.tile, stages=4 * spec.tile.stages)
    assert latent.smem_bytes(replace(spec, tile=larger)).excess is not None
    refusal = latent.supports(replace(spec, tile=larger))
    assert refusal is not None and refusal == ("tile", f"{larger}: must be {spec.tile}")


def test_what_does_not_fit_is_refused_with_numbers():
    spec = AttentionSpec("bf16", KVSpec("bf16"), ("bf16",), 128, 128)
    for module, t, why in (
        (sm90, sm90.Sm90TileConfig(stages=4), "needs 295264 bytes of shared memory, must be at most 232448"),
        (sm90, sm90.Sm90TileConfig(n=256, stages=1), "needs 288 registers per thread, must be at most 232"),
        (sm100, sm100.Sm100TileConfig(stages=3), "needs 264640 bytes of shared memory, must be at most 232448"),
    ):
        refusal = module.supports(replace(spec, tile=t))
        assert refusal is not None and refusal.field == "tile" and refusal.why.endswith(why), refusal
    over = sm100_table.resources(spec, sm100.Sm100TileConfig(m=128, n=16, stages=1), (64, 512)).excess
    assert over == "needs 768 columns of tensor memory, must be at most 512"
    key = decode_table.TileKey("half", 256, 16)
    excess = decode_table.resources(key, decode.DecodeTileConfig(32, 64, 3, 1, 16), 232448).excess
    assert excess == "needs 192 registers per thread, must be at most 96"


@pytest.mark.parametrize("op", OPS)
def test_registers_are_those_of_the_roles(op):
    """The budgets with which tiles are checked, in plain Python, against the table of roles."""
    roles = pytest.importorskip(f"cute_kernels.{op}.roles", reason="needs the DSL", exc_type=ImportError)
    for spec, t, dims in rows(op):
        role = "mma" if op == "attention.sm90" else "softmax"
        assert TABLES[op].resources(spec, t, dims).register_limit <= roles.roles(spec).registers(role), spec.name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kv", ["bf16", "e4m3", "nvfp4"])
def test_a_proposed_tile_is_supported(op, kv):
    """For head dims with a row, where `supports` can be asked; the measured tile may differ."""
    for row in TABLES[op].TABLE:
        spec = AttentionSpec("bf16", KVSpec(kv), ("bf16",), *row.dims)
        if TABLES[op].tile_of("bf16", kv, row.dims, *((False,) if op == "attention.sm90" else ("sm_100a",))):
            assert OPS[op].supports(replace(spec, tile=TABLES[op].propose("bf16", kv, row.dims))) is None


def test_tiles_are_proposed_for_a_dim_without_a_row(capsys):
    tiles.main(["224"])
    lines = capsys.readouterr().out.splitlines()
    found = {tuple(line.split(" ", 2)[:2]): line for line in lines}
    assert {op for op, _ in found} == {"attention.sm90", "attention.sm100", "attention.decode"}
    assert "Sm90TileConfig(m=128, n=96, stages=2" in found["attention.sm90", "half:"]
    assert "of 232448 bytes" in found["attention.sm100", "half:"]


@pytest.mark.parametrize("op", OPS)
def test_a_head_dim_is_one_row(op, monkeypatch):
    """A new row serves its head dim: no other line of an op names one."""
    module, table = OPS[op], TABLES[op]
    row = next(row for row in table.TABLE if row.dims == (192, 192))._replace(dims=(224, 224))
    new = (*table.TABLE, row)
    known = tile.distinct_dims(r.dims for r in new if r.half)
    for name, value in (("TABLE", new), ("HEAD_DIMS", known)):
        monkeypatch.setattr(table, name, value)
        monkeypatch.setattr(module, name, value, raising=False)
    table.column.cache_clear()
    try:
        request = sm90.KernelRequest(head_dim_qk=224, head_dim_vo=224)
        spec = module.candidate(request, module.ARCHS[0])
        assert spec.padded_qk == spec.padded_vo == 224
        refusal = module.supports(spec)
        assert refusal is None or refusal.field == "tile"
    finally:
        monkeypatch.undo()
        table.column.cache_clear()


def test_seams_ask_tiles_only_for_what_their_bases_declare():
    declared = {name for kind in (tile.WholeTileConfig, tile.PreparedTileConfig, tile.MergedTileConfig)
                for base in kind.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", ()))}  # fmt: skip
    asked = {
        node.attr
        for file in SEAMS
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("spec.tile")
    }
    assert len(asked) > 8 and asked <= declared


@pytest.mark.parametrize("kind", TILES)
def test_a_tile_states_what_differs_from_its_base(kind):
    """So a field for one op touches the base and that op. Fields are part of keys: no default of the base is one."""
    base = tile.TileConfig
    assert [f.name for f in fields(base)] == ["m", "n", "stages"] == [f.name for f in fields(kind)][:3]
    one = kind(128, 128, 2)
    for name, inherited in vars(base).items():
        own = vars(kind).get(name)
        if isinstance(inherited, property) and name in vars(kind) and not isinstance(own, property):
            repeated = own == inherited.fget(one)
            assert name in {f.name for f in fields(kind)} or not repeated, f"{name}: that of the base"
