"""Whether vLLM reads what the engine writes: greedy tokens of vLLM against transformers on the same checkpoint, per scheme.

A small Llama of real proportions (hidden 512, heads of 64) is trained for seconds on a random source with three likely
successors per token, so that its predictions have margins, and stored in each scheme by plain rounding. vLLM continues each
prompt; transformers then says of every token whether it would have chosen it too (`token_agreement_ratio`, float16 both).

Three steps, each in the interpreter that has its libraries: `make` (the engine), `generate` (vLLM), `compare` (the engine).
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from model_optimizer.formats.base import QuantizedTensor

VOCABULARY, HIDDEN, LAYERS = 512, 512, 4
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 32
SCHEMES = {
    "float16": {"": "float32"},
    "w4a16": {"": "int4-g64"},
    "w4a16-g128": {"": "int4-g128"},
    "w8a16": {"": "int8-channel"},
    "w8a8": {"": "w8a8-int8"},
    "fp8": {"": "fp8-dynamic"},
    "mixed": {"self_attn": "int8-channel", "mlp": "int4-g64"},
    "mixed-fp8": {"self_attn": "fp8-dynamic", "mlp": "int4-g64"},
    "w4a16-negative": {"": "int4-g64"},
    "mixed-negative": {"self_attn": "int8-channel", "mlp": "int4-g64"},
}
"""Scheme -> part of a layer's name -> weight format."""
NEGATIVE = "-negative"
"""End of the schemes whose groups have their largest weight on the outermost code, by a scale below zero where it is positive."""


def successors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return three likely successors of every token, and their probabilities."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCABULARY, (VOCABULARY, 3), generator=generator), torch.tensor([0.8, 0.15, 0.05])


def sequences(count: int, length: int, seed: int) -> torch.Tensor:
    """Return sequences [count, length] of the source."""
    table, odds = successors()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    for _ in range(length - 1):
        choice = torch.multinomial(odds.expand(count, 3), 1, generator=generator)
        tokens = torch.cat([tokens, table[tokens[:, -1]].gather(1, choice)], 1)
    return tokens


def train(steps: int) -> "torch.nn.Module":
    """Return a small Llama that knows the source."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        batch = sequences(64, 64, step).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"trained: loss {loss.item():.3f}", flush=True)
    return model.half().cpu()


def make(folder: Path, steps: int) -> None:
    """Write the model once as it is and once per scheme."""
    from model_optimizer.formats.compressed_tensors import write_checkpoint
    from model_optimizer.formats.registry import FORMATS
    from model_optimizer.formats.weights.integer import in_groups
    from model_optimizer.models.headers import read_headers
    from model_optimizer.models.weights import read_tensor
    from model_optimizer.quantization.layers import read_layers
    from model_optimizer.quantization.learned_rounding import outermost_step

    def rounded(layer: str, name: str, *, signed: bool) -> "QuantizedTensor":
        weight_format, weight_OI = FORMATS.get(name), read_tensor(headers[f"{layer}.weight"]).float()
        if not (signed and weight_format.signed_scale):
            return weight_format.quantize(weight_OI)
        return weight_format.quantize(weight_OI, outermost_step(in_groups(weight_OI, weight_format.group_size), weight_format))

    source = folder / "source"
    train(steps).save_pretrained(source)
    headers = read_headers(source)
    for scheme, parts in SCHEMES.items():
        plan = {
            layer.name: next(name for part, name in parts.items() if part in layer.name) for layer in read_layers(source).linears
        }
        write_checkpoint(
            source,
            folder / scheme,
            plan,
            lambda layer, plan=plan, signed=scheme.endswith(NEGATIVE): rounded(layer, plan[layer], signed=signed),
        )
    (folder / "prompts.json").write_text(json.dumps(sequences(NUM_PROMPTS, PROMPT_TOKENS, 10_000).tolist()))


def generate(folder: Path, scheme: str) -> None:
    """Continue every prompt greedily with vLLM."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    engine = LLM(
        str(folder / scheme),
        dtype="float16",
        skip_tokenizer_init=True,
        max_model_len=128,
        gpu_memory_utilization=0.1,
        enforce_eager=True,
    )
    loaded_s = time.perf_counter() - start
    prompts = [{"prompt_token_ids": ids} for ids in json.loads((folder / "prompts.json").read_text())]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    found = [list(answer.outputs[0].token_ids) for answer in engine.generate(prompts, sampling)]
    (folder / f"{scheme}.json").write_text(json.dumps({"tokens": found, "loaded_s": loaded_s}))


def agreements(folder: Path, schemes: list[str]) -> Iterator[tuple[str, float | None, int, str]]:
    """Yield (scheme, share of tokens that transformers would choose too, tokens, reason where there is none)."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = torch.tensor(json.loads((folder / "prompts.json").read_text()))
    for scheme in schemes:
        answer = folder / f"{scheme}.json"
        if not answer.is_file():
            log = folder / f"{scheme}.log"
            said = " ".join(log.read_text().split())[:200] if log.is_file() else "not run"
            yield scheme, None, 0, f"vLLM gave no answer: {said}"
            continue
        tokens = torch.tensor(json.loads(answer.read_text())["tokens"])
        model = AutoModelForCausalLM.from_pretrained(folder / scheme, dtype=torch.float16).to(device)
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompts, tokens], 1).to(device), use_cache=False).logits
        chosen = logits[:, PROMPT_TOKENS - 1 : -1].argmax(-1).cpu()
        yield scheme, float((chosen == tokens).float().mean()), tokens.numel(), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["make", "generate", "compare"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--steps", type=int, default=300, help="of training")
    asked = parser.parse_args()
    if asked.step == "make":
        make(asked.folder, asked.steps)
    elif asked.step == "generate":
        for scheme in asked.schemes:
            try:
                generate(asked.folder, scheme)
            except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:  # what vLLM says is the result
                (asked.folder / f"{scheme}.log").write_text(f"{type(error).__name__}: {error}")
            print(scheme, (asked.folder / f"{scheme}.json").is_file(), time.strftime("%T"), flush=True)
    else:
        from benchmarks.evidence import Figure, append

        figures = [
            Figure(scheme, "token_agreement_ratio", value, "ratio", n=count, reason=reason)
            for scheme, value, count, reason in agreements(asked.folder, asked.schemes)
        ]
        append(__file__, figures, ("torch", "transformers", "compressed-tensors"))


if __name__ == "__main__":
    main()
