"""Head dims that kernels pad: multiples of 16. Hopper's kernels run among the features of test_ptxsim_kernels.py."""

import itertools

import pytest
import torch

from bench.cases import attention as cases
from cute_kernels.attention import decode, sm90, sm100
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.spec import HEAD_DIM_UNIT, MAX_PADDED_DIM, padded
from tests.conftest import ARCH, run_python
from tests.sim import workloads
from tests.sim.workloads.attention_features import of_other_kernels
from wrappers.attention import checks

DIMS = range(HEAD_DIM_UNIT, MAX_PADDED_DIM + 1, HEAD_DIM_UNIT)
# A process of its own compiles and runs the kernels: one process has one architecture.
SIMULATE = """
import sys
from dataclasses import replace
from cute_kernels.attention import decode, sm100
from cute_kernels.attention.request import KernelRequest
from tests.sim import workloads
arch, dim, count = sys.argv[1], *map(int, sys.argv[2:4])
request = KernelRequest("bf16", "bf16", "bf16", dim, dim, rows=1)
for kernel in sys.argv[4:]:
    op, q, kv = kernel.split("-")
    spec = {"sm100": sm100, "decode": decode}[op].candidate(replace(request, q=q, kv=kv), arch)
    for case in workloads.CASES["attention"](spec)[:count]:
        outcome = workloads.RUN["attention"](spec, case, arch, mode="eager")
        assert outcome.error <= 1, (spec.name, case.name, outcome.error)
        print(spec.name, case.name)
"""


@pytest.mark.parametrize(
    "known, want",
    [
        ((32, 64, 96, 128, 160, 192, 256, 512), {16: 32, 32: 32, 48: 64, 208: 256, 256: 256, 272: 0, 512: 512, 528: 0}),
        ((64, 128, 192, 256), {16: 64, 80: 128, 144: 192, 240: 256, 512: 0}),
    ],
)
def test_a_padded_dim_is_the_next_that_kernels_have(known, want):
    """No head dim but 512 itself takes kernels of 512, and no kernel takes what is no multiple of 16."""
    assert {dim: padded(dim, known) for dim in want} == want
    assert not any(padded(dim, known) for dim in (-16, 0, 8, 72, 100, 264))


@pytest.mark.parametrize("tile", [decode.DecodeTileConfig(64, 128, 3), sm90.Sm90TileConfig(), sm100.Sm100TileConfig()])
@pytest.mark.parametrize("bits", [16, 8])
def test_little_is_padded(tile, bits):
    """Less than 64 columns of K and V, up to head_dim 256."""
    assert all(dim <= padded(dim, tile.head_dims(bits)) < dim + 64 for dim in DIMS)


def decode_specs(dim):
    for kv, rows in (("bf16", 1), ("e4m3", 1), ("bf16", 9), ("e4m3", 9)):
        yield decode.candidate(KernelRequest(kv=kv, head_dim_qk=dim, head_dim_vo=dim, rows=rows), ARCH)


