"""Models with latent attention (MLA), for cases of whole engines: the dimensions of attention are those of the models,
and the MLPs are dense and small, so that attention takes its share of a step, and an engine starts within a minute."""

from collections.abc import Iterator
from typing import Any

LAYERS = 8
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_hidden_layers": LAYERS,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "first_k_dense_replace": 64, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_layer_freq": 1, "attention_bias": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
GLM_5 = DEEPSEEK_V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "max_position_embeddings": 202752,
}  # fmt: skip


def with_heads(model: dict[str, Any], heads: int) -> dict[str, Any]:
    """Return a model with fewer heads, as one of several GPUs has it."""
    return model | {"num_attention_heads": heads, "num_key_value_heads": heads}


MODELS = {
    "v3": DEEPSEEK_V3, "v3-h16": with_heads(DEEPSEEK_V3, 16), "kimi-k2": with_heads(DEEPSEEK_V3, 64),
    "kimi-k2-h8": with_heads(DEEPSEEK_V3, 8), "dsv32": DEEPSEEK_V32, "dsv32-h16": with_heads(DEEPSEEK_V32, 16),
    "glm5-h8": with_heads(GLM_5, 8), "dsv32-few": with_heads(DEEPSEEK_V32, 16) | {"index_topk": 512},
}  # fmt: skip
INDEX_ROW = 132  # bytes of a key of the indexer
ROWS = {"bf16": 1152, "fp8": 576, "fp8_ds_mla": 656, "nvfp4_ds_mla": 352}  # bytes of a token, by the type of the cache


def token_bytes(config: dict[str, Any], kv: str) -> int:
    """Return the bytes of a token in the caches of all layers."""
    return int(config["num_hidden_layers"]) * (ROWS[kv] + (INDEX_ROW if "index_topk" in config else 0))


def shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and the shapes of the weights, as Hugging Face's checkpoints of DeepSeek V3 and V3.2 have them.
    transformers need not know the model."""
    width, q_rank, rank = c["hidden_size"], c["q_lora_rank"], c["kv_lora_rank"]
    heads, nope, rope, v = (
        c[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    yield "model.embed_tokens.weight", (c["vocab_size"], width)
    for number in range(c["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield from ((f"{layer}{name}.weight", (width,)) for name in ("input_layernorm", "post_attention_layernorm"))
        attention = {
            "q_a_proj": (q_rank, width), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * (nope + rope), q_rank),
            "kv_a_proj_with_mqa": (rank + rope, width), "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (nope + v), rank), "o_proj": (width, heads * v),
        }  # fmt: skip
        if "index_topk" in c:
            index_heads, dim = c["index_n_heads"], c["index_head_dim"]
            attention |= {
                "indexer.wq_b": (index_heads * dim, q_rank), "indexer.wk": (dim, width), "indexer.k_norm": (dim,),
                "indexer.weights_proj": (index_heads, width),
            }  # fmt: skip
            yield f"{layer}self_attn.indexer.k_norm.bias", (dim,)
        yield from ((f"{layer}self_attn.{name}.weight", shape) for name, shape in attention.items())
        for name in ("gate_proj", "up_proj", "down_proj"):
            inner = c["intermediate_size"]
            yield f"{layer}mlp.{name}.weight", (width, inner) if name == "down_proj" else (inner, width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (c["vocab_size"], width)
