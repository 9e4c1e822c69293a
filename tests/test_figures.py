"""Figures in README and docs/: none is measured but what a generator writes, and README's stand in benchmarks.md.

A figure that was measured stands between the markers of a generated section, whose rows come from bench/results
(`test_readme.py` compares them). Prose has none of its own: it would stay when the results change. So every figure in
prose is one of KNOWN, which follow from the code, a setting or a specification, and do not change with a measurement.
"""

import re
from collections.abc import Collection

import pytest

from bench import pages
from bench.pages import DOCS, README
from bench.results import ROOT
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
    "docs/benchmarks.md": {"skips 75 % of the blocks": "the definition of the case `skip75`"},
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
    "docs/design.md": {"costs under 1 % as a value": "a rule for features"},
    "docs/drop-in.md": {"keep the positions of 0.2.": "a version"},
    "docs/engines.md": {
        "72 GiB holds (40 GiB for GPT-OSS)": SETTING,
        "read 71 GB of keys and values and 15 GB of weights": "the size of the model and of its cache",
    },
    "docs/examples.md": {"| command | what it shows | on the CPU |": "how long to wait for a program, rounded"},
    "docs/features.md": {"under 1 %, it is a value": "a rule for features", "over 3 % in that case": "a rule"},
    "docs/fuzzing.md": {"one line every 10 seconds": SETTING, "1 KiB of guards": SETTING},
    "docs/graphs.md": {"counters (16 MiB)": "the size of a buffer"},
    "docs/installs.md": {
        "| Python | from |": "versions",
        "those of 3.11, 3.12 and 3.14 compiled": "versions",
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
    "Calls run 1.36 to 1.40 times as fast.": 2,
    "At 4,278 GB/s and 85 % of the rate, 782 TFLOP/s, a 1.5x gain.": 4,
    "The build takes 4 minutes, and a load 25 ms.": 2,
    "It is about a seventh longer, or half as fast.": 2,
    "| a | 0.98 |\n| b | 3 % |": 2,
    "A step of 16 bytes reads 8192 x 8192 values in 3 launches of 64x8 heads, up to 2^20.": 0,
    "You need Python 3.10, 3.11 or 3.12, torch 2.11, and 4.8.0 or 4.8.x.": 0,
    "```\n12 us\n```\n`12 us` [a](b-1.5.md) <!-- x:begin -->\n12 us\n<!-- x:end -->": 0,
}


@pytest.mark.parametrize("text", SAMPLES)
def test_a_figure_is_found(text):
    assert len(figures(text)) == SAMPLES[text]


def test_a_known_figure_is_known_by_its_words():
    known = {"at 8 TB/s": "", "| a | b |": ""}
    assert figures("It reads at 8 TB/s.\n\n| a | b |\n| - | - |\n| 1 ms | 2 ms |", known) == []
    assert len(figures("It reads at 9 TB/s.\n\n| a | c |\n| - | - |\n| 1 ms | 2 ms |", known)) == 3


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
