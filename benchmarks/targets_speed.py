"""How fast vLLM serves what the engine writes, at the size of an 8B model: decoding tokens per second by scheme and streams.

    make bench NAME=targets_speed ARGS="make --folder EMPTY"          in the project's interpreter, on a GPU host
    python -m benchmarks.targets_speed measure --folder F --scheme S  in vLLM's interpreter, once per scheme

Random weights in the proportions of Llama-3.1-8B, stored as each scheme. A decoding rate is the difference of two runs, one of
a single new token and one of `NEW_TOKENS` more, so that reading the prompts does not count; median and extremes of the rounds.
The rows stand in `targets_h200.csv`, beside whether the tokens are right.
"""

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.evidence import Figure, append

if TYPE_CHECKING:
    from vllm import LLM

LAYERS, HIDDEN = 32, 4096
PROMPT_TOKENS, NEW_TOKENS = 128, 256
STREAMS = (1, 16, 64)
SCHEMES: dict[str, dict[str, str]] = {
    "bf16": {},
    "w4a16-g128": {"": "int4-g128"},
    "w8a8-int8": {"": "w8a8-int8"},
    "fp8": {"": "fp8-dynamic"},
    "mixed-int": {"self_attn": "int8-channel", "mlp": "int4-g128"},
    "mixed-fp8": {"self_attn": "fp8-dynamic", "mlp": "int4-g128"},
}
"""Scheme -> part of a linear's name -> weight format; none = bfloat16."""


def make(folder: Path, schemes: list[str]) -> None:
    from benchmarks.random_llama import write_random_mix  # needs the engine's libraries

    for scheme in schemes:
        write_random_mix(folder / scheme, LAYERS, HIDDEN, SCHEMES[scheme])
        print(scheme, time.strftime("%T"), flush=True)


def open_engine(checkpoint: Path) -> "LLM":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM

    return LLM(
        str(checkpoint),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=max(STREAMS),
        gpu_memory_utilization=0.6,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": list(STREAMS)},
    )


def wall_s(engine: "LLM", streams: int, num_new: int) -> float:
    """Return seconds in which every stream reads its prompt and writes so many tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [
        TokensPrompt(prompt_token_ids=[random.randrange(1000, 100_000) for _ in range(PROMPT_TOKENS)]) for _ in range(streams)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    passed = time.perf_counter() - start
    if any(len(answer.outputs[0].token_ids) != num_new for answer in answers):
        raise SystemExit("vLLM wrote fewer tokens than it was asked for: nothing was measured")
    return passed


def measure(folder: Path, scheme: str, rounds: int) -> list[Figure]:
    start = time.perf_counter()
    engine = open_engine(folder / scheme)
    figures = [Figure(scheme, "load_s", time.perf_counter() - start, "s", reason="make bench NAME=targets_speed")]
    random.seed(0)
    for streams in STREAMS:
        wall_s(engine, streams, 8)
        pairs = [(wall_s(engine, streams, 1), wall_s(engine, streams, NEW_TOKENS + 1)) for _ in range(rounds)]
        rates = [streams * NEW_TOKENS / (whole - first) for first, whole in pairs]
        figures.append(
            Figure(
                f"{scheme}-{streams}streams",
                "tok_per_s",
                statistics.median(rates),
                "tok/s",
                min(rates),
                max(rates),
                rounds,
                reason=f"make bench NAME=targets_speed; {PROMPT_TOKENS}-token prompts, {NEW_TOKENS} new",
            )
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("make", "measure"))
    parser.add_argument("--folder", type=Path, required=True, help="an empty place for 55 GB, kept between the steps")
    parser.add_argument("--scheme", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.step == "make":
        make(asked.folder, asked.scheme)
        return
    if len(asked.scheme) != 1:
        raise SystemExit("measure one --scheme a process: vLLM keeps the GPU's memory until its process ends")
    figures = measure(asked.folder, asked.scheme[0], asked.rounds)
    append(str(Path(__file__).with_name("targets_h200.py")), figures, ("vllm", "torch", "transformers"))


if __name__ == "__main__":
    main()
