"""`trtllm_ragged_attention_deepseek`: its CPU path beside a loop in float64, merged chunks, what it refuses."""

import math

import pytest
import torch

from cute_kernels import archs
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import distance, simulated
from tests.support.prefill_batches import BF16, E4M3, HALF, KV_LENS, Q_LENS, oracle, starts_of
from wrappers import explain, fp4, merge_state
from wrappers import trtllm_ragged_attention_deepseek as ragged

E5M2, MEMORY = torch.float8_e5m2, ROOT / "build" / "simulated"
DEEPSEEK, SPARE = (192, 128), 2  # head dims; rows before those of the first request and behind those of the last one
TOLERANCE = {BF16: 2**-7, HALF: 2**-10}  # of outputs


def made(q_lens=Q_LENS, kv_lens=KV_LENS, dims=DEEPSEEK, dtype=BF16, heads=(2, 2), seed=0):
    """Return the arguments of a call without its mask. Rows of K and V that belong to no request are NaN."""
    gen, (dim, dim_vo), tokens = torch.Generator().manual_seed(seed), dims, sum(kv_lens)
    q = torch.randn(sum(q_lens), heads[0], dim, generator=gen).to(dtype)
    kv = torch.full((tokens + 2 * SPARE, heads[1], dim + dim_vo), math.nan)
    kv[SPARE : SPARE + tokens] = torch.randn(tokens, heads[1], dim + dim_vo, generator=gen)
    key, value = kv.to(dtype).split(dims, -1)  # slices of one tensor
    return {
        "query": q, "key": key, "value": value, "workspace_buffer": None, "seq_lens": None,
        "max_q_len": max(q_lens), "max_kv_len": max(kv_lens), "bmm1_scale": dim**-0.5, "bmm2_scale": 1.0,
        "o_sf_scale": 1.0, "batch_size": len(q_lens), "window_left": -1, "cum_seq_lens_q": starts_of(q_lens),
        "cum_seq_lens_kv": starts_of(kv_lens) + SPARE, "enable_pdl": None, "return_lse": True,
    }  # fmt: skip


def by_loop(given, is_causal, **options):
    """Return out and the LSE in base 2, in float64, one request after another."""
    lens = [given[f"cum_seq_lens_{x}"].diff().tolist() for x in ("q", "kv")]
    k, v = (given[name].double()[SPARE:-SPARE].split(lens[1]) for name in ("key", "value"))
    found = [
        oracle(*rows, causal=is_causal, scale=given["bmm1_scale"], window=given["window_left"], **options)
        for rows in zip(given["query"].double().split(lens[0]), k, v)
    ]
    return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found])


