"""The rows of packed records: the sections of their columns, and where in its cache a row is."""

from typing import Any, NamedTuple

from cutlass import Int64

from ...records import RECORDS, ROWS, LatentRecord
from . import gather
from .gather import RowPageIds

BOX = 64  # columns of a box
BYTES = {"e4m3": BOX, "e2m1": BOX // 2, "bf16": 2 * BOX}  # of a box


class RowSection(NamedTuple):
    """Boxes of columns that are stored alike. part: the tensor that has them. code: their type. first: the first box.
    boxes: their number. at: the byte of a row where they begin. factored: whether they have factors."""

    part: int
    code: str
    first: int
    boxes: int
    at: int
    factored: bool


def sections(form: LatentRecord, columns) -> list[RowSection]:
    """Return the sections of a record. columns: of each tensor that has a part of a row."""
    if not form.packed:  # values of 16 bits, or codes with one scale for all, which is a factor on the logits
        widths = [count // BOX for count in columns]
        return [RowSection(i, form.codes or "bf16", sum(widths[:i]), n, 0, False) for i, n in enumerate(widths)]
    found, latent = [RowSection(0, form.codes, 0, form.latent // BOX, 0, True)], form.latent // BOX
    if form.rotated and form.rotated_as != "codes":
        found.append(RowSection(0, form.rotated_as or "bf16", latent, form.rotated // BOX, form.rotated_at, False))
    return found


class RowSource(NamedTuple):
    """A cache. parts: its tensors. form: their record. page_size: of its pages, as a divisor."""

    parts: Any
    form: Any
    page_size: Any


def sources(spec, op, page_ids: RowPageIds) -> list[RowSource]:
    """Return the first cache and, if there is one, the second one."""
    found = [RowSource(op.gmem, RECORDS[spec.kv.record or ROWS], page_ids.page_size)]
    if spec.kv.extra:
        found.append(RowSource(op.extra, RECORDS[spec.kv.extra_record or ROWS], page_ids.extra_page_size))
    return found


def part_sizes(source: RowSource) -> list[int]:
    """Return the bytes of a row in each of the tensors of a cache."""
    return [source.form.row or x.shape[3] * x.element_type.width // 8 for x in source.parts]


class RowPlace(NamedTuple):
    """Where a row is: its address in each tensor, and that of its factors. exists: whether it has a page."""

    starts: Any
    factors: Any
    exists: Any


def place_of(spec, source: RowSource, page_ids: RowPageIds, c, row) -> RowPlace:
    """Return where a row, given by its number, is in a cache. c: the register that has its page, or its slot."""
    parts, form, page_size = source
    page, row = gather.place_of(spec, page_ids._replace(page_size=page_size), c, row)
    bytes_of = [x.element_type.width // 8 for x in parts]
    begins = [x.iterator.toint() + Int64(page) * x.stride[0] * n for x, n in zip(parts, bytes_of, strict=True)]
    exists = (page >= 0) & (page < parts[0].shape[0])
    if form.planar:
        factors = begins[0] + Int64(parts[0].shape[2]) * form.row + Int64(row) * form.factor_row
        return RowPlace([begins[0] + Int64(row) * form.row], factors, exists)
    each = zip(begins, parts, bytes_of, strict=True)
    starts = [begin + Int64(row) * x.stride[2] * n for begin, x, n in each]
    return RowPlace(starts, starts[0] + form.factors_at, exists)
