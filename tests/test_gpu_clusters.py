"""Prefill of head_dim 512 on a Hopper GPU: clusters of two CTAs, against the fp32 reference and against itself bit by
bit. The fixture `clusters` chooses these kernels; the table of tiles does not."""

import math
from dataclasses import replace

import pytest
import torch

from bench.cases import attention as cases
from cute_kernels.attention import dispatch
from tests import gpu
from tests.conftest import ARCH
from tests.gpu import grid, same
from wrappers import trtllm_batch_context_with_kv_cache

NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)
pytestmark = [
    pytest.mark.skipif(NO_HOPPER, reason="needs an sm_90 device"),
    pytest.mark.usefixtures("clusters"),
]

BASE = cases.AttentionCase("", heads_q=8, heads_kv=2, head_dim_qk=512, head_dim_vo=512, data="peaks", sink=True)
CASES = grid(
    BASE,
    {"causal": {}, "full": {"causal": False}},
    {
        "rows of the first CTA alone": {"q_lens": (130, 64, 257), "kv_lens": (130, 999, 2000)},
        "packed and not": {"q_lens": (1, 300, 0, 64, 65), "kv_lens": (1500, 333, 40, 64, 3000), "page_size": 16},
        "one": {"q_lens": (2999,), "kv_lens": (2999,), "page_size": 64},
        "modifiers": {"window_left": 700, "soft_cap": 9.0, "q_lens": (513,) * 5, "kv_lens": (1111,) * 5},
    },
)


@pytest.mark.parametrize("case", CASES)
def test_clusters_of_ctas(case):
    assert dispatch.select(gpu.problem_of(case), ARCH)[1].tile.cluster == 2
    inputs = cases.make_inputs(case, torch.device("cuda", 0))
    got = gpu.run("context", inputs)
    gpu.as_expected(case, got, cases.reference_of(inputs))
    for _ in range(3):
        same(gpu.run("context", inputs), got)


def test_a_graph_of_many_launches():
    """The counter of tiles is left as it was found, by clusters too."""
    case = replace(BASE, q_lens=(300, 40, 129), kv_lens=(700, 1000, 129))
    inputs = cases.make_inputs(case, torch.device("cuda", 0))
    first = gpu.run("context", inputs)[0]
    graph, _ = gpu.captured(trtllm_batch_context_with_kv_cache, inputs)
    for _ in range(20):
        inputs["out"].fill_(math.nan)
        graph.replay()
        assert torch.equal(inputs["out"].view(first.shape), first)