def close(got, want, dtype=BF16):
    torch.testing.assert_close(got[0].double(), want[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dims", [DEEPSEEK, (128, 128), (256, 256), (64, 96)])
@pytest.mark.parametrize("dtype", [BF16, HALF, E4M3, E5M2])
def test_requests_of_any_lengths(dtype, dims, is_causal):
    """Queries of 8 bits give bf16."""
    given, result = made(dims=dims, dtype=dtype), dtype if dtype.itemsize == 2 else BF16
    out, lse = ragged(**given, is_causal=is_causal)
    assert out.dtype == result and lse.dtype == torch.float32
    close((out, lse), by_loop(given, is_causal), result)


@pytest.mark.parametrize("is_causal", [True, False])
def test_windows_sinks_and_groups_of_heads(is_causal):
    given = made(heads=(4, 2)) | {"window_left": 2, "bmm2_scale": torch.tensor([0.5])}
    sinks = torch.tensor([0.5, -math.inf, 2.0, -1.0])
    out, lse = ragged(**given, is_causal=is_causal, attention_sinks=sinks)
    want = by_loop(given, is_causal, sinks=sinks)
    close((out, lse), (want[0] / 2, want[1]))


def test_requests_without_queries_or_keys():
    out, lse = ragged(**made((2, 0, 3), (0, 5, 4)), is_causal=False)
    assert not out[:2].any() and (lse[:2] == -math.inf).all()
    assert out[2:].isfinite().all() and lse[2:].isfinite().all()
    for q_lens, kv_lens in (((0, 0), (3, 4)), ((2, 3), (0, 0))):
        out, lse = ragged(**made(q_lens, kv_lens), is_causal=True)
        assert out.shape == (sum(q_lens), 2, 128) and not out.any() and (lse == -math.inf).all()


def part(given, first, lens, causal=False, **options):
    """Return the attention to so many keys of each request, from its key `first` on."""
    begins, device = given["cum_seq_lens_kv"].tolist(), given["query"].device
    rows = torch.cat(
        [torch.arange(begin + x, begin + x + n, device=device) for begin, x, n in zip(begins, first, lens)]
    )
    own = {name: given[name].float()[rows].to(given[name].dtype) for name in ("key", "value")}
    return ragged(**given | own | {"cum_seq_lens_kv": starts_of(lens).to(device)}, is_causal=causal, **options)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_chunks_of_a_context_are_merged(dtype):
    """As engines do: the tokens of a step attend to each other, then to chunks of their context, which may be empty."""
    q_lens, kv_lens, chunk = (5, 1, 3), (20, 1, 9), 8
    given = made(q_lens, kv_lens, dtype=dtype)
    context = [n - m for m, n in zip(q_lens, kv_lens)]
    merged = part(given, context, q_lens, causal=True)
    for first in range(0, max(context), chunk):
        merged = merge_state(*merged, *part(given, [first] * 3, [min(max(n - first, 0), chunk) for n in context]))
    close(merged, by_loop(given, True))


def test_outputs_are_written():
    given = made()
    want = ragged(**given, is_causal=True)
    wide, lse = torch.zeros(len(given["query"]), 4, 128).to(BF16), torch.zeros(len(given["query"]), 2)
    out = wide[:, ::2]
    found = ragged(**given, is_causal=True, out=out, lse=lse)
    assert found[0] is out and found[1] is lse and not wide[:, 1::2].any()
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    lse.zero_()
    alone = ragged(**given | {"return_lse": False}, is_causal=True, out=out, lse=lse)
    assert alone is out and torch.equal(lse, want[1])


@pytest.mark.parametrize("dtype", [HALF, E4M3])
def test_the_dtype_of_a_given_output(dtype):
    given = made(dtype=E4M3)
    out = torch.zeros(len(given["query"]), 2, 128).to(dtype)
    got, want = ragged(**given, is_causal=True, out=out)[0], by_loop(given, True)[0]
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=2**-9 if dtype is HALF else 2**-3)


def test_an_nvfp4_output_takes_its_forward_scale():
    given = made() | {"o_sf_scale": 100.0}
    out = fp4.empty((len(given["query"]), 2, 128), torch.device("cpu"))
    ragged(**given, is_causal=True, out=out)
    torch.testing.assert_close(fp4.load(out, 100.0).double(), by_loop(given, True)[0], rtol=0.25, atol=0.1)


def test_hints_change_nothing(launched):
    given = made(kv_lens=Q_LENS)
    want = ragged(**given, is_causal=True)
    hints = {
        "workspace_buffer": torch.empty(9), "seq_lens": torch.tensor([7]), "max_kv_len": -1, "o_sf_scale": -1.0,
        "max_q_len": 1 << 20, "enable_pdl": False, "backend": "cute-dsl", "q_seq_lens_cpu": torch.tensor([3]),
        "kv_seq_lens_cpu": torch.tensor([4]), "use_fp16_softmax": False, "uses_spcompress": False,
        "skip_all_rows_active_check": False,
    }  # fmt: skip
    assert all(map(torch.equal, ragged(**given | hints, is_causal=True), want))
    assert launched is None or len(launched) == 2


@pytest.mark.parametrize("dims", [DEEPSEEK, (128, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [BF16, HALF, E4M3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_kernels_of_prefill_serve_it_on_hopper(is_causal, dtype, dims):
    given = made((300, 20), (300, 500), dims, dtype)
    name = "e4m3" if dtype is E4M3 else "bf16" if dtype is BF16 else "fp16"
    dim = f"d{dims[0]}" + (f"x{dims[1]}" if dims[0] != dims[1] else "")
    said = explain(function=ragged, arch="sm_90a", **given, is_causal=is_causal)
    assert said.runs.startswith(f"attention.sm90 {name}_{dim}_{'causal' if is_causal else 'full'}_tma")


@pytest.mark.parametrize("arch", archs.NAMES)
def test_a_kernel_of_every_architecture_serves_it(arch):
    assert explain(function=ragged, arch=arch, **made(dims=(128, 128)), is_causal=True).runs


# Full: the kernel differs from others in a head dim alone, and "rows without pages" calls those with such rows.
@pytest.mark.kernels
@pytest.mark.full
def test_in_the_simulator():
    """A request without keys, one without queries, and more than a tile and a block of keys."""
    given = made((150, 1, 0, 5, 3), (200, 1, 3, 9, 0), heads=(1, 1))
    with simulated(ARCH, [], 3, memory=MEMORY):
        out, lse = ragged(**given, is_causal=True)
    want = ragged(**given, is_causal=True)
    assert distance(out, want[0].float(), 1e-2) <= 1 and distance(lse[:-3], want[1][:-3], 1e-3) <= 1
    assert not out[-3:].any() and (lse[-3:] == -math.inf).all()


NVFP4 = torch.zeros(31, 2, 96, dtype=torch.uint8)
BAD = (
    ({"key": torch.zeros(31, 2, 128).to(BF16)}, ValueError, "key, value: K has head_dim 128, must be the query's, 192"),
    ({"key": torch.zeros(30, 2, 192).to(BF16)}, ValueError, r"key, value: K \(1, 2, 30, 192\) and V .* may differ in"),
    ({"key": torch.zeros(31, 2, 192)}, TypeError, "key, value: K is torch.float32 and V torch.bfloat16"),
    ({"key": NVFP4, "value": NVFP4}, NotImplementedError, "key: dtype torch.uint8, not supported"),
    ({"query": torch.zeros(17, 3, 192).to(BF16)}, ValueError, "query: 3 heads, must be a multiple of key, value's 2"),
    ({"batch_size": 5}, ValueError, "batch_size: 5, must be 6, one less than the entries of cum_seq_lens_kv"),
    ({"cum_seq_lens_q": starts_of(Q_LENS[:5])}, ValueError, r"cum_seq_lens_q: shape \(6,\), must be \(7,\)"),
    ({"cum_seq_lens_q": None}, TypeError, "cum_seq_lens_q: NoneType, must be a torch.Tensor"),
    ({"cum_seq_lens_kv": starts_of(KV_LENS).long()}, TypeError, "cum_seq_lens_kv: dtype torch.int64, must be"),
    ({"cum_seq_lens_kv": starts_of(KV_LENS) + 9}, ValueError, r"cum_seq_lens_kv\[4\]: 34 of request 4"),
    ({"bmm1_scale": math.nan}, ValueError, "bmm1_scale: nan, must be finite"),
    ({"o_sf_scale": "1"}, TypeError, "o_sf_scale: '1', must be a float or None"),
    ({"attention_sinks": torch.zeros(3)}, ValueError, r"attention_sinks: shape \(3,\), must be \(2,\)"),
    ({"lse": torch.zeros(2, 17)}, ValueError, r"lse: shape \(2, 17\), must be \(17, 2\)"),
    ({"out": torch.zeros(17, 2, 192).to(BF16)}, ValueError, r"out: shape \(17, 2, 192\), must be \(17, 2, 128\)"),
    ({"backend": "cudnn"}, ValueError, "backend: 'cudnn', must be one of auto, trtllm-gen, cute-dsl"),
    ({"use_fp16_softmax": True}, NotImplementedError, "use_fp16_softmax: True, not supported, must be None or False"),
    ({"uses_spcompress": True}, NotImplementedError, "uses_spcompress: True, not supported, must be None or False"),
    ({"sage_attn_sfs": (None, torch.ones(1), None, None)}, NotImplementedError,
     r"sage_attn_sfs: \(NoneType, Tensor, NoneType, NoneType\), must be four times None"),
    ({"sage_attn_sfs": None}, TypeError, "sage_attn_sfs: None, must be a tuple of 4"),
    ({"num_elts_per_sage_attn_blk": (1, 4, 0, 1)}, NotImplementedError,
     r"num_elts_per_sage_attn_blk: \(1, 4, 0, 1\), must be \(0, 0, 0, 0\)"),
)  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD)
def test_refusals(change, error, message):
    with pytest.raises(error, match=f"^{message}"):
        ragged(**made() | {"is_causal": True} | change)
