"""The benchmark of the prefill family on the CPU: every form is measured in one case, checked and refused where it is
wrong."""

import re
from dataclasses import replace
from functools import partial

import pytest

from bench import family, readme
from bench.results import Environment
from tests.test_bench import TOP, setup_of

TINY = replace(family.PREFILL, name="family-tiny", q_lens=(70, 70), kv_lens=(70, 70), heads_q=4, heads_kv=2)


SETUP = setup_of("ours", "flashinfer")
OURS = [name for name in family.FORMS if name.startswith("ours")]


def test_every_form_is_measured_in_one_case(capsys):
    """The forms with a case of their own are not measured with the others, so that no two tables differ about one."""
    found = family.measure(TINY, TOP, SETUP)
    plain = [name for name in OURS if name not in family.OWN_CASE]
    assert [r.provider for r in found] == [*plain, "floor"] and {r.case for r in found} == {"family-tiny"}
    assert capsys.readouterr().out.count("no row: flashinfer-") == 3
    assert {form for form, _ in family.MODIFIED.values()} == {name for name in OURS if name not in plain}


def test_the_table_has_the_forms_of_today():
    """Older rows of a form that now has a case of its own are not shown."""
    env = Environment("2026-01-02", "abc123", "g", "1.0", "2.0")
    rows = [env.row("family-bf16", provider, 2.0) for provider in ("ours", "ours-paged", "ours-mask", "floor")]
    rows += [env.row("family-decode", provider, 3.0) for provider in ("ours", "ours-p1")]
    text = "\n".join(readme.family("g", rows))
    assert re.findall(r"^\| `family-[\w-]+` \| ([\w-]+)", text, re.M) == ["ours", "ours-paged", "ours", "ours-p1"]


@pytest.mark.parametrize("form", OURS)
def test_a_wrong_form_has_no_row(monkeypatch, capsys, form):
    """One that computes what another form does, or writes nothing."""
    page, _ = family.FORMS[form]
    wrong = family.context if form in ("ours-rope", "ours-alibi") else partial(family.paged, pos_encoding_mode="ALIBI")
    for make in (wrong, lambda inputs: lambda: inputs["out"]):
        monkeypatch.setattr(family, "FORMS", {form: (page, make)})
        assert not family.collect(TINY, SETUP)
        assert f"no row: {form}: " in capsys.readouterr().out
