"""List the Blackwell-only PTX forms of a kernel that no recorded peer uses. The peers' kernels run on Blackwell; ours
have not.

    python -m tools.proven record NAME FILE.ptx    add the forms in a peer's PTX to tests/data/proven.csv
    python -m tools.proven FILE.ptx ...            print the forms that no recorded peer uses

A form is an instruction with all its qualifiers, from the families that Hopper lacks: tcgen05, packed fp32, minima and
maxima of three, conversions of e2m1. The simulator takes a form's meaning from the text of the PTX ISA alone; a kernel
known to be right shows that the form is really used in this way.
"""

import csv
import re
import sys
from pathlib import Path

RECORD = Path(__file__).resolve().parents[1] / "tests" / "data" / "proven.csv"
COLUMNS = ("form", "kernel")
FAMILIES = re.compile(
    r"\b(tcgen05\.[\w.:]+|cvt\.[\w.]*e2m1[\w.]*|(?:fma|add|mul|sub)\.[\w.]*f32x2|"
    r"(?:min|max)(?:\.\w+)*\.f32(?=[^;]*,[^;]*,[^;]*,))"
)
ORDER = (  # forms that peers leave to the compiler; they only add order
    "tcgen05.fence::after_thread_sync",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.wait::ld.sync.aligned",
)

ALONE = {  # form -> why it is used although no recorded peer has it
    "cvt.rn.f16x2.e2m1x2": "CUTLASS's NumericArrayConverter is made of it; the text of the ISA leaves nothing open, "
    "and a test tries all 256 bytes",
}

ROUNDED = re.compile(r"^(fma|add|mul|sub)\.(?!r[nzmp]\.)")


def forms(ptx: str) -> set[str]:
    """Return the forms in PTX. Arithmetic without a rounding qualifier gets .rn, as the ISA says."""
    code = "\n".join(line.split("//")[0] for line in ptx.splitlines())
    return {ROUNDED.sub(r"\1.rn.", form) for form in FAMILIES.findall(code)}


def recorded(path: Path = RECORD) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def unproven(ptx: str) -> set[str]:
    """Return the forms in PTX that neither a recorded peer has nor ORDER nor ALONE."""
    return forms(ptx) - {row["form"] for row in recorded()} - set(ORDER) - set(ALONE)


def record(name: str, file: Path) -> None:
    rows = [row for row in recorded() if row["kernel"] != name] if RECORD.exists() else []
    rows += [{"form": form, "kernel": name} for form in forms(file.read_text())]
    with RECORD.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["form"], row["kernel"])))


def main() -> None:
    if sys.argv[1:2] == ["record"]:
        record(sys.argv[2], Path(sys.argv[3]))
        return
    for file in sys.argv[1:]:
        print(file, *sorted(unproven(Path(file).read_text())) or ("none",), sep="\n  ")


if __name__ == "__main__":
    main()