@pytest.mark.parametrize("dim", DIMS)
def test_lanes_of_decode_share_all_columns(dim):
    """The passes of the reduction, and then the merge of splits, have each stored column once."""
    layout = pytest.importorskip("cute_kernels.attention.decode.layout", reason="needs the DSL", exc_type=ImportError)
    combine = pytest.importorskip("cute_kernels.attention.combine", reason="needs the DSL", exc_type=ImportError)
    for spec in decode_specs(dim):
        each, passes = layout.columns_at_once(spec), layout.reduction_passes(spec)
        firsts = {first for _, first in passes}
        assert sorted(first + i for first in firsts for i in range(each)) == list(range(spec.padded_vo // 8))
        found = [layout.first_column(spec, n, eighth) for n in range(spec.padded_vo // 8) for eighth in range(8)]
        assert sorted(found) == list(range(spec.padded_vo))
        assert 32 % (2 * each) == 0, "threads of a row lie in one warp"
        per = combine.columns_per_lane(dim)
        assert dim % per == 0 and dim <= 32 * per and 16 % per == 0


@pytest.mark.parametrize("dim", [16, 80, 96, 112, 160, 192])
@pytest.mark.parametrize("function", ["context", "decode", "xqa"])
@pytest.mark.parametrize("kv_dtype", ["", "nvfp4"])
def test_the_cpu_serves_them(function, dim, kv_dtype):
    tokens = 1 if function == "xqa" else 3
    case = cases.AttentionCase(
        "", function=function, q_lens=(tokens,) * 2, kv_lens=(19, 130), head_dim_qk=dim, head_dim_vo=dim, page_size=3,
        sink=1.0, kv_dtype=kv_dtype,
    )  # fmt: skip
    problem = cases.make_call(case)
    call, arguments = cases.FUNCTIONS[function]
    given = arguments(case, problem)
    call(**given)
    inputs = cases.context_arguments(case, problem)
    out = given["output" if function == "xqa" else "out"]
    o, _ = cases.reference_of(inputs)
    assert ((out.view(o.shape) - o).abs() <= case.limit(o)).all()


BOTH, WIDE = ("sm100-bf16-bf16", "decode-bf16-e4m3"), ("sm100-e4m3-e4m3", "sm100-bf16-nvfp4", "decode-bf16-nvfp4")


@pytest.mark.kernels
@pytest.mark.parametrize(
    "arch, dim, count, kernels",  # count: of the cases of each kernel
    [
        pytest.param("sm_100a", 80, 1, BOTH[:1], marks=pytest.mark.full),
        pytest.param("sm_100a", 512, 1, BOTH[:1], marks=pytest.mark.full),
        pytest.param("sm_100a", 80, 1, WIDE[1:2], marks=pytest.mark.full),
        *(pytest.param(*one, 99, BOTH, marks=pytest.mark.full) for one in (("sm_100a", 80), ("sm_103a", 192))),
        pytest.param("sm_103a", 512, 99, BOTH + WIDE, marks=pytest.mark.full),
    ],
)
def test_kernels_of_blackwell(arch, dim, count, kernels):
    done = run_python("-c", SIMULATE, arch, str(dim), str(count), *kernels, CUTE_DSL_ARCH=arch)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= min(len(kernels) * count, 9) and f"_d{dim}_" in done.stdout


@pytest.mark.kernels
@pytest.mark.full
@pytest.mark.parametrize("scenario", of_other_kernels(), ids=lambda scenario: scenario.name)
def test_more_kernels_of_hopper(scenario):
    assert workloads.RUN["attention"](None, scenario, ARCH, mode="eager").error <= 1


@pytest.mark.parametrize("dim, size, scale", [(80, 8, 1), (32, 16, 2), (64, 16, 4), (512, 16, 16)])
def test_rows_of_nvfp4_are_aligned_as_their_bytes_allow(dim, size, scale):
    """size, scale: the bytes of which addresses of rows, and of rows of scale factors, are multiples."""
    case = cases.AttentionCase("", head_dim_qk=dim, head_dim_vo=dim, kv_dtype="nvfp4", page_size=16)
    call = cases.make_call(case)
    checks.kernel_tensors(call)
    for field, bytes_ in (("k", size), ("v", size), ("k_scales", scale), ("v_scales", scale)):
        if bytes_ > 1:
            with pytest.raises(ValueError, match=f"must be a multiple of {bytes_} bytes"):
                checks.kernel_tensors(call._replace(**{field: moved(getattr(call, field), bytes_ // 2)}))
        checks.kernel_tensors(call._replace(**{field: moved(getattr(call, field), bytes_)}))


def moved(t, by):
    """Return the values of a tensor of bytes at an address that is `by` bytes above a multiple of 64."""
    memory = torch.empty(t.numel() + 128, dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + by
    return memory[first : first + t.numel()].view(t.dtype).view(t.shape).copy_(t)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("interleaved", [0, 1])
def test_padded_scale_factors_lie_where_those_of_the_padded_head_dim_would(size, interleaved):
    """Four rows of `size` factors, in a stage with rows of 8: every byte is written, and those of no block are 0."""
    scales = pytest.importorskip("cute_kernels.attention.kv.scales", reason="needs the DSL", exc_type=ImportError)
    padded, written = 8, {}
    for row in range(4):
        back, tail = scales.padded_row(padded, size, row, interleaved)
        stored = range(row * size, (row + 1) * size)  # as the cache has them
        at = [row * padded - back + i for i in range(size)] + [row * padded + tail + i for i in range(padded - size)]
        written |= dict(zip(at, [*stored, *[None] * (padded - size)], strict=True))
    assert sorted(written) == list(range(4 * padded))
    for row, block in itertools.product(range(4), range(padded)):
        factor = block * 4 + row if interleaved else row * size + block
        where = block * 4 + row if interleaved else row * padded + block
        assert written[where] == (factor if block < size else None)


@pytest.mark.parametrize("o_tiles", [2, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_tiles_with_a_part_of_o_find_the_scale_factors_of_their_columns(o_tiles, interleaved):
    """Four rows of `o_tiles` parts, stored row by row or, interleaved, block by block."""
    scales = pytest.importorskip("cute_kernels.attention.kv.scales", reason="needs the DSL", exc_type=ImportError)
    blocks = 3 * o_tiles
    stored = {(row, block): block * 4 + row if interleaved else row * blocks + block
              for row, block in itertools.product(range(4), range(blocks))}  # fmt: skip
    part = blocks // o_tiles
    for o_tile in range(o_tiles):
        copied = []
        for row in range(4):
            rows, first = scales.source_of_part(o_tiles, row, o_tile, interleaved)
            copied += [(row + rows) * blocks + first * part + i for i in range(part)]
        mine = {(row, block): block * 4 + row if interleaved else row * part + block
                for row, block in itertools.product(range(4), range(part))}  # fmt: skip
        for (row, block), at in mine.items():
            assert copied[at] == stored[row, o_tile * part + block]
