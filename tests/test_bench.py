"""The benchmark's arithmetic, on the CPU: timing with a fake clock, checks of results, csv, plots, ncu's output."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench import decode, harness, prefill, providers, readme, timing, workload
from bench.cases import attention as cases
from bench.results import Environment


class FakeClock:
    """Each call costs what `cost` says, times a factor that grows with every call: a GPU that heats up."""

    def __init__(self, cost, drift=0.0):
        self.cost, self.drift, self.calls, self.log = cost, drift, 0, []

    def measure(self, call, sets):
        total = 0.0
        for i in sets:
            name = call(i)
            self.log.append((name, i))
            total += self.cost[name] * (1 + self.drift * self.calls)
            self.calls += 1
        return total / len(sets)


def named(*names):
    return {name: (lambda i, name=name: name) for name in names}


@pytest.mark.parametrize("bytes_", [1, 4 << 20, 30 << 20, 99 << 20, 100 << 20, 500 << 20])
def test_rotation_passes_twice_the_l2_before_a_set_returns(bytes_):
    l2 = 50 << 20
    count = timing.input_sets(bytes_, l2)
    assert max((count - 1) * bytes_, bytes_) >= 2 * l2 or bytes_ * count >= 2 * l2
    assert count == 1 or (count - 1) * bytes_ >= 2 * l2 > (count - 2) * bytes_


def test_every_call_takes_the_next_input_set():
    clock = FakeClock({"a": 900.0})
    timing.interleave(named("a"), clock, sets=3, rounds=4, warmup=2, target_us=2000)
    assert [i for _, i in clock.log] == [n % 3 for n in range(2 + 4 * 2)]


def test_a_drifting_clock_does_not_move_the_ratio():
    """One provider after the other would show 2 here: the second half of the run is half as fast."""
    clock = FakeClock({"a": 1000.0, "b": 1000.0}, drift=0.01)
    times = timing.interleave(named("a", "b"), clock, sets=1, rounds=50, target_us=1000)
    assert times["a"].p90 / times["a"].p10 > 1.3  # the drift is there
    assert times["a"].median / times["b"].median == pytest.approx(1, abs=0.01)


def test_each_round_holds_each_provider_and_the_order_turns():
    clock = FakeClock({"a": 1e4, "b": 1e4, "c": 1e4})
    timing.interleave(named("a", "b", "c"), clock, sets=1, rounds=3, warmup=1, target_us=1)
    rounds = ["".join(n for n, _ in clock.log[3 + 3 * r : 6 + 3 * r]) for r in range(3)]
    assert rounds == ["abc", "bca", "cab"]


def sdpa(inputs, causal):
    args = [t.transpose(1, 2) for t in workload.contiguous(inputs)]
    out = torch.nn.functional.scaled_dot_product_attention(*args, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_check_takes_right_results_and_refuses_wrong_ones(causal):
    inputs = cases.make_inputs(replace(prefill.case_of("tiny", (70, 70), causal), page_size=16))
    right = sdpa(inputs, causal)
    assert workload.check(inputs, right) is None
    assert workload.check(inputs, sdpa(inputs, not causal))  # the other mask
    assert workload.check(inputs, right.roll(1, dims=1))  # heads in another order
    assert workload.check(inputs, right * 1.1)
    assert workload.check(inputs, right[:, :, :-1])
    hole = right.clone()
    hole[3, 1, 5] = float("nan")
    assert workload.check(inputs, hole) == "not finite"


def test_check_knows_windows():
    inputs = cases.make_inputs(replace(cases.decoding(2, 300, (2, 1), 64, 64), window_left=9))
    right, _ = cases.reference_of(inputs)
    assert workload.check(inputs, right) is None
    assert workload.check(inputs, cases.reference_of(inputs | {"window_left": -1})[0]).startswith("off by")


@pytest.mark.parametrize("kv_dtype", ["", "fp8", "nvfp4"])
def test_check_reads_every_cache_and_allows_less_where_outputs_are_small(kv_dtype):
    """Outputs of 20000 keys are about 0.01: an error of a tenth of that is not rounding."""
    inputs = cases.make_inputs(cases.decoding(3, 20_000, (2, 1), 64, 64, kv_dtype, tokens=2))
    right, _ = cases.reference_of(inputs)
    assert workload.check(inputs, right) is None
    assert workload.check(inputs, right * 0.85).startswith("off by")
    late = right.clone()
    late[-1, -1] += 0.005  # the last head of the last token
    assert workload.check(inputs, late).startswith("off by")


ENV = Environment("2026-01-02T03:04:05+00:00", "abc123", "nvidia-h200", "580.1", "2.13.0")


TOP = harness.Ceilings(700.0, 4000.0)


class WallClock:
    def measure(self, call, sets):
        for i in sets:
            call(i)
        return 2000.0


def setup_of(*providers):
    return harness.Setup(providers, 2, "cpu", WallClock(), WallClock())


def test_a_run_on_the_cpu_gives_checked_rows(monkeypatch, capsys):
    """The whole path with the reference as `ours`, a right peer, a wrong one and one that is missing."""

    def contiguous(factor, inputs):
        def call():
            return factor * sdpa(inputs, inputs["causal"])

        return {"slow": (call, lambda o: o), "": (call, lambda o: o)}

    def missing(inputs):
        raise ImportError("not here")

    peers = {"right": partial(contiguous, 1), "wrong": partial(contiguous, 2), "missing": missing}
    monkeypatch.setattr(prefill, "PROVIDERS", {"ours": providers.ours, **peers})
    case = prefill.case_of("prefill-tiny", (40, 40), True)
    setup = setup_of("ours", *peers)
    found = prefill.measure(case, TOP, setup) + prefill.host(case, setup)
    assert [(r.provider, r.note) for r in found] == [
        ("ours", ""), ("right", "slow"), ("floor", ""), ("ours", ""), ("right", "slow")
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "no row: wrong: off by" in said and "no row: missing: ImportError: not here" in said
    rows = harness.rows_of(found[:3], ENV)
    assert [r.case for r in rows] == ["prefill-tiny"] * 3 and rows[1].ratio_to_ours == pytest.approx(1)
    assert rows[2].tflops == 700 and rows[2].time_us == pytest.approx(case_flops(case) / 700e6)
    assert "prefill-tiny" in harness.table(found, rows, TOP)


def case_flops(case):
    return 4 * sum(n * n for n in case.q_lens) * case.heads_q * case.head_dim_qk / 2


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_decode_run_on_the_cpu_gives_checked_rows(monkeypatch, capsys, tokens):
    """The reference as `ours`, and a peer that is wrong in one request."""
    monkeypatch.setattr(harness, "L2_BYTES", 0)  # one input set
    case = cases.decoding(3, 70, (4, 2), 64, 16, tokens=tokens)

    def wrong(inputs):
        def run():
            out = decode.ours(inputs)().clone()
            out[-1] += 0.1
            return out

        return run

    monkeypatch.setattr(decode, "PROVIDERS", decode.PROVIDERS | {"wrong": wrong})
    setup = setup_of("ours", "wrong", "flashinfer")
    found = decode.measure(case, TOP, setup) + decode.host(setup)
    assert [(r.case, r.provider) for r in found] == [
        (case.name, "ours"), (case.name, "batch-invariant"), (case.name, "floor"), ("host-decode", "ours")
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "no row: wrong: off by" in said and "no row: flashinfer: " in said
    assert ("ModuleNotFoundError" if tokens == 1 else "masks") in said and case.name.endswith("-q3") == (tokens == 3)
    assert decode.kv_bytes(case) == 3 * 70 * 2 * 2 * 64 * 2
    assert found[0].gbps == pytest.approx(decode.kv_bytes(case) / 2000e3)
    rows = harness.rows_of(found, ENV)
    assert rows[2].time_us == pytest.approx(decode.kv_bytes(case) / 4000e3)
    text = "\n".join(readme.SECTIONS["measured-decode"].paragraphs("nvidia-h200", rows))
    assert f"| `{case.name}` | 2000.0 | 0 |" in text and "| 2000.0 (1.00) |" in text and "Host time" in text
