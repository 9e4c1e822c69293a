"""README's picture and table: every point is a pair of rows of one run, the picture is drawn from today's rows."""

import pytest
from PIL import Image

from bench import peers, plots, results
from bench.results import FOLDER, Environment


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


@pytest.mark.parametrize("gpu", [gpu for gpu, rows in results.read_all().items() if peers.points(rows)])
def test_the_picture_is_drawn_from_the_rows_of_today(gpu):
    found = peers.points(results.read_all()[gpu])
    assert Image.open(FOLDER / f"{gpu}-peers.png").text["Description"] == plots.record(found), "run: make plots"


def test_every_headline_was_measured():
    measured = {p.case for rows in results.read_all().values() for p in peers.points(rows) if not p.form}
    assert peers.HEADLINES.keys() <= measured
