"""README's picture and sentences: every point is a pair of rows of one run, the picture is drawn from today's rows."""

import re

import pytest
from PIL import Image

from bench import peers, plots, readme, results
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
    """What is ours in another form, a floor, a form of which ours has no row, a case without ours: no points."""
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


def test_sentences_name_gpu_commits_and_numbers_of_shapes():
    newer = rows_of({("serve-y", "ours"): 10.0, ("serve-y", "flash-attn-4"): 11.0}, "2026-02-01", "def456")
    assert " ".join(peers.sentences({"nvidia-x": FOUND + newer}).split()) == (
        "- Prefill, chunks and mixed batches in bf16 are 0.80 to 1.10 times as fast as flash-attn-4 (2 shapes) "
        "and 1.50 times as fast as flashinfer fa3 (1 shape): nvidia-x, commits abc123 and def456. "
        "- Decode of one query token reads K and V at 0.90 of the rate of a device copy in bf16 (1 shape); it is 1.20 "
        "times as fast as XQA (1 shape): nvidia-x, commit abc123. "
        "- Exact top-k is 7.00 times as fast as torch.topk (1 shape): nvidia-x, commit abc123."
    )
    assert peers.sentences({}) == peers.sentences({"g": []}) == "Not measured yet."


def test_every_bar_is_a_point(tmp_path, monkeypatch):
    drawn, save = [], plots.save
    monkeypatch.setattr(plots, "save", lambda fig, path, **kept: drawn.append(fig) or save(fig, path, **kept))
    path = plots.peers(FOUND, "g", tmp_path)
    bars = [bar.get_width() + 1 for axis in drawn[0].axes for bar in axis.patches if bar.get_width()]
    assert bars == pytest.approx([p.ratio for p in peers.points(FOUND)])
    assert [axis.get_ylim()[0] for axis in drawn[0].axes] == [8.6, 1.6]  # a line a case and a line a family
    assert Image.open(path).text["Description"] == plots.record(peers.points(FOUND))
    assert "nvidia" not in readme.pictured({"g": FOUND}, tmp_path.parent) and plots.peers([], "g", tmp_path) is None


@pytest.mark.parametrize("gpu", [gpu for gpu, rows in results.read_all().items() if peers.points(rows)])
def test_the_picture_is_drawn_from_the_rows_of_today(gpu):
    found = peers.points(results.read_all()[gpu])
    assert Image.open(FOLDER / f"{gpu}-peers.png").text["Description"] == plots.record(found), "run: make plots"


def test_headlines_have_three_sentences():
    lines = re.findall(r"^- (.*(?:\n  .*)*)", peers.sentences(results.read_all()), re.M)
    assert len(lines) == 3 * len(results.read_all())
    for line in lines:
        assert re.search(r": nvidia-\w+, commits? [0-9a-f]{7}", " ".join(line.split()))
