"""The benchmark of a trace on the CPU: its steps against rules that every scheduler keeps, its times and its report."""

from dataclasses import replace

import pytest

from bench import harness, prefill, readme, results, trace
from bench.trace import TraceRequest, TraceStep

TINY = trace.Trace("tiny", 6, 2.0, (40.0, 0.8), (4.0, 0.5), 32, 400, (4, 2), 64, 16)


class Clock:
    """A call takes as many microseconds as it has query tokens."""

    def measure(self, call, sets):
        assert len(sets) == 1
        return float(len(call(0)))


def test_steps_keep_the_rules():
    made = trace.requests_of(TINY)
    found = trace.steps_of(TINY, made)
    assert [r.known for r in made] == [r.total for r in made]
    assert sum(sum(step.q_lens) for step in found) == sum(r.total for r in made)
    for step in found:
        assert sum(step.q_lens) <= TINY.budget and sum(step.kv_lens) <= TINY.room
        assert all(0 < m <= n for m, n in zip(*step))
    assert any(1 in step.q_lens and max(step.q_lens) > 1 for step in found), "some steps mix"
    assert trace.steps_of(TINY, trace.requests_of(TINY)) == found, "the seed says all"
    assert trace.steps_of(TINY, trace.requests_of(replace(TINY, seed=1))) != found


def test_two_requests_by_hand():
    made = [TraceRequest(0, 50, 53), TraceRequest(1, 3, 5)]
    found = trace.steps_of(replace(TINY, budget=32), made)
    assert found == [
        TraceStep((32,), (32,)),
        TraceStep((18, 3), (50, 3)),  # the rest of the first prompt, and the second
        TraceStep((1, 1), (51, 4)),
        TraceStep((1, 1), (52, 5)),
        TraceStep((1,), (53,)),
    ]
    assert [r.first for r in made] == [1, 1]
    said = trace.report(made, found, [10.0, 20.0, 1.0, 2.0, 3.0])
    assert said.waits == {"p50": 20.0, "p90": 30.0, "p99": 30.0}
    assert said.steps == {"p50": 3.0, "p90": 20.0, "p99": 20.0}
    assert said.total == 36.0 and said.tokens == pytest.approx(58 / 36e-6)


def test_a_request_waits_for_room():
    made = [TraceRequest(0, 30, 40), TraceRequest(0, 20, 30)]
    found = trace.steps_of(replace(TINY, room=60), made)
    assert all(len(step.q_lens) == 1 for step in found) and made[1].first == 11
    with pytest.raises(ValueError, match="room: 39 tokens"):
        trace.steps_of(replace(TINY, room=39), [TraceRequest(0, 30, 40)])


def test_time_passes_where_nobody_is_there():
    made = [TraceRequest(0, 3, 4), TraceRequest(90, 3, 4)]
    assert len(trace.steps_of(TINY, made)) == 4


def test_a_run_on_the_cpu(monkeypatch, capsys):
    """The reference as `ours`; a peer that is wrong in some step has no row."""

    def peer(inputs):
        late = len(inputs["seq_lens"]) > 1
        variants = prefill.PROVIDERS["ours"](inputs)
        run, rows = variants[""]
        return {"": ((lambda: run() * 2) if late else run, rows)}

    monkeypatch.setitem(prefill.PROVIDERS, "wrong", peer)
    setup = harness.Setup(("ours", "wrong"), device="cpu", clock=Clock())
    found = trace.measure(setup, TINY)
    assert {row.provider for row in found} == {"ours"} and "no row: wrong" in capsys.readouterr().out
    names = [row.case.removeprefix("tiny-") for row in found]
    assert names == ["step-p50", "step-p90", "step-p99", "step-mean", "first-p50", "first-p90", "first-p99"]
    steps = trace.steps_of(TINY, trace.requests_of(TINY))
    assert found[2].timing.median == max(sum(step.q_lens) for step in steps)


def test_the_table_has_a_line_a_provider():
    def row(part, provider, us):
        return results.ResultRow("2026-01-01", "abc", "gpu", "1", "2", f"trace-x-h1-p8-{part}", provider, us)

    rows = [row("step-mean", "ours", 10.4), row("first-p99", "ours", 99.0), row("step-mean", "peer", 20.0)]
    text = readme.measured_trace({"gpu": rows})
    assert "| ours | 10 |  |  |  |  |  | 99 |" in text and "| peer | 20 |  |  |  |  |  |  |" in text
    assert readme.measured_trace({"gpu": []}) == "Not measured yet."
