"""A bound `append_qkv`: other rows, places and positions than those of the call. Kernels are emulated on the CPU."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch

from bench.cases import cache_write as cases
from bench.cases.cache_write import CacheWriteCase
from wrappers import QueryOutput, append_qkv, bind
from wrappers.cache_write import plan

FULL = CacheWriteCase(heads=(4, 2), tokens=7, norm="shared", rope="cache")
CASES = {
    "copies": CacheWriteCase(),
    "a cache of one byte": CacheWriteCase("uint8", "uint8"),
    "e4m3": CacheWriteCase(cache="e4m3", scales="heads"),
    "nvfp4": CacheWriteCase(cache="nvfp4", places="lists"),
    "norm and rope": FULL,
    "slots of int64": replace(FULL, index=torch.int64),
    "Q of 8 bits": replace(FULL, cache="e4m3", q8=True),
    "Q in place": replace(FULL, in_place=True, places="table"),
    "angles": replace(FULL, rope="angles", places="lists"),
}


def others(inputs, seed):
    """Rows of the same forms as those of a call, with other values: (q, k, v)."""
    gen = torch.Generator().manual_seed(seed)

    def other(t):
        if t is None:
            return None
        fresh = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        return fresh.copy_(torch.randint(0, 100, t.shape, generator=gen) / (1 if t.dtype == torch.uint8 else 32))

    return [other(inputs.get(name)) for name in ("q", "k", "v")]


def written(inputs, rows, out, run):
    """Fill the cache with poison, make a call, and return the bytes of the cache and of the Q that the call returns."""
    cache = cases.tensors_of((inputs["cache"].kv, inputs["cache"].sf))
    for t in cache:
        t.view(torch.uint8).fill_(cases.POISON)
    got = run(*rows, out)
    found = [t.contiguous().view(torch.uint8).clone() for t in (*cache, *cases.tensors_of(got))]
    return found, got is not None


def equal(got, want):
    return got[1] == want[1] and all(map(torch.equal, got[0], want[0]))


@pytest.mark.parametrize("name", CASES)
def test_other_rows(launches, looked_up, name):
    inputs = cases.make_inputs(CASES[name])
    layer = bind(append_qkv, **inputs)
    assert not launches and len(looked_up) == 1
    for seed in range(3):
        rows = others(inputs, seed)
        out = inputs.get("out") and inputs["out"].out
        if CASES[name].in_place:
            rows[0] = out.copy_(rows[0])
        first = written(inputs, rows, out, lambda q, k, v, out: layer.run(q, k, v, out=out))
        assert len(launches) == 1 and len(looked_up) == 1
        if CASES[name].in_place:
            rows[0] = out.copy_(others(inputs, seed)[0])
        rest = {name: value for name, value in inputs.items() if name not in "qkv"}
        want = written(inputs, rows, out, lambda q, k, v, _: append_qkv(q, k, v, **rest))  # noqa: B023
        assert equal(first, want)
        launches.clear()
        looked_up[:] = [None]


@pytest.fixture
def looked_up(here, monkeypatch):
    """List the calls of which the plan was looked up."""
    found, family = [], plan.FAMILY
    key = lambda call: found.append(call) or family.key(call)  # noqa: E731
    monkeypatch.setattr(plan, "FAMILY", replace(family, key=key))
    return found


def test_other_places_and_positions(launches, looked_up):
    inputs = cases.make_inputs(FULL)
    layer, rows = bind(append_qkv, **inputs), others(inputs, 1)
    slots, at = inputs["places"].flip(0), inputs["rope"].positions.flip(0)
    got = written(inputs, rows, None, lambda q, k, v, _: layer.run(q, k, v, slots, at))
    assert len(looked_up) == 1
    given = inputs | dict(zip("qkv", rows), places=slots, rope=inputs["rope"]._replace(positions=at))
    assert equal(got, written(inputs, rows, None, lambda *_: append_qkv(**given)))
    wide = slots.long()  # another form: the call is served as by the function
    assert equal(written(inputs, rows, None, lambda q, k, v, _: layer.run(q, k, v, wide, at)), got)
    assert len(looked_up) == 3


def test_another_number_of_tokens_is_served_as_by_the_function(launches):
    inputs = cases.make_inputs(FULL)
    layer, rows = bind(append_qkv, **inputs), others(inputs, 2)
    q, k, v = (t[:5] for t in rows)
    slots, at = inputs["places"][:5], inputs["rope"].positions[:5]
    out = torch.empty(5, *q.shape[1:], dtype=q.dtype)
    got = written(inputs, (q, k, v), out, lambda q, k, v, out: layer.run(q, k, v, slots, at, out))
    given = {"q": q, "k": k, "v": v, "places": slots, "rope": inputs["rope"]._replace(positions=at)}
    want = written(inputs, (), out, lambda out: append_qkv(**inputs | given | {"out": QueryOutput(out)}))
    assert equal(got, want)


def test_an_output_is_new_unless_one_is_given(launches):
    inputs = cases.make_inputs(replace(FULL, rope="angles"))
    bound, mine = inputs.pop("out").out, torch.empty_like(inputs["q"])
    layer, rows = bind(append_qkv, **inputs), [inputs[name] for name in "qkv"]
    first, second = layer.run(*rows), layer.run(*rows)
    assert first is not second and first.data_ptr() != second.data_ptr() and torch.equal(first, second)
    assert layer.run(*rows, out=mine) is mine and torch.equal(mine, first)
    kept = bind(append_qkv, **inputs, out=QueryOutput(bound))
    assert kept.run(*rows) is bound and torch.equal(bound, first)


def test_rows_that_overlap_the_cache_are_refused(launches):
    inputs = cases.make_inputs(CacheWriteCase())
    layer, (_, k, v) = bind(append_qkv, **inputs), others(inputs, 0)
    inside = inputs["cache"].kv[0, 0].as_strided(k.shape, k.stride())
    with pytest.raises(ValueError, match=r"^cache.kv \(K\): .* overlaps the memory of k"):
        layer.run(None, inside, v)
    assert not launches


def test_wrong_arguments_are_refused_by_name(launches):
    inputs = cases.make_inputs(FULL)
    layer, (q, k, v) = bind(append_qkv, **inputs), others(inputs, 0)
    with pytest.raises(TypeError, match="^q: None, must be a torch.Tensor"):
        layer.run(None, k, v)
    with pytest.raises(TypeError, match="^q: list"):
        layer.run([1], k, v)
    with pytest.raises(TypeError, match="^v: list"):
        layer.run(q, k, [1])
    with pytest.raises(ValueError, match=r"^k: shape \(7, 2, 64\)"):
        layer.run(q, k[..., :64], v)
    with pytest.raises(TypeError, match="^places: dtype torch.float32"):
        layer.run(q, k, v, inputs["places"].float())
    with pytest.raises(TypeError, match="^rope.positions: list"):
        layer.run(q, k, v, positions=[1])
    with pytest.raises(ValueError, match=r"^out.out: shape \(1, 4, 128\)"):
        layer.run(q, k, v, out=torch.empty_like(q[:1]))
    with pytest.raises(RuntimeError, match="^k: requires grad"):
        layer.run(q, k.clone().requires_grad_(), v)
    plain = bind(append_qkv, None, k, v, inputs["cache"], inputs["places"])
    with pytest.raises(ValueError, match="^q: Tensor, must be None: the bound call has no q"):
        plain.run(q, k, v)
    with pytest.raises(ValueError, match="^out: Tensor, must be None: the bound call has no q"):
        plain.run(None, k, v, out=q)
    with pytest.raises(ValueError, match="^positions: Tensor, must be None: the bound call has none"):
        plain.run(None, k, v, positions=inputs["places"])
    lists = cases.make_inputs(replace(FULL, places="lists"))
    with pytest.raises(ValueError, match="^places: PageLists, must be None: the bound call has no slot mapping"):
        bind(append_qkv, **lists).run(lists["q"], lists["k"], lists["v"], lists["places"])
    assert not launches
    with pytest.raises(ValueError, match="^places: "):
        bind(append_qkv, **inputs | {"places": inputs["places"][:0].view(0, 1)})


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_bound_append_may_be_copied(foreign, launches, how):
    """A copy binds at its first run. A deep one has caches of its own."""
    inputs = cases.make_inputs(FULL) | {"out": None}
    rows = [inputs[name] for name in "qkv"]
    layer = bind(append_qkv, **inputs)
    q = layer.run(*rows)
    other = how(layer)
    assert other._flat is None
    other._call.k_cache.view(torch.uint8).zero_()
    assert torch.equal(other.run(*rows), q) and other._flat is not None
    assert other._call.k_cache.view(torch.uint8).any() and torch.equal(other.run(*rows), q)
    assert (other._call.k_cache.data_ptr() == layer._call.k_cache.data_ptr()) == (how is copy.copy)
    with pytest.raises(TypeError, match="^q: None, must be a torch.Tensor"):
        how(layer).run(None, *rows[1:])


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_keeps_the_places_and_positions_that_were_bound(launches, how):
    """Those of its first run serve that run alone."""
    inputs = cases.make_inputs(FULL) | {"out": None}
    rows = [inputs[name] for name in "qkv"]
    layer = bind(append_qkv, **inputs)
    slots, positions = layer._call.slots.clone(), layer._call.transform.rope_positions.clone()
    wanted = written(inputs, rows, None, lambda *_: append_qkv(**inputs))
    other = how(layer)
    other.run(*rows, places=slots.flip(0), positions=positions + 1)
    assert other._flat is not None
    launch = other.run(*rows)
    assert torch.equal(launches[-1]["slots"], slots) and torch.equal(launches[-1]["rope_positions"], positions)
    assert torch.equal(launch, layer.run(*rows)) and wanted is not None


def test_rows_are_not_kept(quiet):
    inputs = cases.make_inputs(FULL)
    inputs["out"] = None
    rows = [inputs.pop(name) for name in "qkv"]
    layer, seen = bind(append_qkv, *rows, **inputs), [weakref.ref(t) for t in rows]
    layer.run(*rows)
    del rows
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_the_reference_runs_without_a_kernel():
    inputs = cases.make_inputs(FULL)
    rows = [inputs[name] for name in "qkv"]
    got = written(inputs, rows, None, lambda q, k, v, _: bind(append_qkv, **inputs).run(q, k, v))
    assert equal(got, written(inputs, rows, None, lambda *_: append_qkv(**inputs)))


def test_torch_compile_serves_it():
    inputs = cases.make_inputs(FULL)
    layer, rows = bind(append_qkv, **inputs), [inputs[name] for name in "qkv"]
    compiled = torch.compile(lambda q, k, v: layer.run(q, k, v), backend="eager", fullgraph=True)
    want = written(inputs, rows, None, lambda q, k, v, _: layer.run(q, k, v))
    assert equal(written(inputs, rows, None, lambda q, k, v, _: compiled(q, k, v)), want)
