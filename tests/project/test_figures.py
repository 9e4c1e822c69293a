"""Figures in README and docs/: none is measured but what a generator writes, README's stand in benchmarks.md, and the
pictures and tables of peers come from pairs of rows of one run.

A figure that was measured stands between the markers of a generated section, whose rows come from bench/results
(`test_readme.py` compares them). Prose has none of its own: it would stay when the results change. So every figure in
prose is one of KNOWN, which follow from the code, a setting or a specification, and do not change with a measurement.
"""

import re
from collections.abc import Collection

import pytest
from PIL import Image

from bench import pages, peers, plots, results
from bench.pages import DOCS, README
from bench.results import FOLDER, ROOT, Environment
from cute_kernels import env

PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages.pages()}
UNIT = r"(?:[numµ]?s|seconds?|minutes?|hours?|[GT]B/s|TFLOP/s|tokens/s|[KMG]i?B|%|x(?! ?\d)|times (?:as|the|faster))"
PART = r"(?:third|fourth|quarter|fifth|sixth|seventh|eighth|ninth|tenth)s?"
FIGURE = re.compile(
    rf"(?<![\w.^])\d[\d,]*(?:\.\d+)?[ -]?{UNIT}(?!\w)"  # 1,024 us, 3 % and 1.4 times as
    r"|(?<![\w.])\d+\.\d+(?!\.?\w)"  # 1.04, and no version such as 4.8.0
    rf"|\b(?:an?|one|two|three) {PART}\b|\b(?:twice|half) as (?:long|fast|slow|many|much)\b"
)
NAMES = "Python|torch|vLLM|SGLang|FlashInfer|transformers|SSE|Llama|CUDA|DSL|CUTLASS"
VERSION = re.compile(rf"\b(?:{NAMES}) (?:\| )?\d+\.\d+(?:(?:, | and | or | to )\d+\.\d+)*")

# page -> the words around figures, with the reason why no measurement changes them. Words that begin with "|" are the
# head of a table, and stand for all of it.
SHARED, SETTING = "the shared memory of an SM, and what a layout takes of it", "a setting of the command or of the load"
COUNTED = "instructions and cycles, counted in SASS without a device"
KNOWN = {
    "README.md": {"Apache-2.0": "the name of a licence"},
    "docs/benchmarks.md": {
        "skips 75 % of the blocks": "the definition of the case `skip75`",
        "has 75 % of its keys in common": "the definition of the cases `a75`",
    },
    "docs/blackwell.md": {
        "Q takes 128 of 227 KiB": SHARED,
        "Q takes 64 KiB, and three stages": SHARED,
        "Q takes 128 KiB, a stage of 32 keys": SHARED,
        "takes 192 KiB and leaves 35": SHARED,
        "would take 24 KiB in fp16": SHARED,
        "which is 0.78 and 0.83 times flash-attn-4's count": COUNTED,
        "at 8 TB/s": "the memory rate of the data sheet",
        "(three quarters of P;": "the design of the kernel",
        "In 16 bits an eighth is emulated.": "the design of the kernel",
        "and a quarter is emulated": "the design of the kernel",
        "| kernel | softmax | masked | emulated |": COUNTED,
        "| kernel, queries x keys, heads |": "errors in the simulator, without a device",
    },
    "docs/bundles.md": {"It has about 50 MB": "the size of the files, rounded to tens"},
    "docs/decode.md": {
        "34 KiB (head_dim 128) per request": "the size of a buffer, by its shape",
        "take 2.2 GB": "the size of a buffer, by its shape",
    },
    "docs/deep-mla.md": {"132 SMs, 1.98 GHz and 4.8 TB/s": "rates of the data sheet"},
    "docs/design.md": {"costs under 1 % as a value": "a rule for features"},
    "docs/drop-in.md": {"keep the positions of 0.2.": "a version"},
    "docs/engines.md": {
        "72 GiB holds (`code` 40, `code` 14, `code` 10 GiB; `code` 36 GiB per GPU)": SETTING,
        "for every further 256 MiB of logits": "a bound of the code, `indexer.selection.SCRATCH`",
        "in a workspace of 256 MiB": "a bound of the code, `vllm_staging.WORKSPACE`",
        "read 71 GB of keys and values and 15 GB of weights": "the size of the model and of its cache",
    },
    "docs/examples.md": {"| command | what it shows | on the CPU |": "how long to wait for a program, rounded"},
    "docs/features.md": {"under 1 %, it is a value": "a rule for features", "over 3 % in that case": "a rule"},
    "docs/fuzzing.md": {"one line every 10 seconds": SETTING, "1 KiB of guards": SETTING},
    "docs/graphs.md": {"counters (16 MiB)": "the size of a buffer"},
    "docs/installs.md": {
        "| Python | from |": "versions",
        "2.13.0 for 3.11.": "versions",
    },
    "docs/low-precision.md": {
        "less than a third of them": "4 bits and a share of a scale factor, of 16 bits",
        "less than a fourth of it": "a bound that follows from the format",
        "they keep twice as many": "a rule of the kernel",
    },
    "docs/prefill.md": {"128 of the 227 KB": SHARED},
    "docs/promises.md": {
        "before 1.0, a minor version": "a version",
        "what warns in 0.2 works in all of 0.2.x": "a version",
    },
    "docs/soak.md": {"0 bytes to 32 MiB": SETTING},
    "docs/support.md": {"99 KiB of shared memory": SHARED},
    "docs/top-k.md": {"(16-bit: twice as long)": "the size of an element"},
}


