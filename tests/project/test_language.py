"""Rules of language that a program can check, in docstrings, comments and documents.

No sentence begins with "Of". No sentence begins with a clause with "What" as its subject; a question may begin with
"What". The word "whose" is rare. Code, headings and the texts of links (titles of pages) are no sentences.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cute_kernels", "wrappers", "bench", "tools", "tests/sim")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md")
WHOSE = 20  # the most uses in all texts together

# A sentence begins with a text, a paragraph, a list item or a table cell, or after the end of another sentence.
BEGIN = r"(?:\A|\n\s*\n|(?:\A|\n)\s*(?:[-*>]|\d+\.)\s|\||[.:;!?][\"')\]]?\s)\s*[\"'(*_]*"
RULES = {
    'a sentence begins with "Of"': re.compile(rf"{BEGIN}(Of)\b"),
    'a sentence begins with "What" as its subject': re.compile(rf"{BEGIN}(What)\b(?![^.!?]*\?)"),
}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment. Full-line comments on consecutive lines are one text."""
    block: list[str] = []
    begin = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, text = token.start[0], token.string.lstrip("# ")
        whole = not token.line[: token.start[1]].strip()
        if block and whole and row == begin + len(block):
            block.append(text)
            continue
        if block:
            yield begin, "\n".join(block)
        block, begin = [text], row
        if not whole:
            yield row, text
            block = []
    if block:
        yield begin, "\n".join(block)


def prose(document: str) -> str:
    """Return a document without code, comments and headings. Each line keeps its number."""
    for pattern in (r"(?ms)^```.*?^```", r"(?s)<!--.*?-->", r"(?m)^#+ .*$"):
        document = re.sub(pattern, lambda found: "\n" * found[0].count("\n"), document)
    return re.sub(r"`[^`\n]*`", "`code`", document)


@cache
def texts(file: Path) -> list[tuple[int, str]]:
    """Return (line, text) of all texts of a file."""
    source = file.read_text()
    return [(1, prose(source))] if file.suffix == ".md" else [*docstrings(source), *comments(source)]


def problems(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield (line, the broken rule and the words that break it)."""
    for first, text in texts:
        for rule, pattern in RULES.items():
            for match in pattern.finditer(text):
                begin = match.start(1)
                yield first + text.count("\n", 0, begin), f"{rule}: {' '.join(text[begin : begin + 60].split())!r}"


@cache
def files(top: str) -> list[Path]:
    """Return the files of one of FOLDERS or DOCUMENTS."""
    found = sorted(ROOT.glob(f"{top}/**/*.py" if top in FOLDERS else top))
    found = [file for file in found if "build" not in file.parts[len(ROOT.parts) : -1]]  # where pip leaves copies
    assert found, f"{top}: no such files"
    return found


@pytest.mark.parametrize("top", [*FOLDERS, *DOCUMENTS])
def test_sentences_have_subjects(top):
    found = [f"{file.relative_to(ROOT)}:{line}: {what}" for file in files(top) for line, what in problems(texts(file))]
    assert not found, "\n".join(found)


def test_whose_is_rare():
    found = []
    for file in (file for top in (*FOLDERS, *DOCUMENTS) for file in files(top)):
        for first, text in texts(file):
            uses = re.finditer(r"\bwhose\b", text, re.IGNORECASE)
            found += [f"{file.relative_to(ROOT)}:{first + text.count(chr(10), 0, use.start())}" for use in uses]
    assert len(found) <= WHOSE, f'"whose" is used {len(found)} times, must be at most {WHOSE} times:\n' + "\n".join(
        found
    )


OF, WHAT = RULES
SAMPLES = {
    # sentences that break a rule
    '"""Of a page\'s headings, the anchors."""': [(1, OF)],
    '"""Return a rate.\n\n    Of two, the\n    larger."""': [(3, OF)],
    '"""Return a rate. Of two, the larger."""': [(1, OF)],
    '"""Return a rate (the larger). Of\n    two."""': [(1, OF)],
    '"""What a tensor says of a head."""': [(1, WHAT)],
    '"""Which parts count: What is left out does not. Why?"""': [(1, WHAT)],
    "x = 1  # Of a head": [(1, OF)],
    "# Each row has a lane.\n# Of the lanes, one\n# writes.": [(2, OF)],
    "def f():\n    '''Of a head.'''\n    # What it finds counts.\n": [(2, OF), (3, WHAT)],
    # sentences that keep them
    '"""Return the parts of a head. What for? Often for speed."""': [],
    '"""Return what a tensor says of a head, of all, or of none. Offsets are bytes."""': [],
    "x = 'Of a string that is no comment'  # of a head": [],
    "# A line that ends here\n# of a head.": [],
}
PAGES = {
    "# Of headings\n\nA text.\n\nOf tests, most pass.": [(5, OF)],
    "Rows:\n\n- one\n- Of two, one\n\n| a | Of b |": [(4, OF), (6, OF)],
    "> What counts is speed.\n\n1. What it does, it\n   does.": [(1, WHAT), (3, WHAT)],
    "```\nOf code\n```\nA `Of` and one\nOf-a-kind line. <!-- Of notes -->": [],
    "## What it does\n\nWhat does it do? It does\nwhat it must.": [],
    "[What runs where](support.md) lists the features.": [],
}


@pytest.mark.parametrize("sample", [*SAMPLES, *PAGES])
def test_samples(sample, tmp_path):
    file = tmp_path / ("a.md" if sample in PAGES else "a.py")
    file.write_text(sample)
    found = [(line, what.partition(": ")[0]) for line, what in problems(texts(file))]
    assert sorted(found) == (PAGES | SAMPLES)[sample]
