"""The indexer of DeepSeek V3.2 in fp32: lets the tokens of a transformers model attend to the keys that they choose.

transformers need not know models with an indexer. `choose_keys` takes DeepSeek V3's, in which a token attends to all
keys before it, and hides from each layer's attention the keys that its indexer leaves out. The indexer has no e4m3
rounding and no Hadamard rotation, which changes no product of a query and a key.
"""

from typing import Any

EPS = 1e-6  # of the norm of the indexer's keys


def choose_keys(model: Any, indexers: dict[str, Any], config: dict[str, Any]) -> None:
    """Let the tokens of a model attend to chosen keys alone. indexers: the weights of all layers' indexers, by their
    names in the checkpoint. config: of the model with its indexer."""
    for number, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{number}.self_attn.indexer."
        own = {name.removeprefix(prefix): weight for name, weight in indexers.items() if name.startswith(prefix)}
        layer.self_attn.register_forward_pre_hook(Indexer(own, config), with_kwargs=True)


class Indexer:
    """The indexer of a layer, as a hook before its attention. weights: by their names in the layer's indexer."""

    def __init__(self, weights: dict[str, Any], config: dict[str, Any]) -> None:
        self.weights, self.kept = weights, config["index_topk"]
        self.heads, self.dim, self.rotated = (
            config[name] for name in ("index_n_heads", "index_head_dim", "qk_rope_head_dim")
        )

    def __call__(self, attention: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of the attention, with a mask that hides the keys that were not chosen."""
        import torch

        mask, hidden = given["attention_mask"], given["hidden_states"]
        logits = self.logits(attention, hidden, given["position_embeddings"]) + mask[:, 0]
        chosen = logits.topk(min(self.kept, logits.shape[-1]), dim=-1).indices
        left_out = torch.full_like(logits, float("-inf")).scatter_(-1, chosen, 0.0)
        return args, given | {"attention_mask": mask + left_out[:, None]}

    def logits(self, attention: Any, hidden: Any, positions: tuple[Any, Any]) -> Any:
        """Return the logits (B, T, S) of keys: sums over heads of weight * relu(query * key)."""
        import torch.nn.functional as F

        w = self.weights
        latent = attention.q_a_layernorm(attention.q_a_proj(hidden))
        q = F.linear(latent, w["wq_b.weight"]).unflatten(-1, (self.heads, self.dim))
        k = F.layer_norm(F.linear(hidden, w["wk.weight"]), (self.dim,), w["k_norm.weight"], w["k_norm.bias"], EPS)
        cos, sin = (table.unsqueeze(2) for table in positions)  # (B, S, 1, rotated)
        q, k = (rotate(x, cos, sin, self.rotated) for x in (q, k.unsqueeze(2)))
        weights = F.linear(hidden, w["weights_proj.weight"]) * (self.heads * self.dim) ** -0.5
        products = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).relu()  # (B, heads, T, S)
        return (products * weights.transpose(1, 2).unsqueeze(-1)).sum(1)


def rotate(x: Any, cos: Any, sin: Any, rotated: int) -> Any:
    """Return x with its first columns rotated: column i with column i + rotated / 2."""
    import torch

    first, second = x[..., :rotated].chunk(2, -1)
    turned = x[..., :rotated] * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, x[..., rotated:]), -1)
