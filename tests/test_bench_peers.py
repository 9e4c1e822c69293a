"""The pictures and tables of peers: every point is a pair of rows of one run, pictures are drawn from today's rows, and
README's are small enough for a telephone."""

import re

import pytest
from PIL import Image

from bench import peers, plots, results
from bench.pages import README
from bench.results import FOLDER, ROOT, Environment


def rows_of(
    times: dict[tuple[str, str], float], date: str = "2026-01-01", commit: str = "abc123"
) -> list[results.ResultRow]:
    env = Environment(date, commit, "g", "1.0", "2.0")
    return results.with_ratios([env.row(case, provider, t) for (case, provider), t in times.items()])


FOUND = rows_of(
    {
        ("serve-bf16-mixed-x", "ours"): 10.0, ("serve-bf16-mixed-x", "flash-attn-4"): 8.0,
        ("serve-bf16-mixed-x", "own-parts"): 12.0, ("serve-bf16-mixed-x", "floor"): 5.0,
        ("family-bf16-x", "ours"): 10.0, ("family-bf16-x", "ours-paged"): 20.0,
        ("family-bf16-x", "flashinfer-paged"): 30.0, ("family-bf16-x", "flashinfer-ragged"): 15.0,
        ("prefill-kvfp8-x", "ours"): 10.0, ("prefill-kvfp8-x", "flashinfer"): 11.0,
        ("decode-bf16-x-p16", "ours"): 10.0, ("decode-bf16-x-p16", "flashinfer"): 12.0,
        ("decode-bf16-x-p16", "floor"): 9.0,
        ("decode-bf16-x-p16-q4", "ours"): 10.0, ("decode-bf16-x-p16-q4", "floor"): 1.0,
        ("decode-bf16-x-p16-q4", "flashinfer"): 20.0,
        ("topk-fp32-x", "ours"): 10.0, ("topk-fp32-x", "torch"): 70.0,
        ("topk-fp32-y", "torch"): 70.0,
    }
)  # fmt: skip


def test_points_compare_equal_forms_of_one_run():
    """Another form of ours, a floor, a form without a row of ours, and a case without ours give no points."""
    newer = rows_of({("topk-fp32-x", "ours"): 10.0, ("topk-fp32-x", "torch"): 80.0}, "2026-02-01", "def456")
    assert [(p.case, p.form, p.peer, p.ratio, p.commit) for p in peers.points(FOUND + newer)] == [
        ("serve-bf16-mixed-x", "", "flash-attn-4", 0.8, "abc123"),
        ("family-bf16-x", "paged", "flashinfer fa3", 1.5, "abc123"),
        ("prefill-kvfp8-x", "", "flashinfer fa3", 1.1, "abc123"),
        ("decode-bf16-x-p16", "", "XQA", 1.2, "abc123"),
        ("decode-bf16-x-p16-q4", "", "XQA", 2.0, "abc123"),
        ("topk-fp32-x", "", "torch.topk", 8.0, "def456"),
    ]


def test_a_peer_that_did_not_run_stays_what_it_was_in_its_last_run():
    newer = rows_of({("decode-bf16-x-p16", "ours"): 5.0, ("decode-bf16-x-p16", "floor"): 4.0}, "2026-02-01", "def456")
    later = rows_of({("decode-bf16-x-p16", "flashinfer"): 1.0}, "2026-03-01", "aaa111")
    (point,) = [p for p in peers.points(FOUND + newer + later) if p.case == "decode-bf16-x-p16"]
    assert (point.peer, point.ratio, point.commit) == ("XQA", 1.2, "abc123")


def test_skip_softmax_is_no_headline():
    """It leaves out work that its dense peers do."""
    rows = rows_of({("prefill-skip75-x", "ours"): 10.0, ("prefill-skip75-x", "cudnn"): 20.0})
    assert len(peers.points(rows)) == 1 and peers.best(peers.points(rows)) == []


