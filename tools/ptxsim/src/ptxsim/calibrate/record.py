"""The record of a device run, and its comparison with the simulator's results."""

import base64
import hashlib
import json
import lzma
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..faults import Fault, NotModelled
from .case import CalibrationCase, TensorMapArg
from .data import widen

EQUAL, NAN, CLOSE, DIFFERS, FAULT = "equal bits", "equal except NaN payloads", "within tolerance", "differs", "fault"
REFUSED = "both refuse it"  # the device with an error, the simulator with a Fault
MISSING, STALE, CRASHED, UNSUPPORTED = "not recorded", "recorded for another kernel", "device error", "not modelled"
GOOD = (EQUAL, NAN, CLOSE, REFUSED)
FILTER = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 18}]


@dataclass(frozen=True)
class CaseVerdict:
    """The result of comparing one case; `error` is the largest one if numbers were compared."""

    case: CalibrationCase
    result: str
    detail: str = ""
    error: float = 0.0


def digest(case: CalibrationCase) -> str:
    """Return a digest of everything that the device's outputs depend on."""
    state = hashlib.sha256(repr((case.ptx, case.threads, case.grid, case.cluster, case.shared, case.outputs)).encode())
    for arg in case.args:
        state.update(
            repr(asdict(arg)).encode() if isinstance(arg, TensorMapArg) else repr((arg.dtype.str, arg.shape)).encode()
        )
        if isinstance(arg, np.ndarray):
            state.update(arg.tobytes())
    return state.hexdigest()


def pack(outputs: list[np.ndarray]) -> str:
    """Encode all outputs as text. Bytes of equal significance are grouped, which compresses better."""
    planes = [np.ascontiguousarray(o).view(np.uint8).reshape(-1, o.itemsize).T.tobytes() for o in outputs]
    return base64.b85encode(lzma.compress(b"".join(planes), lzma.FORMAT_RAW, filters=FILTER)).decode()


def unpack(text: str, case: CalibrationCase) -> list[np.ndarray]:
    data = lzma.decompress(base64.b85decode(text), lzma.FORMAT_RAW, filters=FILTER)
    found, at = [], 0
    for number in case.outputs:
        arg = case.args[number]
        assert isinstance(arg, np.ndarray), "outputs are arrays"
        planes = np.frombuffer(data[at : at + arg.nbytes], np.uint8).reshape(arg.itemsize, -1)
        found.append(np.ascontiguousarray(planes.T).view(arg.dtype).reshape(arg.shape))
        at += arg.nbytes
    return found


def merge(lines: list[str], out: Path, kept: dict[str, dict]) -> None:
    """Merge JSON lines of workers into the record. The first line of a worker names the GPU. kept: cases recorded
    before."""
    parts = [json.loads(line) for line in lines]
    head = next(part for part in parts if "gpu" in part)
    cases = kept | {part.pop("name"): part for part in parts if "name" in part}
    body = ",\n".join(f"{json.dumps(name)}: {json.dumps(part)}" for name, part in sorted(cases.items()))
    out.write_text(
        f'{{"gpu": {json.dumps(head["gpu"])}, "driver": {json.dumps(head["driver"])}, "cases": {{\n{body}\n}}}}\n'
    )


def difference(case: CalibrationCase, wanted: np.ndarray, got: np.ndarray) -> tuple[str, float, str]:
    """Compare one output; return (result, largest error, location)."""
    bits = np.dtype(f"u{wanted.itemsize}")
    unequal = np.flatnonzero((wanted.view(bits) != got.view(bits)).reshape(-1))
    if not len(unequal):
        return EQUAL, 0.0, ""
    first = int(unequal[0])
    row = f"{len(unequal)} of {wanted.size} elements, first {first}: device {wanted.view(bits).flat[first]:#x}"
    row += f", simulated {got.view(bits).flat[first]:#x}"
    if not case.real:
        return DIFFERS, 0.0, row
    a, b = widen(wanted, case.real).reshape(-1), widen(got, case.real).reshape(-1)
    same = (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)
    if same.all():
        return NAN, 0.0, row
    with np.errstate(all="ignore"):
        error = np.where(same | (a == b), 0.0, np.abs(a - b) / np.maximum(np.abs(a), case.floor))
    error[np.isnan(error)] = np.inf
    worst = int(error.argmax())
    text = f"{row}; largest error {error[worst]:.3g} at {worst}: device {a[worst]:.9g}, simulated {b[worst]:.9g}"
    zeros = case.tolerance == 0
    return CLOSE if error[worst] <= case.tolerance and not zeros else DIFFERS, float(error[worst]), text


def judge(case: CalibrationCase, record: dict, mode: str = "eager") -> CaseVerdict:
    """Simulate the case and compare it with its record."""
    from .simulated import simulate

    entry = record["cases"].get(case.name, {"missing": True})
    try:
        got = simulate(case, mode)
    except NotModelled as error:
        return CaseVerdict(case, UNSUPPORTED, str(error))
    except Fault as error:
        return CaseVerdict(case, REFUSED if "error" in entry and entry["sha"] == digest(case) else FAULT, str(error))
    except Exception as error:
        return CaseVerdict(case, FAULT, f"{type(error).__name__}: {error}")
    if "missing" in entry:
        return CaseVerdict(case, MISSING)
    if entry["sha"] != digest(case):
        return CaseVerdict(case, STALE)
    if "error" in entry:
        return CaseVerdict(case, CRASHED, entry["error"])
    verdicts = [difference(case, wanted, result) for wanted, result in zip(unpack(entry["out"], case), got)]
    rank = (EQUAL, NAN, CLOSE, DIFFERS)
    result, _, detail = max(verdicts, key=lambda verdict: rank.index(verdict[0]))
    return CaseVerdict(case, result, detail, max(error for _, error, _ in verdicts))


def summary(verdict: CaseVerdict) -> str:
    if verdict.result == CLOSE:
        return f"max error {verdict.error:.1e}"
    return verdict.result + (f", max error {verdict.error:.1e}" if verdict.error else "")


def sections(verdicts: list[CaseVerdict], text_alone: tuple[tuple[str, str], ...]) -> str:
    """Return Markdown: a line per section of the PTX ISA with the number of its cases by result."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        counts[verdict.case.isa.split(":")[0]][verdict.result] += 1
    for _, isa in text_alone:
        counts[isa.split(":")[0]]["ISA text alone (groups of forms)"] += 1
    results = (EQUAL, NAN, CLOSE, REFUSED, UNSUPPORTED, "ISA text alone (groups of forms)")
    rows = [f"| PTX ISA section | {' | '.join(results)} |", "| --- " * (len(results) + 1) + "|"]
    rows += [f"| {isa} | {' | '.join(str(count[r] or '') for r in results)} |" for isa, count in sorted(counts.items())]
    total: Counter[str] = sum(counts.values(), Counter())
    return "\n".join([*rows, f"| all | {' | '.join(str(total[result]) for result in results)} |"])


def between(text: str, block: str) -> str:
    """Return `text` with `block` between its calibration markers."""
    head, begin, rest = text.partition("<!-- calibration:begin -->\n")
    _, end, tail = rest.partition("<!-- calibration:end -->")
    return f"{head}{begin}{block}\n{end}{tail}"
