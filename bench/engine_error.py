"""Errors of whole engines: the log probabilities of their answers, against those of the same model in fp32.

An engine answers the prompts of the check, in a process of its own. Then transformers runs the model, with the same
seeded weights and eager attention in fp32, over each prompt and the tokens that the engine chose: so every token
counts, also where two engines would choose others. If tokens choose their keys, so do those of the model in fp32
(`indexer_fp32`).

The same processes say how many answers come again (`engine_worker.repeats`), and how the answers of two backends agree.
"""

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .cases.engine import CASES, EngineCase
from .engine import Run, Workers, agreement, chosen, exit_on_sigterm, reference_of, repeated
from .engine_worker import checkpoint, write_config
from .indexer_fp32 import choose_keys
from .results import AnswerRow, Environment, ErrorRow
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
            indexers = {name: weights.pop(name).float() for name in list(weights) if ".indexer." in name}
            if indexers:
                (Path(folder) / "config.json").write_text(json.dumps(without_indexer(case.config)))
            config = AutoConfig.from_pretrained(folder)
            with torch.device(device):
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
            self.model.load_state_dict(weights, strict=not config.tie_word_embeddings)
        self.model.tie_weights()
        self.model.eval()
        if indexers:
            choose_keys(self.model, indexers, case.config)

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


def without_indexer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the same model in which all tokens attend to all keys before them."""
    kept = {name: value for name, value in config.items() if not name.startswith("index_")}
    return kept | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


def measure(
    names: list[str], providers: tuple[str, ...], env: Environment, run: Run | None = None, jobs: int = 1
) -> Iterator[tuple[list[ErrorRow], list[AnswerRow]]]:
    """Yield the rows of each case, one per provider that ran.

    providers: empty for all that run a case. jobs: processes that run side by side.
    """
    pairs = {name: chosen(name, providers) for name in names}
    workers = Workers() if run is None else run
    with exit_on_sigterm(), ThreadPoolExecutor(jobs) as pool:
        found = {name: {p: pool.submit(workers, name, p, 0) for p in own} for name, own in pairs.items()}
        try:
            for name in names:
                results = {p: future.result() for p, future in found[name].items()}
                print(name, flush=True)
                yield rows_of(name, {p: r for p, r in results.items() if r is not None}, env)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(workers, Workers):
                workers.end()


def rows_of(name: str, found: dict[str, Any], env: Environment) -> tuple[list[ErrorRow], list[AnswerRow]]:
    """Return the rows of a case. found: what the workers of its providers printed."""
    beside = reference_of(found)
    if beside is None:
        return [], []
    case = CASES[name]
    reference, prompts = Reference(case), case.prompts(1, case.checked)
    errors, answers = [], []
    for provider, result in found.items():
        off = [
            abs(p - q)
            for prompt, answer in zip(prompts, result["answers"], strict=True)
            for p, q in zip(reference.logprobs(prompt, answer["tokens"]), answer["logprobs"], strict=True)
        ]
        distinct = len({token for answer in result["answers"] for token in answer["tokens"]})
        row = env.make(ErrorRow, case=name, provider=provider, tokens=float(len(off)), distinct=float(distinct),
            mean=sum(off) / len(off), p90=quantile(0.9, off), largest=max(off),
        )  # fmt: skip
        same = agreement(result["answers"], found[beside]["answers"])
        errors.append(row)
        answers.append(
            env.make(AnswerRow, case=name, provider=provider, count=float(len(result["answers"])),
                **{how: float(count) for how, count in result["repeats"].items()}, preempted=result.get("preempted"),
                common=same.common, difference=same.difference, reference=beside,
            )
        )  # fmt: skip
        print(
            f"  {provider:16} {row.tokens:.0f} tokens, {distinct} distinct   error {row.mean:.4f}, p90 {row.p90:.4f}, "
            f"largest {row.largest:.3f}   {repeated(result)}   {same.common:.0%} in common with {beside}, difference "
            f"{same.difference:.4f}",
            flush=True,
        )
    return errors, answers
