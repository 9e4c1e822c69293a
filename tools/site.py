"""The static site of README and docs/.

    python -m tools.site        build it in build/site

Pages are laid out in build/pages as they lie here, with every file that they link to, so that links hold in both.
`tools.reference` adds a page per group of public functions, and mentions of these functions become links to it. MkDocs
(mkdocs.yml) makes HTML of all.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench.pages import ROOT, pages

from . import reference

BUILD = ROOT / "build"
CSS = ROOT / "tools" / "site.css"
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
UNSEARCHED = "bench/", "tests/"  # notes and pages of tests, for developers: they would fill a reader's search results
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the (file, anchor) of each relative link of a page."""
    found = LINK.findall(CODE.sub("", page.read_text()))
    return [((page.parent / path).resolve() if path else page, anchor) for path, anchor in found]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs name them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def reached() -> list[Path]:
    """Return README, docs/, and the files that they link to, directly or by other pages."""
    found, left = set(pages()), pages()
    while left:
        page = left.pop()
        new = {path for path, _ in links(page) if path.is_file()} - found if page.suffix == ".md" else set()
        found |= new
        left += new
    return sorted(found)


def lay_out(folder: Path) -> None:
    """Write all pages, and the files that they link to, into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "reference").mkdir(parents=True)
    for path in reached():
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            to = os.path.relpath(folder / "reference", place.parent)
            head = HIDDEN if path.relative_to(ROOT).as_posix().startswith(UNSEARCHED) else ""
            place.write_text(head + reference.linked(path.read_text(), to))
        else:
            shutil.copyfile(path, place)
    shutil.copyfile(CSS, folder / CSS.name)
    for name, text in reference.pages().items():
        (folder / "reference" / f"{name}.md").write_text(reference.linked(text, "."))


def build(config: Path) -> None:
    """Make the site that a mkdocs.yml describes; SystemExit with MkDocs's output where it warns of anything."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # else the theme prints a notice about its successor
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True)
    if done.returncode:  # with --quiet, MkDocs counts no warnings
        raise SystemExit(done.stdout + done.stderr)


def main() -> None:
    """mkdocs.yml names its folders beside itself, so that a copy of it builds anywhere."""
    lay_out(BUILD / "pages")
    shutil.copyfile(ROOT / "mkdocs.yml", BUILD / "mkdocs.yml")
    build(BUILD / "mkdocs.yml")
    folder = os.path.relpath(BUILD / "site")
    print(f"The site is in {folder}. To read it with its search, which a browser runs from a server alone:")
    print(f"    python -m http.server -d {folder} 8000    and open http://localhost:8000")


if __name__ == "__main__":
    main()
