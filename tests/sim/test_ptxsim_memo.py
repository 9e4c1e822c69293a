"""Simulated launches that are not repeated: what counts as equal, and that nothing is lost."""

import pytest
import torch
from ptxsim.runner import RunResult

from tests.sim import memo


@pytest.fixture
def launch(tmp_path):
    """A launch that adds `number` to the first tensor; (its result, whether it ran)."""

    def run(*args, facts="kernel"):
        ran = []

        def simulate():
            ran.append(True)
            args[0].add_(args[-1])
            return RunResult(7, {"loads": 3})

        return memo.recall(tmp_path, facts, args, simulate), bool(ran)

    return run


def matrix() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


def test_an_equal_launch_gives_the_same_memory_and_result(launch):
    first, second = matrix(), matrix()
    assert launch(first[1:, :2], 5) == (RunResult(7, {"loads": 3}), True)
    assert launch(second[1:, :2], 5) == (RunResult(7, {"loads": 3}), False)
    assert torch.equal(first, second) and second[1, 0] == 9


def test_memory_that_tensors_share_is_put_back_once(launch):
    for ran in (True, False):
        whole = matrix()
        assert launch(whole[0], whole[1], whole[:, 1], 5)[1] is ran
        assert whole[0].tolist() == [5.0, 6.0, 7.0, 8.0] and whole[1, 1] == 5


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        ((matrix()[1:, :2] + 0, 5), "kernel"),  # other strides
        ((matrix()[:2, :2], 5), "kernel"),  # another place in memory
        ((matrix()[1:, :2].view(torch.int32), 5), "kernel"),
        ((matrix().clone().index_fill_(1, torch.tensor(3), 0.5)[1:, :2], 5), "kernel"),  # beside the tensor
        ((matrix()[1:, :2], 6), "kernel"),
        ((matrix()[1:, :2], 5.0), "kernel"),
        ((matrix()[1:, :2], matrix()[1:, :2], 5), "kernel"),
        ((matrix()[1:, :2], 5), "other kernel"),
    ],
    ids=["strides", "offset", "type", "content", "number", "type of a number", "argument", "facts"],
)
def test_what_differs_runs(launch, args, facts):
    assert launch(matrix()[1:, :2], 5)[1]
    assert launch(*args, facts=facts)[1]


def test_a_fault_is_not_remembered(tmp_path):
    def fail():
        raise RuntimeError

    for _ in range(2):
        with pytest.raises(RuntimeError):
            memo.recall(tmp_path, "kernel", (matrix(),), fail)
    assert not list(tmp_path.iterdir())


def test_another_simulator_runs_again(launch, monkeypatch):
    assert launch(matrix(), 5)[1] and not launch(matrix(), 5)[1]
    monkeypatch.setattr(memo, "simulator", lambda: "other")
    assert launch(matrix(), 5)[1]