def blocks(page: str) -> list[str]:
    """Return the paragraphs, lists and tables of a page, on one line each, without code, comments, the targets of links
    and generated sections."""
    for pattern in (r"(?ms)^```.*?^```", r"(?s)<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", r"(?s)<!--.*?-->"):
        page = re.sub(pattern, "", page)
    page = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "`code`", page))
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", page)]


def figures(page: str, known: Collection[str] = ()) -> list[str]:
    """Return the figures in the prose of a page that are none of the known ones, each with the words around it."""
    found = []
    for block in blocks(page):
        if any(words.startswith("|") and block.startswith(words) for words in known):
            continue
        for words in known:
            block = block.replace(words, "")
        for match in FIGURE.finditer(block := VERSION.sub("", block)):
            found.append(block[max(0, match.start() - 30) : match.end() + 30])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_no_measured_figure(page):
    assert figures(PAGES[page].read_text(), KNOWN.get(page, {})) == [], "let a table have it, or add it to KNOWN"


@pytest.mark.parametrize("page", KNOWN)
def test_known_figures_are_on_their_page(page):
    text = "\n".join(blocks(PAGES[page].read_text()))
    assert [words for words in KNOWN[page] if words not in text or not (FIGURE.search(words) or words[0] == "|")] == []


SAMPLES = {
    "It took 12.0 us, and 14.6 without.": 2,
    "At 4,278 GB/s and 85 % of the rate, 782 TFLOP/s, a 1.5x gain.": 4,
    "It is about a seventh longer, or half as fast, or 1.36 to 1.40 times as fast; a load takes 25 ms.": 5,
    "| a | 0.98 |\n| b | 3 % |": 2,
    "A step of 16 bytes reads 8192 x 8192 values in 3 launches of 64x8 heads, with Python 3.10 and 4.8.x.": 0,
    "```\n12 us\n```\n`12 us` [a](b-1.5.md) <!-- x:begin -->\n12 us\n<!-- x:end -->": 0,
    "It reads at 8 TB/s.\n\n| a | b |\n| - | - |\n| 1 ms | 2 ms |": 0,  # known ones
    "It reads at 9 TB/s.\n\n| a | c |\n| - | - |\n| 1 ms | 2 ms |": 3,
}


@pytest.mark.parametrize("text", SAMPLES)
def test_a_figure_is_found(text):
    assert len(figures(text, {"at 8 TB/s": "", "| a | b |": ""})) == SAMPLES[text]


# ---- README and benchmarks.md


def generated(page: str, name: str) -> str:
    return page.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the lines of all tables, without their heads."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    heads = {i - 1 for i, line in enumerate(lines) if set(line[0]) <= set("-:")}
    return [line for i, line in enumerate(lines) if i not in heads and i - 1 not in heads]


RANGE = re.compile(r"([\d.]+(?: to [\d.]+)?) \(([^();]+); (\d+ \w+)\)")


