"""`host.launch`: each of its rules, with a family that adds one to a tensor, on a machine that `FakeMachine` describes;
`host.schema`: operators from the fields of a call."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch

from tests.support.fake_machine import FakeMachine
from wrappers.cache_write.op import OPERATOR as WRITE_ROWS
from wrappers.host import launch, machine, schema
from wrappers.host.checks import check_integer, check_strided
from wrappers.host.plain import refuse_grad
from wrappers.merge.checks import MergeCall
from wrappers.merge.op import OPERATORS as MERGES
from wrappers.topk.checks import TopKCall
from wrappers.topk.op import OPERATOR as TOP_K


class Sum(NamedTuple):
    """A call: x and a number. fails: the kernel refuses it."""

    x: schema.GivenTensor
    number: int = 1
    out: schema.MaybeTensor = None
    fails: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class SumPlan(launch.Plan):
    like: torch.Tensor


seen: list[str] = []


def validate(call):
    seen.append("validate")
    check_strided("x", call.x)
    check_integer("number", call.number)
    refuse_grad({"x": call.x})


def plan_for(call, device_info):
    (like,), kept = launch.prototypes(call.x.device, (call.x.dtype, call.x.shape))
    return SumPlan(fn=machine.current.kernel("sum", None, "sm_90a"), flat=[None, None], kept=kept, like=like)


def bind(plan, call):
    out = torch.empty_like(plan.like)
    return [call.x, call.number if not call.fails else "refused", out], out


def compute(call):
    seen.append("reference")
    return call.x + call.number


FAMILY = launch.KernelFamily(
    key=lambda call: ("sum", call.x.shape),
    inputs=lambda call: (call.x, None),
    validate=validate,
    plan=plan_for,
    bind=bind,
    reference=compute,
    values=lambda call: seen.append("values"),
)
X = torch.arange(3.0)


def kernel(op, spec):
    def add(x, number, out):
        if isinstance(number, str):
            raise TypeError("argument 1 of the kernel")
        seen.append("kernel")
        out.copy_(x + number)

    return add


@pytest.fixture
def here():
    seen.clear()
    with machine.override(FakeMachine(kernel)) as found:
        found.checks_launches = False  # of a kernel that adds a number
        yield found


def events(call):
    """The result of a call, and what happened in it."""
    seen.clear()
    found = launch.run(FAMILY, call)
    assert torch.equal(found, call.x + call.number)
    return seen.copy()


def test_a_call_is_validated_once_for_all_of_its_key(here):
    assert events(Sum(X)) == ["validate", "kernel"]
    assert events(Sum(X, 2)) == events(Sum(X + 1.0)) == ["kernel"]
    assert events(Sum(X[:2])) == ["validate", "kernel"] and len(here.plans) == 2


def test_the_reference_is_never_kept():
    for _ in range(2):
        with machine.override(machine.HostMachine()) as found:
            assert events(Sum(X)) == ["validate", "reference"] and not found.plans


def test_what_fails_is_validated_for_its_reason(here):
    """Before there is a plan and with one; if the check finds nothing, the error of the kernel remains."""
    for _ in range(2):
        with pytest.raises(TypeError, match="^x: str, must be a torch.Tensor"):
            launch.run(FAMILY, Sum("x"))
        with pytest.raises(TypeError, match="^argument 1 of the kernel"):
            launch.run(FAMILY, Sum(X, fails=True))
        with pytest.raises(TypeError, match="^number: 'one', must be an int"):
            launch.run(FAMILY, Sum(X, "one"))
        events(Sum(X))


def test_what_requires_grad_is_refused_in_grad_mode(here):
    events(Sum(X))
    learnt = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="^x: requires grad"):
        launch.run(FAMILY, Sum(learnt))
    with torch.no_grad():
        assert events(Sum(learnt)) == ["kernel"]


def test_launches_are_made_on_the_device_of_the_first_tensor(here):
    """`FakeMachine` refuses a launch while another device is current."""
    here.devices, here.device = 2, 1
    for _ in range(2):
        events(Sum(X))
        assert here.device == 1


def test_a_graph_owns_what_its_capture_allocates(here):
    here.capturing = True
    assert events(Sum(X)) == events(Sum(X)) == ["validate", "kernel"] and not here.plans
    here.capturing = False
    assert events(Sum(X)) == ["validate", "kernel"] and len(here.plans) == 1


def test_all_is_checked_on_request_but_in_captures(here, monkeypatch):
    monkeypatch.setattr(launch, "checking", lambda: True)
    assert events(Sum(X)) == ["validate", "validate", "values", "kernel"]
    assert events(Sum(X)) == ["validate", "values", "kernel"]
    here.capturing = True
    assert events(Sum(X)) == ["kernel"]


def test_which_calls_can_be_bound(here, monkeypatch):
    plan = launch.bindable(FAMILY, Sum(X))
    assert plan is launch.bindable(FAMILY, Sum(X, 2)) and seen == ["validate"] * 2 and [*here.plans.values()] == [plan]
    with pytest.raises(TypeError, match="^x: str"):
        launch.bindable(FAMILY, Sum("x"))
    nothing = replace(FAMILY, key=lambda call: "nothing", plan=lambda *given: replace_runs(plan_for(*given)))
    assert launch.bindable(nothing, Sum(X)) is None and torch.is_tensor(launch.run(nothing, Sum(X)))
    plan.single_device, here.device = False, 1
    assert launch.bindable(FAMILY, Sum(X)) is None
    here.capturing = True
    assert launch.bindable(FAMILY, Sum(X[:1])) is None
    here.capturing = False
    monkeypatch.setattr(launch, "checking", lambda: True)
    here.device = None
    here.plans.clear()
    assert launch.bindable(FAMILY, Sum(X)) is None
    with machine.override(machine.HostMachine()):
        assert launch.bindable(FAMILY, Sum(X)) is None


def replace_runs(plan):
    plan.runs = False
    return plan


# ---- operators


def test_arguments_are_the_fields_of_a_call():
    taken = schema.arguments(Sum, ("out",), fails="bool fails, Tensor? last")
    assert taken == ["Tensor x", "SymInt number", "Tensor(out!)? out", "bool fails, Tensor? last"]
    assert schema.arguments(Sum, x="", out="", fails="") == ["SymInt number"]


@pytest.mark.parametrize(
    "operator,call,written",
    [
        (TOP_K, TopKCall, {"out", "raw", "values", "indices"}),
        (WRITE_ROWS, None, {"k_cache", "v_cache", "k_sf", "v_sf", "q_out", "kv_lens_out"}),
        (MERGES["merge_states"], MergeCall, set()),
        (MERGES["merge_state"], MergeCall, set()),
        (MERGES["merge_state_in_place"], MergeCall, {"v", "s"}),
    ],
)
def test_operators_write_what_the_calls_write(operator, call, written):
    arguments = operator.overload._schema.arguments
    assert {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write} == written
    assert tuple(a.name for a in arguments) == operator.fields
    assert call is None or [f for f in call._fields if f in operator.fields] == [*operator.fields]
