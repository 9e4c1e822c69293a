"""Errors of whole engines: the log probabilities of their answers, against those of the same model in fp32.

An engine answers the prompts of the check, in a process of its own. Then transformers runs the model, with the same
seeded weights and eager attention in fp32, over each prompt and the tokens that the engine chose: so every token
counts, also where two engines would choose others."""

import json
import tempfile
from pathlib import Path
from typing import Any

from .cases.engine import CASES, CHECKED, CHECKED_OUTPUTS, EngineCase
from .engine import Run, worker
from .engine_worker import BACKENDS, checkpoint, write_config
from .results import Environment, ErrorRow
from .timing import quantile


class Reference:
    """The model of a case in fp32."""

    def __init__(self, case: EngineCase) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        with tempfile.TemporaryDirectory() as folder:
            write_config(case, Path(folder))
            weights = dict(checkpoint(folder))
            if case.attention == "dsa":
                (Path(folder) / "config.json").write_text(json.dumps(dense(case)))
                weights = {name: weight for name, weight in weights.items() if ".indexer." not in name}
            config = AutoConfig.from_pretrained(folder)
            with torch.device(device):
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
            self.model.load_state_dict(weights, strict=not config.tie_word_embeddings)
        self.model.tie_weights()
        self.model.eval()

    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Return the log probability of each token that follows a prompt."""
        import torch

        device = self.model.device
        with torch.no_grad():
            ids = torch.tensor([prompt + tokens], device=device)
            logits = self.model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        chosen = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens, device=device)[:, None])
        found: list[float] = chosen[:, 0].tolist()
        return found


def dense(case: EngineCase) -> dict[str, Any]:
    """Return the config.json of the same model without an indexer. Raise SystemExit if one would leave out keys."""
    config = case.config
    if config["index_topk"] < max(CHECKED) + CHECKED_OUTPUTS:
        raise SystemExit(f"{case.name}: its indexer leaves out keys, and the reference has all")
    kept = {name: value for name, value in config.items() if not name.startswith("index_")}
    return kept | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


def measure(name: str, providers: tuple[str, ...], env: Environment, run: Run = worker) -> list[ErrorRow]:
    """Return the rows of a case, one per provider that ran."""
    case = CASES[name]
    unknown = [p for p in providers if p not in BACKENDS[case.engine]]
    if unknown:
        allowed = ", ".join(BACKENDS[case.engine])
        raise SystemExit(f"{case.engine} has no provider {', '.join(unknown)}; it has: {allowed}")
    found: dict[str, Any] = {provider: run(name, provider, 1) for provider in providers}
    if not any(found.values()):
        return []
    reference, prompts, rows = Reference(case), case.prompts(1, list(CHECKED)), []
    for provider, result in found.items():
        if result is None:
            continue
        errors = [
            abs(p - q)
            for prompt, answer in zip(prompts, result["answers"], strict=True)
            for p, q in zip(reference.logprobs(prompt, answer["tokens"]), answer["logprobs"], strict=True)
        ]
        distinct = len({token for answer in result["answers"] for token in answer["tokens"]})
        rows.append(
            env.make(ErrorRow, case=name, provider=provider, tokens=float(len(errors)), distinct=float(distinct),
                mean=sum(errors) / len(errors), p90=quantile(0.9, errors), largest=max(errors),
            )
        )  # fmt: skip
        found_errors = f"error {rows[-1].mean:.4f}, p90 {rows[-1].p90:.4f}, largest {rows[-1].largest:.3f}"
        print(f"  {provider:16} {len(errors)} tokens, {distinct} distinct   {found_errors}", flush=True)
    return rows
