"""README and docs/: examples run, generated tables are current, named files and commands exist, the site builds."""

import contextlib
import dataclasses
import enum
import importlib.util
import io
import json
import os
import re

import pytest
import torch

import wrappers
from bench import pages, readme
from bench.cases.attention import AttentionCase
from bench.pages import README
from bench.results import ROOT
from cute_kernels import catalog
from cute_kernels.attention import sm100
from cute_kernels.attention.request import KernelRequest
from tests import conftest
from tests.attention import test_sm120
from tests.support import gpu, kernels
from tools import matrix, reference, site

pytestmark = pytest.mark.by_shape
PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages.pages()}
FAMILIES = ("prefill", "decode", "top-k", "low-precision", "caches", "drop-in")  # pages that begin with an example
NEEDS_GPU = "# needs a GPU"  # the first line of a block that runs on CUDA only
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
BESIDE = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
NOTES = [path for folder in ("bench", "tests", "tools") for path in sorted((ROOT / folder).rglob("*.md"))]


@pytest.mark.slow
def test_generated_sections_are_current():
    """As `--check` of both generators says. Every marker belongs to one of them."""
    made = matrix.sections() | readme.sections()
    assert pages.fill(made, check=True) == [], "run: make plots, python -m tools.matrix readme"
    found = [name for path in PAGES.values() for name in re.findall(r"<!-- ([\w-]+):begin -->", path.read_text())]
    assert sorted(found) == sorted(made)


def run_blocks(text: str, name: str) -> dict:
    """Run all python blocks of a page in one namespace and return it. A comment behind `print` holds the output."""
    names: dict = {}
    for code in BLOCK.findall(text):
        code_object, printed = compile(code, name, "exec"), io.StringIO()
        if code.startswith(NEEDS_GPU) and not torch.cuda.is_available():
            continue
        with contextlib.redirect_stdout(printed):
            exec(code_object, names)
        assert printed.getvalue().splitlines() == re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M)
    return names


@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if BLOCK.search(path.read_text())])
def test_examples_run_and_print_what_they_say(page):
    run_blocks(PAGES[page].read_text(), page)


def test_blocks_that_need_a_gpu_are_told_apart(monkeypatch):
    page = f"```python\n{NEEDS_GPU}\nx = 1\n```\n\n```python\ny = 2\nprint(y)  # 2\n```\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "x" not in (names := run_blocks(page, "page")) and names["y"] == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_blocks(page, "page")["x"] == 1
    with pytest.raises(SyntaxError):
        run_blocks(page.replace("x = 1", "x ="), "page")
    with pytest.raises(AssertionError):
        run_blocks(page.replace("# 2", "# 3"), "page")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_page_of_a_family_begins_with_an_example(family):
    text = PAGES[f"docs/{family}.md"].read_text()
    first = BLOCK.search(text)
    assert first and "\n## " not in text[: first.start()] and NEEDS_GPU not in first[1]