def missing(readme: str, benchmarks: str) -> list[str]:
    """Return the figures of README's generated section that no row of the generated tables of benchmarks.md has beside
    its peer."""
    text, held = generated(readme, "headlines"), rows(generated(benchmarks, "peers"))
    found = [" ".join(own) for own in rows(text) if not any(own[1:4] == row[1:4] for row in held)]
    prose = " ".join(line for line in text.splitlines() if line[:1] != "|")
    ranges = [row[:3] for row in held]
    found += [match[0] for match in RANGE.finditer(prose) if [match[2], match[3], match[1]] not in ranges]
    return found + figures(RANGE.sub("", prose))


def test_every_figure_of_readme_stands_in_benchmarks_beside_its_peer():
    readme, benchmarks = README.read_text(), (DOCS / "benchmarks.md").read_text()
    assert len(rows(generated(readme, "headlines"))) > 5 and RANGE.search(generated(readme, "headlines"))
    assert missing(readme, benchmarks) == []


def test_a_figure_of_readme_that_benchmarks_lacks_is_found():
    head = "| call | ours | peer | ratio |\n| --- | --- | --- | --- |\n"
    end = "\n\nAll: 1.00 to 1.20 (decode; 2 shapes).\n"
    readme = "<!-- headlines:begin -->\n" + head + "| a | 2.0 us | X 3.0 us | 1.50 |" + end + "<!-- headlines:end -->"
    table = "| `a-b` | 2.0 us | X 3.0 us | 1.50 | abc |\n| decode | 2 shapes | 1.00 to 1.20 | 1.00 (X) | 1.20 (Y) |"
    benchmarks = "<!-- peers:begin -->\n" + head + table + "\n<!-- peers:end -->"
    assert missing(readme, benchmarks) == []
    for old, new in (("X 3.0", "Y 3.0"), ("| 1.50", "| 1.51"), ("to 1.20", "to 1.21"), ("2 shapes", "3 shapes")):
        assert len(missing(readme, benchmarks.replace(old, new))) == 1
    assert len(missing(readme.replace("All:", "All, 4.0 us:"), benchmarks)) == 1


def test_readme_names_no_commit():
    """Each is once in benchmarks.md, behind a link."""
    words = re.findall(r"\b[0-9a-f]{7,40}\b", README.read_text())
    assert [word for word in words if re.search(r"\d", word) and re.search("[a-f]", word)] == []
    assert "](docs/benchmarks.md#beside-the-peers)" in README.read_text()


def test_requirements_stand_above_the_first_command():
    """The same in README and in the first steps, and those of the package."""
    needs, again = (rows(page.read_text().split("pip install")[0])[:4] for page in (README, DOCS / "start.md"))
    assert needs == again
    need = dict(needs)
    project = (ROOT / "pyproject.toml").read_text()
    assert need["driver"].startswith(f"{env.DRIVER} or newer, for CUDA 13")
    assert f'"torch>={need["torch"].split()[0]}' in project
    assert re.search(r'requires-python = ">=([\d.]+)"', project)[1] in need["system"]
    assert all(name in need["GPU"] for name in ("sm_90a", "H200", "H100"))


# ---- points of the pictures and tables


def rows_of(times: str, date: str = "2026-01-01", commit: str = "abc123") -> list[results.ResultRow]:
    """Return the rows of a run, from lines of case, provider and time."""
    env = Environment(date, commit, "g", "1.0", "2.0")
    words = (line.split() for line in times.splitlines())
    return results.with_ratios(env.row(case, provider, float(us)) for case, provider, us in words)


FOUND = rows_of("""\
serve-bf16-mixed-x ours 10
serve-bf16-mixed-x flash-attn-4 8
serve-bf16-mixed-x own-parts 12
serve-bf16-mixed-x floor 5
family-bf16-x ours 10
family-bf16-x ours-paged 20
family-bf16-x flashinfer-paged 30
family-bf16-x flashinfer-ragged 15
decode-bf16-x ours 10
decode-bf16-x flashinfer 12
decode-bf16-x-q4 ours 10
decode-bf16-x-q4 flashinfer 20
prefill-skip75-x ours 10
prefill-skip75-x cudnn 20
dsa-prefill-bf16-x ours 20
dsa-prefill-bf16-x own-shared 10
dsa-prefill-bf16-x own-bf16 5
dsa-prefill-bf16-x flashmla 30
topk-fp32-x ours 10
topk-fp32-x torch 70
topk-fp32-y torch 70""")


