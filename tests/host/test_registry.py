"""The registry of public functions: each row's function calls its maker, with its own arguments in their order."""

import ast
import inspect

import pytest

import wrappers
from tests.support.good_calls import NAMES, inputs_of
from wrappers.attention.call import AttentionCall
from wrappers.cache_write.call import CacheWriteCall
from wrappers.flash_attn.api import CachedCall
from wrappers.own import registry
from wrappers.own.registry import ATTENTION, CACHE_WRITE, FUNCTIONS, TOP_K
from wrappers.topk.checks import TopKCall

KINDS = {ATTENTION: AttentionCall, TOP_K: TopKCall, CACHE_WRITE: CacheWriteCall}
FORWARDS = "single_prefill_with_kv_cache_return_lse"  # calls another public function
ROWS = [row for row in FUNCTIONS if row.function.__name__ != FORWARDS]


def of(row):
    return row.function.__name__


def calls_of(row):
    """The calls in a function's body, by the name of what is called."""
    (function,) = ast.parse(inspect.getsource(row.function)).body
    names = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {node.func.id: node for node in names if isinstance(node.func, ast.Name)}


@pytest.mark.parametrize("row", ROWS, ids=of)
def test_a_function_passes_its_arguments_on_in_their_order(row):
    call = calls_of(row)[row.make.__name__]
    made = [*inspect.signature(row.make).parameters]
    assert [ast.unparse(argument) for argument in call.args] == made and not call.keywords
    assert "serve" in calls_of(row) and set(made) <= {*inspect.signature(row.function).parameters}


@pytest.mark.parametrize("row", ROWS, ids=of)
def test_defaults_are_those_of_the_function(row):
    """Where a maker has defaults, for the makers of other functions that call it."""
    public = inspect.signature(row.function).parameters
    for name, parameter in inspect.signature(row.make).parameters.items():
        default = parameter.default
        assert (
            default is parameter.empty
            or default == public[name].default
            and type(default) is type(public[name].default)
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_a_value(name):
    """Of the family's type; what the function would return or write is not there yet."""
    row, inputs = registry.row_of(getattr(wrappers, name)), inputs_of(name)
    made, call = registry.made_by(row.function, **inputs), registry.call_of(row.function, **inputs)
    assert type(call) is KINDS[row.family]
    assert (type(made) is CachedCall) == (name == "flash_attn_with_kvcache" and "k" in inputs)


def test_each_function_and_maker_is_named_once():
    assert len({*NAMES}) == len(NAMES)
    shared = {"persistent_topk", "cooperative_topk"}
    makers = [row.make for row in FUNCTIONS if row.function.__name__ not in shared]
    assert len({*makers}) == len(makers)
