"""The page docs/matrix.md: its calls are good ones, and its reasons name arguments or kernels."""

import inspect
import re
from dataclasses import replace

import pytest

from cute_kernels import catalog
from tools import asked, refusals
from tools.refusals import ANY, RefusalReasons

COLUMNS = [(table, column) for table in refusals.TABLES for column in table.columns]
OPS = {op for arch in ("sm_90a", "sm_100a") for op, _ in catalog.shipped(arch)}


def name_of(value):
    return getattr(value, "head", getattr(value, "title", None))


@pytest.mark.parametrize(("table", "column"), COLUMNS, ids=name_of)
def test_each_reason_names_an_argument_or_a_kernel(table, column):
    """A call of the page that is malformed would be refused with a reason of another kind, or refused as it is."""
    answers = refusals.answers_of(table, column)
    assert not answers["", ANY].hopper and len(answers) > 10
    names = OPS | set(inspect.signature(column.function).parameters) | {"qv"}
    names |= {"alibi_slopes", "dropout_p"}  # of **others
    for answer in answers.values():
        for reason in filter(None, answer):
            assert set(re.split(" and ", reason.split(":")[0])) <= names, reason


def test_a_function_without_an_argument_has_no_answer():
    _, column = next((t, c) for t, c in COLUMNS if c.head == "xqa")
    assert refusals.lacking(column, "option", {"cap": 30.0}) and refusals.lacking(column, "output", {"out": "nvfp4"})
    assert not refusals.lacking(column, "output", {"out": "e4m3"})


def test_rows_of_another_record_with_as_many_bytes_have_no_answer():
    table = next(t for t in refusals.TABLES if t.title == "Latent attention")
    column = next(c for c in table.columns if c.head == "flash_mla")
    for record, mistaken in (("528", False), ("528_fp32", True), ("656", False)):
        wanted = replace(column.base, chosen=True, record=record, dim=asked.RECORDS[record].columns)
        assert refusals.mistaken(column, wanted, column.make(wanted)) == mistaken


def test_kernels_of_other_rows_and_architectures_come_last():
    own = [("a", "head_dim 3: must be 4"), ("b", "head_dim 3: must be 4"), ("c", "rows 5"), ("d", "arch x: needs y")]
    assert refusals.reasons_of(own) == "a and b: head_dim 3: must be 4"
    assert refusals.reasons_of(own[2:]) == "c: rows 5" and refusals.reasons_of(own[3:]) == "d: arch x: needs y"


def test_values_with_one_reason_share_a_row():
    """The reason that refuses any call on Blackwell stands once."""
    answers = {
        ("", ANY): RefusalReasons("", "new"),
        ("a", "1"): RefusalReasons("", "new"),
        ("a", "2"): RefusalReasons("x|y", "new"),
    }
    answers |= {("a", "3"): RefusalReasons("x|y", ""), ("b", "4"): RefusalReasons("", "other")}
    assert list(refusals.refused(answers)) == [
        ["", ANY, "sm_100a", "new"], ["a", "2, 3", "", "x\\|y"], ["b", "4", "sm_100a", "other"],
    ]  # fmt: skip
    cells = [answer.cell for answer in answers.values()]
    assert cells == ["Hopper", "Hopper", "no", "Blackwell", "Hopper"]