GPUS = [gpu for gpu, rows in results.read_all().items() if peers.points(rows)]


@pytest.mark.parametrize("gpu", GPUS)
def test_the_pictures_are_drawn_from_the_rows_of_today(gpu):
    found = peers.points(results.read_all()[gpu])
    shown = [point for _, point in peers.headlines(found)]
    for name, points in (("peers", found), ("headlines", shown)):
        drawn = Image.open(FOLDER / f"{gpu}-{name}.png")
        assert drawn.text["Description"] == plots.record(points), "run: make plots"


@pytest.mark.parametrize("gpu", GPUS)
def test_the_first_picture_is_for_a_telephone(gpu):
    """At the width of a screen of 360 points, letters of 10 points keep two thirds of their size, and it loads fast."""
    path = FOLDER / f"{gpu}-headlines.png"
    first = re.search(r"!\[[^]]*\]\(([^)]*)\)", README.read_text())[1]
    assert first == path.relative_to(ROOT).as_posix()
    assert Image.open(path).width <= 700 and path.stat().st_size < 40_000
    assert sum(file.stat().st_size for file in FOLDER.glob("*.png")) < 1_000_000


def test_a_headline_is_the_fastest_peer():
    rows = rows_of(
        {("decode-bf16-b64-s8192-h64x8-d128-p64", name): t for name, t in (("ours", 5.0), ("flashinfer", 6.0))}
    )
    (found,) = peers.headlines(peers.points(rows))
    assert peers.cells(found[1]) == ["5.0 us", "XQA 6.0 us", "1.20"]
    line = peers.headline_table("g", peers.points(rows)).splitlines()[-1]
    assert line == "| decode, 64 requests of 8192 keys, bf16 | 5.0 us | XQA 6.0 us | 1.20 |"
    assert "| `decode-bf16-b64-s8192-h64x8-d128-p64` | 5.0 us | XQA 6.0 us | 1.20 | abc123 |" in peers.full_table(
        "g", peers.points(rows)
    )


def test_ranges_name_their_ends():
    (found,) = peers.kernel_ranges(p for p in peers.points(FOUND) if p.prefix == "decode-")
    assert (found.name, found.measured, found.span) == ("decode", "2 shapes", "1.20 to 2.00")
    assert peers.range_sentence("All", [found]) == "All: 1.20 to 2.00 (decode; 2 shapes)."
    ends = "1.20 (`decode-bf16-x-p16`, XQA) | 2.00 (`decode-bf16-x-p16-q4`, XQA)"
    assert peers.range_table("g", [found]).splitlines()[-1] == f"| decode | 2 shapes | 1.20 to 2.00 | {ends} |"


def test_ranges_of_engines_are_over_their_own_backends():
    """The newest run counts, the fastest backend, and not ours over another cache."""

    def row(date, case, provider, rate):
        figures = dict.fromkeys(results.columns(results.EngineRow), 1.0) | {"tokens_per_s": rate}
        texts = {"date": date, "case": case, "provider": provider, "commit": "", "gpu": "", "driver": "", "torch": ""}
        return results.EngineRow(**figures | texts | {"reference": ""})

    case, other = "engine-vllm-a", "engine-vllm-b"
    rows = [row("1", case, "ours", 9.0), row("1", case, "vllm-a", 1.0), row("2", case, "ours", 3.0)]
    rows += [row("2", case, "vllm-a", 2.0), row("2", case, "vllm-b", 1.0)]
    rows += [row("2", other, "ours", 3.0), row("2", other, "own-fp8", 1.0)]
    assert peers.engine_ranges(rows) == [peers.Range("vLLM", "load", [(1.5, case, "vllm-a")])]


def test_every_headline_was_measured():
    measured = {p.case for rows in results.read_all().values() for p in peers.points(rows) if not p.form}
    assert peers.HEADLINES.keys() <= measured
