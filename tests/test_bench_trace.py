"""The benchmark of a trace on the CPU: its steps against rules that every scheduler keeps, its times and its report."""

from dataclasses import replace

import pytest

from bench import trace
from bench.trace import TraceRequest, TraceStep

TINY = trace.Trace("tiny", 6, 2.0, (40.0, 0.8), (4.0, 0.5), 32, 400, (4, 2), 64, 16)


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
