"""Operands in shared memory: rings of stages, each with a pipeline.

An op's `shared` calls `allocate`, `make_pipes` and `join` for the list of its operands (`..operands`), in the order in
which its memory is laid out. Its roles read `s.k` and `s.v`, two names of one ring if K and V are one operand.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from ...device import copy, layout, pipeline
from .. import precision
from ..operands import Operand, V
from . import bulk, gather, scales, source
from .pages import LoadTarget

LANES = 32  # per warp that copies by cp.async: each lane arrives


class OperandSmem(NamedTuple):
    """An operand in shared memory. smem, pipe: the stages that MMAs read, (rows, columns, stages), and their pipeline.
    raw, raw_pipe: those that it is loaded to, the same ones unless it is prepared. scales: scale factors of raw stages,
    None if the cache has none. pipes: those of the groups of columns of raw stages (`pages.column_groups`), of which
    raw_pipe is the first."""

    smem: cute.Tensor
    raw: cute.Tensor
    pipe: pipeline.Pipeline
    raw_pipe: pipeline.Pipeline
    scales: Any
    pipes: tuple[pipeline.Pipeline, ...]


def cached(a, x: Operand):
    """Return the tensors of the cache that an operand is loaded from: their columns lie side by side."""
    if x.tensor == V:
        return (a.kv.v,)
    return (a.kv.k,) if a.kv.k_rope is None else (a.kv.k, a.kv.k_rope)


def source_operand(spec, a, x: Operand):
    """Make the operand of the source, which loads `x`. Called on the host."""
    parts = cached(a, x)
    width = x.bits if spec.kv.record or spec.tile.bulk_rows else parts[0].element_type.width
    made = source(spec).operand(spec, parts, (x.rows, x.columns * x.bits // width), x.stages)
    if not spec.kv.extra:
        return made
    return gather.with_extra(made, tuple(t for t in (a.kv.extra_k, a.kv.extra_k_rope) if t is not None))


def allocate_stages(spec, smem, shape, stages):
    """Allocate stages that MMAs read, in their type. shape: (rows, columns) of a stage."""
    dtype = precision.of(spec).mma_type
    kind = layout.smem_layout(shape, stages, dtype)
    return smem.allocate_tensor(dtype, kind.outer, 1024, kind.inner)


def allocate(spec, smem, plan, operands):
    """Allocate the stages of all operands: those that they are loaded to, then those that are prepared. Return
    (`smem`, `raw`) of each, see `OperandSmem`."""
    raw = [copy.allocate(smem, plan.kv[x.tensor], loaded_type(spec, plan.args, x)) for x in operands]
    return [(_prepared(spec, smem, x, loaded), loaded) for x, loaded in zip(operands, raw, strict=True)]


def loaded_type(spec, a, x: Operand):
    """Return the type of the stages that an operand is loaded to."""
    if spec.tile.bulk_rows:
        return cutlass.Uint8
    return precision.of(spec).mma_type if spec.kv.record else cached(a, x)[0].element_type


def _prepared(spec, smem, x: Operand, raw):
    if x.prepared is None:
        return raw
    shape = (x.columns, x.rows) if x.prepared.transposed else (x.rows, x.columns)
    return allocate_stages(spec, smem, shape, x.prepared.stages)


def arrivals(spec, roles, x: Operand):
    """Return the arrivals that complete a loaded stage: one per load warp (TMA) or per lane of it (cp.async), and one
    per lane that copies scale factors; of packed records one per mma warp, which converts them."""
    if spec.tile.bulk_rows:
        return bulk.arrivals(spec) * roles.warps(x.load_role)
    if spec.kv.record:
        return roles.warps("mma")
    each = 1 if spec.kv.source == "tma" else LANES
    return each * roles.warps(x.load_role) + LANES * roles.warps("load_scales")


def readers(spec, roles, x: Operand):
    """Return the arrivals that free a loaded stage: one per warp that reads it, in all CTAs of the cluster. Where V
    lies in K, that is one arrival behind both MMAs, also of a warp that does not read a group of columns. A warp that
    prefetches counts as one that reads."""
    if x.prepared:
        return roles.warps(x.prepare_role)
    return roles.warps("mma") * spec.tile.cluster + roles.warps("prefetch")


def make_raw_pipe(spec, smem, roles, x: Operand):
    """Make the pipeline of the stages that an operand is loaded to."""
    return pipeline.make(smem, x.stages, arrivals(spec, roles, x), readers(spec, roles, x))


def make_pipe(smem, roles, x: Operand, raw_pipe):
    """Return the pipeline of the stages that MMAs read: `raw_pipe`, unless the operand is prepared."""
    if x.prepared is None:
        return raw_pipe
    return pipeline.make(smem, x.prepared.stages, roles.warps(x.prepare_role), roles.warps("mma"))


def make_pipes(spec, smem, roles, x: Operand):
    """Make the pipelines of an operand. Return (`pipe`, `raw_pipe`, and those of further groups of columns)."""
    raw_pipe, *more = (make_raw_pipe(spec, smem, roles, x) for _ in range(x.groups))
    return make_pipe(smem, roles, x, raw_pipe), raw_pipe, *more


def join(spec, smem, operands, stages, pipes) -> dict[str, OperandSmem]:
    """Allocate the scale factors. Return the memory of K and V by name: K is in the first operand, V in the last.
    stages: from `allocate`. pipes: from `make_pipes`, of each operand."""
    found = [
        OperandSmem(read, raw, pipe, loaded[0], scales.allocate(spec, smem, x.columns, x.stages), tuple(loaded))
        for x, (read, raw), (pipe, *loaded) in zip(operands, stages, pipes, strict=True)
    ]
    return {"k": found[0], "v": found[-1]}


def operand_smem(s, which) -> OperandSmem:
    """Return the memory of K or V (`which`, of `pages`)."""
    return (s.k, s.v)[which]


def load_target(plan, s, which):
    """Return where a load role of K or V puts its blocks."""
    x = operand_smem(s, which)
    return LoadTarget(plan.kv[which], x.raw, x.pipes)
