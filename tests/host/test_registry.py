"""The registry of public functions: each row's function calls its maker, with its own arguments in their order; all
functions have a row and a good call, by which other tests find them."""

import ast
import inspect
from functools import partial

import pytest

import wrappers
from tests.support.good_calls import BOUND, NAMES, inputs_of
from wrappers.attention.call import AttentionCall
from wrappers.cache_write.call import CacheWriteCall
from wrappers.cache_write.quantize import DequantizeCall, QuantizeCall
from wrappers.flash_attn.api import CachedCall
from wrappers.indexer.logits import LogitsCall
from wrappers.latent.call import LatentCall
from wrappers.latent.gather import GatherCall
from wrappers.merge.checks import MergeCall
from wrappers.own import registry
from wrappers.own.registry import (
    ATTENTION,
    CACHE_WRITE,
    FUNCTIONS,
    INDEXER,
    LATENT,
    LATENT_READ,
    MERGING,
    QUANTIZATION,
    TOP_K,
)
from wrappers.topk.checks import TopKCall

KINDS = {
    ATTENTION: AttentionCall, TOP_K: TopKCall, CACHE_WRITE: CacheWriteCall, MERGING: MergeCall,
    LATENT: LatentCall,
    LATENT_READ: GatherCall, INDEXER: LogitsCall,
    QUANTIZATION: (QuantizeCall, DequantizeCall),
}  # fmt: skip
FORWARDS = "single_prefill_with_kv_cache_return_lse"  # calls another public function
ROWS = [row for row in FUNCTIONS if row.make is not None and row.name != FORWARDS]
NO_ROW = {"bind", "explain", "fast_decode_plan"}  # they take another function, or an object of a class


def of(row):
    return row.name


def parts_of(row):
    """The maker of a row, and the arguments of it that the row fixes."""
    return (row.make.func, row.make.keywords) if isinstance(row.make, partial) else (row.make, {})


def calls_of(row):
    """The calls in a function's body, by the name of what is called."""
    (function,) = ast.parse(inspect.getsource(row.function)).body
    names = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {node.func.id: node for node in names if isinstance(node.func, ast.Name)}


@pytest.mark.parametrize("row", ROWS, ids=of)
def test_a_function_passes_its_arguments_on_in_their_order(row):
    make, fixed = parts_of(row)
    call = calls_of(row)[make.__name__]
    made = [name for name, p in inspect.signature(make).parameters.items() if p.kind is not p.KEYWORD_ONLY]
    assert [ast.unparse(argument) for argument in call.args] == made
    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords} == fixed
    assert set(made) <= {*inspect.signature(row.function).parameters}
    assert [name for name in calls_of(row) if name == "run" or name.startswith("serve")]


@pytest.mark.parametrize("row", ROWS, ids=of)
def test_defaults_are_those_of_the_function(row):
    """Where a maker has defaults, for the makers of other functions that call it."""
    public = inspect.signature(row.function).parameters
    for name, parameter in inspect.signature(row.make).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
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
    assert isinstance(call, KINDS[row.family])
    assert (type(made) is CachedCall) == (name == "flash_attn_with_kvcache" and "k" in inputs)


def test_each_function_and_maker_is_named_once():
    names = [row.name for row in FUNCTIONS]
    assert len({*names}) == len(names)
    makers = [
        (parts_of(row)[0], str(parts_of(row)[1])) for row in FUNCTIONS if row.make and row.name != "cooperative_topk"
    ]
    assert len({*makers}) == len(makers)


def test_every_public_function_has_a_row_and_a_good_call():
    public = {name for name in wrappers.__all__ if inspect.isfunction(getattr(wrappers, name))}
    assert public - NO_ROW == {row.name for row in FUNCTIONS}
    for row in FUNCTIONS:
        assert getattr(wrappers, row.name) is row.function
        row.function(**inputs_of(row.name))


def test_functions_that_cannot_be_explained_or_bound_are_named():
    """With the reason and the functions that can; other functions raise TypeError."""
    for row in FUNCTIONS:
        for asker, served in ((wrappers.explain, NAMES), (partial(wrappers.bind, row.function), BOUND)):
            if row.name in served:
                continue
            inputs = inputs_of(row.name) | ({"function": row.function} if asker is wrappers.explain else {})
            why = (
                "it has torch operations and no kernel" if row.make is None else "it keeps no tensor from call to call"
            )
            said = rf"^function: {row.name}, not supported by (explain|bind): {why}; must be one of trtllm_batch_con"
            with pytest.raises(NotImplementedError, match=said):
                asker(**inputs)
    assert {"packbits", "get_seq_lens"} <= {row.name for row in FUNCTIONS} - {*NAMES}
    assert {"apply_rope", "merge_state", "nvfp4_quantize"} <= {*NAMES} - {*BOUND}
    with pytest.raises(TypeError, match="^function: bind, must be one of trtllm_batch_context_with_kv_cache, "):
        wrappers.bind(wrappers.bind)
