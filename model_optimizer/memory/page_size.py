"""How many tokens a page should hold, from measurement: large pages read faster, small ones waste less at a sequence's end.

The sources contradict each other (8 for short texts, 32 for long, 256 ...; M4, X19), so it is measured on the machine with
the model's own heads and the traffic's own lengths.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from model_optimizer.artifacts.base import Frozen
from model_optimizer.decisions import Decision
from model_optimizer.memory.budget import pages_for
from model_optimizer.memory.kv_layout import KvLayout
from model_optimizer.memory.kv_storage import KvStorage
from model_optimizer.spec import Traffic
from model_optimizer.store import write_atomically

CANDIDATES = (8, 16, 32, 64, 128)
MAX_WASTE_RATIO = 0.04
"""Source: what paging is for, waste below 4 % (Kwon et al. 2023, arXiv 2309.06180, section 1)."""
TIE_RATIO = 0.05
"""Reads this close to the fastest count as equally fast; then the smallest page wins."""
NUM_SEQUENCES = 8
NUM_ROUNDS = 9
MEASURED_TOKENS = 1024
"""Longest sequence that is measured: beyond it the time per token is that of memory, for every page size alike."""


class PageSizeFigure(Frozen):
    """One candidate."""

    page_tokens: int
    read_ns_per_token: float
    """Keys and values of one layer, gathered from scattered pages; the fastest of several interleaved rounds."""
    waste_ratio: float
    """Expected empty slots over all slots of a running sequence."""


def typical_tokens(traffic: Traffic) -> int:
    """Return the tokens of a running request: its median prompt and half of its median output."""
    return traffic.prompt_tokens.p50 + traffic.output_tokens.p50 // 2


def waste_ratio(num_tokens: int, page_tokens: int) -> float:
    """Return the expected share of empty slots: on average half a page, less half a token, at the end of a sequence."""
    empty = (page_tokens - 1) / 2
    return empty / (num_tokens + empty)


def measure_page_sizes(layout: KvLayout, num_tokens: int, device: torch.device | str = "cpu") -> tuple[PageSizeFigure, ...]:
    """Return the figures of every candidate: one layer of the layout, some sequences of `num_tokens` on scattered pages."""
    measured = min(num_tokens, MEASURED_TOKENS)
    stores, tables = [], []
    generator = torch.Generator().manual_seed(0)
    for page_tokens in CANDIDATES:
        num_pages = NUM_SEQUENCES * pages_for(measured, page_tokens)
        stores.append(KvStorage(replace(layout, layers=layout.layers[:1], page_tokens=page_tokens), num_pages, device))
        tables.append(torch.randperm(num_pages, generator=generator).view(NUM_SEQUENCES, -1).to(device))
    times: list[list[float]] = [[] for _ in CANDIDATES]
    for _ in range(NUM_ROUNDS):
        for store, table, samples in zip(stores, tables, times, strict=True):
            start = time.perf_counter_ns()
            store.read(0, table)
            if store.device.type == "cuda":
                torch.cuda.synchronize(store.device)
            samples.append(time.perf_counter_ns() - start)
    return tuple(
        PageSizeFigure(
            page_tokens=page_tokens,
            read_ns_per_token=min(samples) / (NUM_SEQUENCES * measured),
            waste_ratio=waste_ratio(num_tokens, page_tokens),
        )
        for page_tokens, samples in zip(CANDIDATES, times, strict=True)
    )


def choose_page_tokens(figures: Sequence[PageSizeFigure]) -> Decision:
    """Return the decision: of the sizes that waste little enough the fastest, in a tie the smallest; `page_tokens` says which.

    Where every size wastes too much, sequences are short, and the smallest is taken.
    """
    frugal = [it for it in figures if it.waste_ratio <= MAX_WASTE_RATIO]
    fastest = min((it.read_ns_per_token for it in frugal), default=0.0)
    tied = [it for it in frugal if it.read_ns_per_token <= (1 + TIE_RATIO) * fastest]
    chosen = min(tied or figures, key=lambda it: it.page_tokens)
    because = (
        f"of the sizes that waste at most {MAX_WASTE_RATIO:.0%} it reads fastest, or as fast as a larger one"
        if tied
        else f"sequences are so short that every size wastes more than {MAX_WASTE_RATIO:.0%}; this one wastes least"
    )
    numbers: dict[str, float] = {"page_tokens": chosen.page_tokens}
    for it in figures:
        numbers[f"read_ns_per_token_{it.page_tokens}"] = it.read_ns_per_token
        numbers[f"waste_ratio_{it.page_tokens}"] = it.waste_ratio
    return Decision(subject="page size", choice=f"{chosen.page_tokens} tokens", because=because, numbers=numbers)


_FIGURES = TypeAdapter(dict[str, tuple[PageSizeFigure, ...]])


def cached_page_sizes(
    cache: Path, layout: KvLayout, num_tokens: int, device: torch.device | str = "cpu"
) -> tuple[PageSizeFigure, ...]:
    """Return figures from the file `cache` where it has them for this layer, length, device and torch, else measure and add."""
    layer = layout.layers[0]
    key = (
        f"{layer.num_kv_heads}x{layer.key_dim}+{layer.value_dim} {layout.precision}>{layout.compute_dtype} {num_tokens} tokens "
        f"{device} {torch.get_num_threads()} threads torch {torch.__version__}"
    )
    known: dict[str, tuple[PageSizeFigure, ...]] = {}
    if cache.is_file():
        try:
            known = _FIGURES.validate_json(cache.read_bytes())
        except ValidationError:  # another version's file, or a damaged one: figures can always be measured again
            known = {}
    if key not in known:
        known[key] = measure_page_sizes(layout, num_tokens, device)
        write_atomically(cache, json.dumps(_FIGURES.dump_python(known, mode="json"), indent=1).encode())
    return known[key]
