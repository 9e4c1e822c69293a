"""FlashInfer's decode function of one request, against attention of its prefill function."""

import pytest
import torch

from tests.conftest import ARCH, ROOT
from tests.sim.workloads import distance, simulated
from wrappers import explain, single_decode_with_kv_cache, single_prefill_with_kv_cache

MEMORY = ROOT / "build" / "simulated"


def drawn(keys, layout="NHD", dim=64):
    gen = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(n, heads, dim, generator=gen).half() for n, heads in ((1, 8), (keys, 2), (keys, 2)))
    return (q[0], k, v) if layout == "NHD" else (q[0], k.transpose(0, 1), v.transpose(0, 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 9, "logits_soft_cap": 3.0}, {"pos_encoding_mode": "ROPE_LLAMA"},
     {"pos_encoding_mode": "ALIBI"}, {"sm_scale": 0.2, "q_scale": 2.0, "k_scale": 0.5, "v_scale": 3.0}],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("keys", [1, 37, 64])
def test_equals_the_prefill_function(keys, layout, options):
    q, k, v = drawn(keys, layout)
    out, lse = single_decode_with_kv_cache(q, k, v, layout, return_lse=True, **options)
    want = single_prefill_with_kv_cache(q[None], k, v, kv_layout=layout, return_lse=True, causal=True, **options)
    torch.testing.assert_close(out, want[0][0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, want[1][0], rtol=1e-5, atol=1e-5)


def test_ctas_share_the_keys():
    q, k, v = drawn(8192, dim=128)
    assert explain(q, k, v, function=single_decode_with_kv_cache, arch="sm_90a").runs.startswith("attention.decode")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 8, 64).half()}, ValueError, "q: shape (1, 8, 64), must have 2 dimensions"),
        ({"k": torch.zeros(37, 2, 32).half()}, ValueError, "k, v: K has head_dim 32, must be the query's, 64"),
        ({"v": torch.zeros(36, 2, 64).half()}, ValueError, "v: shape"),
        ({"kv_layout": "nhd"}, ValueError, "kv_layout: 'nhd', must be"),
        ({"use_tensor_cores": 1}, TypeError, "use_tensor_cores: 1, must be"),
    ],
)
def test_refusals(change, error, message):
    q, k, v = drawn(37)
    with pytest.raises(error) as found:
        single_decode_with_kv_cache(**{"q": q, "k": k, "v": v} | change)
    assert message in str(found.value)


@pytest.mark.kernels
@pytest.mark.parametrize("keys, dtype", [(300, torch.bfloat16), (320, torch.float16)])
def test_in_the_simulator(keys, dtype):
    """With keys that fill no pages and with keys that do, in kernels that other tests compile, too."""
    given = [t.to(dtype) for t in drawn(keys)]
    with simulated(ARCH, [], 3, memory=MEMORY):
        out, lse = single_decode_with_kv_cache(*given, return_lse=True)
    want = single_decode_with_kv_cache(*given, return_lse=True)
    assert distance(out, want[0].float(), 1e-2) <= 1 and distance(lse, want[1], 1e-3) <= 1
