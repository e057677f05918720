"""A complete tiny project: profile, calibration text and a golden set that a random model answers off floor and ceiling."""

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WORDS = ("river", "lamp", "seven", "quiet", "bread", "window", "signal", "copper", "garden", "ticket", "paper", "north")
PROFILE = """\
name: tiny
model: {{ref: "{model}"}}
sla: {{concurrency: 2, max_model_len: 96, accuracy_loss_ratio: 0.2}}
traffic: {{prompt_tokens: {{p50: 12, p95: 20, max: 24}}, output_tokens: {{p50: 6, p95: 8, max: 8}}}}
calibration: {{path: calibration.jsonl, num_samples: 24, max_length: 64}}
scan: {{bits: [8, 32], kl_tokens: 256, rounds: 3, max_kl_nats: 1.0}}
verify: {{golden_sets: [words], latency_requests: 12, soak: {{duration: 4s, segment: 2s}}}}
release: {{signer: {{key: "signer/key.pem"}}}}
"""


def write_project(directory: Path, model: Path) -> Path:
    """Write profile, calibration and golden set into `directory`; return the profile's path."""
    rng = random.Random(0)
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": " ".join(rng.choices(WORDS, k=10))}) for _ in range(40)]
    (directory / "calibration.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_golden_set(directory / "words", model, num_items=120, rng=rng)
    profile = directory / "tiny.yaml"
    text = PROFILE.format(model=model).replace("signer/key.pem", str(directory / "signer" / "key.pem"))
    profile.write_text(text, encoding="utf-8")
    return profile


def write_golden_set(directory: Path, model: Path, *, num_items: int, rng: random.Random) -> None:
    """Write items of which the model answers about three quarters right: the answer is its own choice, or not."""
    directory.mkdir()
    prompts = [f"{rng.choice(WORDS)} {index} {rng.choice(WORDS)}" for index in range(num_items)]
    pairs = [tuple(f" {word}" for word in rng.sample(WORDS, 2)) for _ in prompts]
    items = []
    for index, (prompt, choices, preferred) in enumerate(zip(prompts, pairs, preferences(model, prompts, pairs), strict=True)):
        answer = preferred if index % 4 else 1 - preferred
        slices = ["hard"] if index % 4 == 0 else ["plain"]
        items.append({"id": f"w-{index:04}", "prompt": prompt, "choices": list(choices), "answer": answer, "slices": slices})
    (directory / "items.jsonl").write_text("\n".join(json.dumps(item) for item in items) + "\n", encoding="utf-8")
    (directory / "card.yaml").write_text(
        "name: words\nversion: '1'\ndescription: words that mean nothing\nprovenance: written by the test\nlicence: Apache-2.0\n"
        "languages: [en]\nmetric: choice_accuracy\nprimary: true\n"
        "slices: {hard: {gates: false, description: against the model}, plain: {gates: false, description: with it}}\n",
        encoding="utf-8",
    )


def preferences(model: Path, prompts: list[str], pairs: list[tuple[str, ...]]) -> list[int]:
    """Return which of two choices transformers finds likelier, by summed log-probability."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    preferred = []
    for prompt, choices in zip(prompts, pairs, strict=True):
        scores = []
        for choice in choices:
            start, ids = (
                len(tokenizer.encode(prompt)),
                tokenizer.encode(prompt) + tokenizer.encode(choice, add_special_tokens=False),
            )
            with torch.no_grad():
                log_probs = network(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(sum(float(log_probs[at - 1, ids[at]]) for at in range(start, len(ids))))
        preferred.append(scores.index(max(scores)))
    return preferred
