"""The demo's picture: what queries attend to, which keys were selected, and the kernels' results against torch's."""

from pathlib import Path
from typing import Any

import torch

from . import demo_latent
from .demo_kernels import ROOT, K
from .demo_latent import LatentBatch
from .demo_steps import LayerBatch, expected

PICTURE = ROOT / "build" / "demo.png"
SHOWN = 64  # the last tokens of the first request


def draw(
    batch: LayerBatch, latent: LatentBatch, results: list[Any], latent_results: list[Any], path: Path = PICTURE
) -> str:
    """Draw the results of the steps, and return where the picture is, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), width_ratios=(2, 1), layout="constrained")
    batch, latent, (out, _, keys) = batch.to("cpu"), latent.to("cpu"), (t.cpu() for t in results)
    attended, (sparse, slots) = latent_results[0].cpu(), (t.cpu() for t in latent_results[1])
    rows = demo_latent.tokens_at(latent, slots)
    draw_attention(axes[0, 0], batch, keys)
    scatter(axes[0, 1], "prefill", {"all tokens": (out, expected(batch)[:, : out.shape[1]])})
    draw_selection(axes[1, 0], latent, rows[0])
    same = demo_latent.over(latent, demo_latent.rows_of(latent))
    kept = demo_latent.over(latent, [chosen[chosen >= 0] for chosen in rows])
    scatter(axes[1, 1], "latent attention", {"all keys": (attended, same), "selected keys": (sparse, kept)})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"picture: {path}"


def draw_attention(axes: Any, batch: LayerBatch, keys: torch.Tensor) -> None:
    """Draw the weights of one head of the first request, and the keys that top-k selected for its last token."""
    n = batch.lengths[0]
    logits = batch.q[n - SHOWN : n, 0].float() @ batch.k[:n, 0].float().T * batch.scale
    axes.imshow(logits.softmax(1).sqrt().numpy(), aspect="auto", cmap="Blues", extent=(0, n, n, n - SHOWN))
    axes.plot(keys[0].numpy() + 0.5, [n - 0.5] * K, "r^", clip_on=False, label=f"the {K} keys of highest score")
    axes.set(xlabel="key", ylabel="query", title="attention of one head on real text")
    axes.legend(loc="upper left")


def draw_selection(axes: Any, latent: LatentBatch, rows: torch.Tensor) -> None:
    """Draw the weights of the first request's last token, summed over heads, and the keys that the indexer selected."""
    weights = latent.shares[:, : latent.lengths[0]].sum(0)
    axes.vlines(range(len(weights)), 0, weights.sqrt().numpy(), color="tab:blue", lw=1)
    axes.plot(rows.numpy(), weights[rows].sqrt().numpy(), "r.", label=f"the {len(rows)} keys that the indexer selects")
    axes.set(xlabel="key", ylabel="square root of the weight", title="attention of the last token, sum of all heads")
    axes.legend(loc="upper left")


def scatter(axes: Any, title: str, results: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Draw every value of kernels' results against torch's. results: (result, torch's) by label."""
    for label, (out, want) in results.items():
        (points,) = axes.plot(want.flatten().numpy(), out.float().flatten().numpy(), ",")
        axes.plot([], [], "s", color=points.get_color(), label=label)  # a pixel is too small for the legend
    axes.axline((0, 0), slope=1, color="tab:gray", lw=0.5)
    axes.set(xlabel="torch, fp32", ylabel="kernel", title=title)
    axes.legend(loc="upper left")