def test_the_example_of_prefill_is_right():
    names = run_blocks(PAGES["docs/prefill.md"].read_text(), "prefill")
    out, same, q, cache = (names[n].float() for n in ("out", "same", "q", "cache"))
    assert out.shape == q.shape
    # request 1: one new token that sees all of its 20 keys, in pages 1 and 3
    k, v = (cache[[1, 3], side].transpose(0, 1).flatten(1, 2)[:, :20] for side in (0, 1))
    want = torch.nn.functional.scaled_dot_product_attention(q[5:].transpose(0, 1), k, v, enable_gqa=True)
    torch.testing.assert_close(out[5:].transpose(0, 1), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(same, out, rtol=1e-2, atol=1e-2)  # of the class


def test_commands_and_files_that_are_named_exist():
    text = "".join(path.read_text() for path in (*PAGES.values(), *BESIDE))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.M)) <= set(targets)
    for module in set(re.findall(r"python -m ((?:tools|bench|examples|tests)[\w.]*)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for path in set(re.findall(r"`((?:bench|tests|tools|wrappers|cute_kernels|examples)/[\w/.]+)`", text)):
        assert (ROOT / path).exists(), path


def test_two_commands_suffice_on_a_fresh_machine():
    """As README says, and CI does."""
    assert re.search(r"^make demo .*\n(make quick .*\n)?make test ", README.read_text(), re.M)
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()


def test_a_public_host_runs_commands_that_readme_names():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    found = re.findall(r"\brun: (make [a-z-]+)(?: SHARD=\$\{\{ matrix.shard \}\}/\d+)?$", workflow, re.M)
    assert len(found) == workflow.count("run:")
    assert {"make lint", "make quick", "make test", "make test-all"} == set(found)
    assert set(found) <= set(re.findall(r"\bmake [a-z-]+", README.read_text()))


def test_shards_have_every_file_once():
    files, parts = range(10), [conftest.shard(f"{number}/4") for number in (1, 2, 3, 4)]
    assert sorted(file for part in parts for file in files[part]) == list(files)
    for wrong in ("0/4", "5/4", "1", "a/b"):
        with pytest.raises(ValueError):
            conftest.shard(wrong)


def test_every_environment_variable_is_listed():
    folders = ("cute_kernels", "wrappers", "bench", "tools", "examples")
    code = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    found = set(re.findall(r"\bCUTE_KERNELS_[A-Z]+\b", code))
    assert found == set(re.findall(r"^\| `(CUTE_KERNELS_[A-Z]+)` \|", PAGES["docs/environment.md"].read_text(), re.M))


def test_every_public_name_is_on_a_page():
    text = "".join(path.read_text() for path in PAGES.values())
    assert [name for name in wrappers.__all__ if not re.search(rf"\b{name}\b", text)] == []


# ---- links, and the site


@pytest.mark.parametrize("page", [*PAGES.values(), *BESIDE, *NOTES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    for path, anchor in site.links(page):
        assert path.is_file() and path.is_relative_to(ROOT), path
        assert not anchor or anchor in site.anchors(path), f"{path}#{anchor}"


def test_every_page_is_reached_from_readme_and_named_in_the_index():
    index = {path for path, _ in site.links(PAGES["docs/index.md"])}
    assert {path for path in PAGES.values() if path.parent == pages.DOCS} - index == {PAGES["docs/index.md"]}
    assert PAGES["docs/index.md"] in {path for path, _ in site.links(README)}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert set(re.findall(r"docs/[\w-]+\.md", navigation)) == PAGES.keys() - {"README.md", "docs/index.md"}
    assert re.findall(r"reference/([\w-]+)\.md", navigation) == list(reference.GROUPS)


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


needs_mkdocs = pytest.mark.skipif(not importlib.util.find_spec("material"), reason="MkDocs and its theme are missing")


@pytest.mark.slow
@needs_mkdocs
def test_the_site_builds(tmp_path, monkeypatch, capsys):
    """Without a warning; pages fetch nothing, pictures have a text, mentions of functions lead to the reference. The
    search finds no notes and no pages of tests, and the command says how to open the site with it."""
    monkeypatch.setattr(site, "BUILD", tmp_path)
    site.main()
    said = capsys.readouterr().out
    assert f"python -m http.server -d {os.path.relpath(tmp_path / 'site')} 8000" in said
    assert "http://localhost:8000" in said
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    assert {"index.html", "docs/decode.html", "reference/top-k.html", "CONTRIBUTING.html"} <= found
    assert [page for page in found if page.startswith(("bench/", "tests/"))] == []
    html = (tmp_path / "site" / "docs" / "prefill.html").read_text()
    assert 'href="../reference/prefill.html#trtllm_batch_context_with_kv_cache"' in html
    assert "../bench/notes/attention-sm90.html" in html
    notes = tmp_path / "site" / "bench" / "notes"
    assert (notes / "attention-sm90.html").is_file() and not (notes / "diary").exists()
    assert (tmp_path / "site" / "bench" / "results" / "nvidia-h200-peers.png").is_file()
    pages_made = "".join(path.read_text() for path in (tmp_path / "site").rglob("*.html"))
    assert not re.search(r"<(?:link|script|img)[^>]*(?:src|href)=.?(?:https?:)?//", pages_made)
    assert not re.search(r"<img(?![^>]*alt=.[^\"' >])", pages_made)


# ---- tables in a window of 1280 pixels, from measurements in Chromium of the built site

CODE, TEXT, PADDING = 6.8, 7.3, 24  # pixels: a letter of code and of text, on average, and the room beside a cell
ROOM = 981  # of the content, with the table of contents in the left sidebar (toc.integrate)


def narrowest(table: str) -> float:
    """Return about how many pixels a table needs, within 5 % of measured ones. Numbers and code do not wrap."""
    head, rule, *rest = ([cell.strip() for cell in line.strip("| \n").split("|")] for line in table.splitlines())

    def width(cell: str, column: int) -> float:
        cell = re.sub(r"\]\([^)]*\)|[\[*]", "", cell)
        numbers = rest and rule[column].endswith(":") and cell not in head
        words = [cell] if numbers else re.findall(r"(?:`[^`]*`|[^\s`])+", cell)
        parts = [re.findall(r"`[^`]*`|[^`]+", word) for word in words]
        return max((sum(len(p) * (CODE if p[0] == "`" else TEXT) for p in word) for word in parts), default=0)

    columns = ((max(width(row[i], i) for row in (head, *rest) if i < len(row))) for i in range(len(rule)))
    return sum(max(48, column) + PADDING for column in columns)


@pytest.mark.parametrize("page", PAGES)
def test_tables_fit_a_window(page):
    assert "toc.integrate" in (ROOT / "mkdocs.yml").read_text()
    tables = re.findall(r"^(?:\|.*\n)+", PAGES[page].read_text(), re.M)
    assert [(table.splitlines()[0], round(narrowest(table))) for table in tables if narrowest(table) > ROOM] == []


# ---- the reference


def test_every_public_name_is_in_one_group():
    named = [name for _, _, names in reference.GROUPS.values() for name in names]
    assert sorted(named) == wrappers.__all__


def test_a_page_describes_each_name_with_its_arguments_and_example():
    made = reference.pages()
    for name, page in reference.PAGE_OF.items():
        part = re.search(rf"^## {name} {{.*?(?=^## |\Z)", made[page], re.M | re.S)[0]
        assert "```pycon\n>>> " in part, name
        if not isinstance(getattr(wrappers, name), enum.EnumMeta):
            names = reference.names_of(getattr(wrappers, name)) - {"args", "kwargs", "others"}
            assert all(re.search(rf"^ +(\*\*)?{n}\b|\({n}\b|, {n}\b", part, re.M) for n in names), name
    assert "### run { #BatchPrefillWithPagedKVCacheWrapper.run }" in made["prefill"]
    assert "Another name of `plan`." in made["prefill"]


# ---- the support table


def named(name):
    return next(f for f in matrix.FEATURES if f.name == name)


def test_matrix_tells_run_from_simulated_compiled_and_refused(monkeypatch):
    row = {"gpu": "nvidia-h200", "commit": "0123456789abcdef"}
    ran = {("sm_90a", "prefill Q, K and V bf16"): row, ("sm_90a", "prefill with a mask of drafts"): row}
    names = ("prefill Q, K and V bf16", "decode output e4m3", "prefill with ALiBi")
    cells = [matrix.cell(named(name), "sm_90a", ran) for name in names]
    assert cells == ["run (nvidia-h200, 012345678)", "compiled, simulated", "on demand"]
    # a record of an architecture that refuses the feature today says nothing
    assert matrix.cell(named("prefill with a mask of drafts"), "sm_90a", ran) == "no"
    assert matrix.cell(named("prefill head_dim 256"), "sm_100a", ran) == "compiled, simulated"
    monkeypatch.setattr(matrix, "SIMULATED", {("sm_100a", "attention.decode")})
    cells = [matrix.cell(named("decode output e4m3"), arch, ran) for arch in ("sm_100a", "sm_103a")]
    assert cells == ["compiled, simulated", "compiled"]


def test_simulated_is_what_the_simulator_runs():
    """With --all all kernels for Blackwell run; without it, those of each op for one architecture at least."""

    def label(name):
        return "attention.decode" if name == "prompts" else name.split("/")[0]

    here = {(conftest.ARCH, op) for op, _ in catalog.shipped(conftest.ARCH)}
    small = {(arch, label(name)) for arch, names in test_sm120.SIMULATED.items() for name in names}
    blackwell = {(arch, op) for arch, op, _ in kernels.BLACKWELL if arch in sm100.ARCHS}
    assert matrix.SIMULATED == here | small | blackwell
    assert {op for _, op, _ in kernels.COVERING} == {op for _, op in blackwell}


def problems():
    """Attention problems of all features, and of none."""
    others = "top-k", "append", "merge", "latent", "indexer"
    return [matrix.PREFILL, matrix.DECODE, *(f.problem for f in matrix.FEATURES if f.op not in others)]


NUMBERS = "rows", "kv_heads", "keys", "visible_keys", "sms"  # fields that say how large a request is


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(KernelRequest) if f.name not in NUMBERS])
def test_a_fact_of_a_problem_has_a_feature(field):
    """Each field of a request has a row, and in some row its value differs from the others'."""
    assert any(field in f.facts for f in matrix.FEATURES)
    assert len({getattr(problem, field) for problem in problems()}) > 1


def test_a_row_of_top_k_is_served_as_it_says():
    def spec(value):
        return matrix.topk.select(named(f"top-k rows {value}").problem, "sm_90a")[1]

    assert (spec("in one CTA").cluster, spec("in one CTA").stream) == (1, False)
    assert spec("over several CTAs").cluster > 1 and spec("streamed").stream


# ---- markers of GPU tests and the record of a run


class Collected:
    """A plugin that keeps what is collected."""

    def pytest_collection_finish(self, session):
        self.items = session.items


@pytest.mark.slow
def test_gpu_tests_show_every_feature_that_a_kernel_has():
    """A served feature that no GPU test carries could never be `run`, and a refused one that a test carries is none."""
    kept = Collected()
    folder = str(ROOT / "tests" / "gpu")
    assert pytest.main(["--collect-only", "-qq", "-s", "-p", "no:cacheprovider", folder], plugins=[kept]) == 0
    carried = {name for item in kept.items for key, name in item.user_properties if key == "feature"}
    served = {f.name for f in matrix.FEATURES if any(matrix.served(f, arch) for arch in matrix.RUN)}
    assert carried == served


def test_features_follow_from_the_fields_of_a_case():
    case = AttentionCase(
        "", kv_dtype="nvfp4", function="decode", heads_q=6, page_size=64, window_left=3, interleaved=True
    )
    assert set(gpu.features(case)) == {
        "decode query bf16", "decode KV NVFP4", "decode KV NVFP4 with interleaved V factors", "decode head_dim 64",
        "decode page size 64", "decode query heads of a KV head 3", "decode with a causal mask",
        "decode with a sliding window", "decode with LSE", "decode with several query tokens",
    }  # fmt: skip


def test_a_record_counts_passed_tests_of_features_without_a_failure(tmp_path):
    bf16, cap, sinks = "prefill Q, K and V bf16", "prefill with a soft cap", "prefill with sinks"
    cases = (
        f'<testcase><properties><property name="feature" value="{name}"/></properties>{ended}</testcase>'
        for name, ended in ((bf16, ""), (cap, ""), (cap, "<failure/>"), (sinks, "<skipped/>"))
    )
    (tmp_path / "report.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    path, run = tmp_path / "hardware.csv", ("sm_90a", "nvidia-h200", "abc")
    assert matrix.add([tmp_path / "report.xml"], *run, path) == {bf16: 1}
    assert [(feature, row["passed"]) for (_, feature), row in matrix.record(path).items()] == [(bf16, "1")]
