"""The benchmark of the prefill family on the CPU: every form is measured, checked and refused where it is wrong."""

from dataclasses import replace
from functools import partial

import pytest

from bench import family
from tests.test_bench import TOP, setup_of

TINY = replace(family.PREFILL, name="family-tiny", q_lens=(70, 70), kv_lens=(70, 70), heads_q=4, heads_kv=2)


SETUP = setup_of("ours", "flashinfer")
OURS = [name for name in family.FORMS if name.startswith("ours")]


def test_all_forms_are_measured_and_checked(capsys):
    found = family.measure(TINY, TOP, SETUP)
    assert [r.provider for r in found] == [*OURS, "floor"] and {r.case for r in found} == {"family-tiny"}
    assert capsys.readouterr().out.count("no row: flashinfer-") == 3


@pytest.mark.parametrize("form", OURS)
def test_a_wrong_form_has_no_row(monkeypatch, capsys, form):
    """One that computes what another form does, or writes nothing."""
    page, _ = family.FORMS[form]
    wrong = family.context if form in ("ours-rope", "ours-alibi") else partial(family.paged, pos_encoding_mode="ALIBI")
    for make in (wrong, lambda inputs: lambda: inputs["out"]):
        monkeypatch.setattr(family, "FORMS", {form: (page, make)})
        assert not family.collect(TINY, SETUP)
        assert f"no row: {form}: " in capsys.readouterr().out