def test_points_compare_equal_forms_of_one_run():
    """Another type of ours, a floor, a form without a row of ours, and a case without ours give no points. The newest
    run with both counts: a peer that did not run again stays as it was."""
    newer = rows_of("topk-fp32-x ours 10\ntopk-fp32-x torch 80\ndecode-bf16-x ours 5", "2026-02-01", "def456")
    newer += rows_of("decode-bf16-x flashinfer 1", "2026-03-01", "aaa111")
    points = peers.points(FOUND + newer)
    assert [(p.case, p.form, p.peer, p.ratio, p.commit) for p in points] == [
        ("serve-bf16-mixed-x", "", "flash-attn-4", 0.8, "abc123"),
        ("family-bf16-x", "paged", "flashinfer fa3", 1.5, "abc123"),
        ("prefill-skip75-x", "", "cudnn", 2.0, "abc123"),
        ("decode-bf16-x", "", "XQA", 1.2, "abc123"),
        ("decode-bf16-x-q4", "", "XQA", 2.0, "abc123"),
        ("dsa-prefill-bf16-x", "", "FlashMLA", 1.5, "abc123"),
        ("dsa-prefill-bf16-x", "share_keys", "FlashMLA", 3.0, "abc123"),
        ("topk-fp32-x", "", "torch.topk", 8.0, "def456"),
    ]
    assert not [p for p in peers.best(points) if "skip" in p.case], "it leaves out work that its dense peers do"
    (decode,) = peers.kernel_ranges(p for p in points if p.prefix == "decode-")
    assert peers.range_sentence("All", [decode]) == "All: 1.20 to 2.00 (decode; 2 shapes)."
    ends = "1.20 (`decode-bf16-x`, XQA) | 2.00 (`decode-bf16-x-q4`, XQA)"
    assert peers.range_table("g", [decode]).splitlines()[-1] == f"| decode | 2 shapes | 1.20 to 2.00 | {ends} |"


def test_ranges_of_engines_are_over_their_own_backends():
    """The newest run counts, the fastest backend, and not ours over another cache."""

    def row(date, case, provider, rate):
        figures = dict.fromkeys(results.columns(results.EngineRow), 1.0) | {"tokens_per_s": rate}
        return results.EngineRow(**figures | {"date": date, "case": case, "provider": provider})

    case, other = "engine-vllm-a", "engine-vllm-b"
    rows = [row("1", case, "ours", 9.0), row("1", case, "vllm-a", 1.0), row("2", case, "ours", 3.0)]
    rows += [row("2", case, "vllm-a", 2.0), row("2", case, "vllm-b", 1.0)]
    rows += [row("2", other, "ours", 3.0), row("2", other, "own-fp8", 1.0)]
    assert peers.engine_ranges(rows) == [peers.Range("vLLM", "load", [(1.5, case, "vllm-a")])]


MEASURED = {gpu: found for gpu, rows in results.read_all().items() if (found := peers.points(rows))}


@pytest.mark.parametrize("gpu", MEASURED)
def test_pictures_are_drawn_from_the_rows_of_today(gpu):
    """The first one is for a telephone: at the width of a screen of 360 points, letters of 10 points keep two thirds of
    their size, and it loads fast."""
    shown = [point for _, point in peers.headlines(MEASURED[gpu])]
    for name, points in (("peers", MEASURED[gpu]), ("headlines", shown)):
        drawn = Image.open(FOLDER / f"{gpu}-{name}.png")
        assert drawn.text["Description"] == plots.record(points), "run: make plots"
    path = FOLDER / f"{gpu}-headlines.png"
    assert re.search(r"!\[[^]]*\]\(([^)]*)\)", README.read_text())[1] == path.relative_to(ROOT).as_posix()
    assert Image.open(path).width <= 700 and path.stat().st_size < 40_000
    assert sum(file.stat().st_size for file in FOLDER.glob("*.png")) < 1_000_000


def test_every_headline_was_measured():
    assert peers.HEADLINES.keys() <= {p.name for found in MEASURED.values() for p in found}
