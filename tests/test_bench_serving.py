"""The benchmark of mixed batches, chunks, small and ragged batches, on the CPU: cases, peers, parts, floors, plots, and
which kernel serves each case."""

from dataclasses import replace

import pytest
import torch

import wrappers
from bench import __main__ as command
from bench import decode, harness, prefill, serving, workload
from bench.cases import attention as cases
from bench.cases import serving as shapes
from cute_kernels.attention import dispatch
from tests.fake_machine import FakeMachine
from tests.test_bench import TOP, setup_of
from wrappers.host import machine

TARGETS = """
    prefill-bf16-d192x128-b1-s8192-h16x16-p64 prefill-bf16-d256-b1-s8192-h16x8-p64
    prefill-bf16-one-s512-h32x8-d128-p16 prefill-bf16-one-s1024-h32x8-d128-p16
    serve-bf16-chunks-h32x8-d128-p16 serve-bf16-mixed-h32x8-d128-p16
    decode-bf16-b1-s1024-h32x8-d128-p16 decode-bf16-b1-s8192-h32x8-d128-p16
    decode-bf16-b4-s4096-h32x8-d128-p16 decode-bf16-b8-s1024-h32x8-d128-p16
    decode-bf16-ragged-b256-h64x8-d128-p16 decode-fp8-ragged-b256-h64x8-d128-p16 decode-nvfp4-ragged-b256-h64x8-d128-p16
""".split()
CASES = {c.name: c for group in (shapes.PREFILL, shapes.DECODE, serving.CASES) for c in group.values()}
TINY = replace(
    shapes.SERVE["serve-bf16-mixed-h32x8-d128-p16"],
    name="serve-tiny",
    q_lens=(70, 30, 1, 1, 1),
    kv_lens=(90, 130, 40, 300, 17),
    heads_q=4,
    heads_kv=2,
    head_dim_qk=64,
    head_dim_vo=64,
)
TINY_CHUNKS = replace(TINY, name="serve-tiny-chunks", q_lens=(70, 30), kv_lens=(90, 130))


@pytest.fixture(autouse=True)
def one_input_set(monkeypatch):
    """Tiny caches would take turns by the thousand."""
    monkeypatch.setattr(harness, "L2_BYTES", 0)


# ---- cases


def test_names_are_those_of_the_targets():
    assert {*TARGETS} <= {*command.chosen_of(command.attention().cases, "")} and {*TARGETS} <= CASES.keys()
    for name, case in CASES.items():
        assert name == case.name and f"-h{case.heads_q}x{case.heads_kv}-" in name
        assert name.endswith(f"-p{case.page_size}")
        dims = case.head_dim_qk, case.head_dim_vo
        assert f"-d{dims[0]}x{dims[1]}-" in name or (f"-d{dims[0]}-" in name and dims[0] == dims[1])


@pytest.mark.parametrize("name", TARGETS)
def test_a_shipped_kernel_serves_each_case(name):
    """Of fewer keys, on which no plan depends: through the public function, on a machine of 132 SMs."""
    case, launched = CASES[name], []
    inputs = cases.make_inputs(replace(case, kv_lens=tuple(min(n, 40) for n in case.kv_lens)))
    fake = FakeMachine(lambda op, spec: lambda *flat: launched.append((op, spec)))
    with machine.override(fake):
        if name.startswith("decode"):
            decode.ours(inputs)()
        else:
            wrappers.trtllm_batch_context_with_kv_cache(**inputs)
        if name.startswith("serve"):
            for provider, own in serving.parts(inputs).items():
                serving.PARTS[provider](own)()
    assert {*launched} <= {*dispatch.shipped("sm_90a")}
    ops = [op for op, _ in launched]
    assert ops == {
        "decode": ["attention.decode"], "prefill": ["attention.sm90"],
        "serve": ["attention.sm90", *(["attention.sm90", "attention.decode"] if "mixed" in name else [])],
    }[name.partition("-")[0]]  # fmt: skip


# ---- shapes and floors


def test_work_of_requests_that_differ():
    """Against counting: a query token and the keys it sees, the diagonal by half."""
    shape = workload.shape_of(cases.make_inputs(TINY))
    assert (shape.q_lens, shape.kv_lens, shape.batch, shape.equal) == (TINY.q_lens, TINY.kv_lens, 5, False)
    pairs = sum(n - m + i + 0.5 for m, n in zip(TINY.q_lens, TINY.kv_lens) for i in range(m))
    assert shape.flops == 2 * 4 * (64 + 64) * pairs
    assert replace(shape, causal=False).flops == 2 * 4 * 128 * sum(m * n for m, n in zip(TINY.q_lens, TINY.kv_lens))
    seen = sum(min(n - m + i, 9) + 0.5 for m, n in zip(TINY.q_lens, TINY.kv_lens) for i in range(m))
    assert replace(shape, window=9).flops == 2 * 4 * 128 * seen
    assert shape.bytes == 2 * (4 * 103 * 128 + 2 * 577 * 128)
    wide = replace(shape, dim_qk=192, dim_vo=128)
    assert wide.flops == shape.flops * 320 / 128 and wide.bytes == shape.bytes * 320 // 128
    with pytest.raises(ValueError, match="requests: 1 to 70 query tokens of 17 to 300 tokens, must be the same"):
        _ = shape.length


@pytest.mark.parametrize("length", ["first", "shortest", "longest", "last"])
def test_check_looks_at_requests_that_stand_out(length):
    """An error in one of them is seen, whatever the random choice."""
    inputs = cases.make_inputs(TINY)
    right, _ = cases.reference_of(inputs)
    assert workload.check(inputs, right) is None
    lens = [*TINY.kv_lens]
    request = {"first": 0, "shortest": lens.index(17), "longest": lens.index(300), "last": 4}[length]
    wrong = right.clone()
    wrong[sum(TINY.q_lens[:request])] += 0.2
    for seed in range(3):
        assert workload.check(inputs, wrong, seed).startswith("off by")


# ---- rows of a run


def test_parts_hold_each_request_once():
    inputs = cases.make_inputs(TINY)
    own = serving.parts(inputs)
    assert [workload.shape_of(x).q_lens for x in own.values()] == [(70, 30), (1, 1, 1)]
    assert [workload.shape_of(x).kv_lens for x in own.values()] == [(90, 130), (40, 300, 17)]
    assert [(x["max_q_len"], x["max_kv_len"], x["batch_size"]) for x in own.values()] == [(70, 130, 2), (1, 300, 3)]
    want, _ = cases.reference_of(inputs)
    for name, x in own.items():
        serving.PARTS[name](x)()
    torch.testing.assert_close(inputs["out"].float(), want, rtol=1e-2, atol=1e-2)
    assert serving.parts(cases.make_inputs(TINY_CHUNKS)) == {}


@pytest.mark.parametrize("wrong", [lambda inputs: decode.ours(inputs)() * 2, lambda inputs: inputs["out"]])
def test_a_wrong_part_or_ours_that_fails_leaves_no_own_parts(monkeypatch, capsys, wrong):
    """One that is off, and one that writes nothing."""
    monkeypatch.setitem(serving.PARTS, "own-decode", lambda inputs: lambda: wrong(inputs))
    assert [r.provider for r in serving.measure(TINY, TOP, setup_of("ours"))] == ["ours", "floor"]
    assert "no row: own-decode: " in capsys.readouterr().out
    monkeypatch.setitem(prefill.PROVIDERS, "ours", lambda inputs: {}["gone"])
    assert serving.measure(TINY, TOP, setup_of("ours")) == []
    assert "no row: ours: KeyError: 'gone'" in capsys.readouterr().out
