"""What is printed when a server starts: how long loading took, where the bytes go, what fits, what was done to the weights."""

import psutil

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.target import BudgetLine
from model_optimizer.memory.budget import binary_size
from model_optimizer.serving.service import LoadedModel


class LaunchCard(Frozen):
    """One server's start."""

    url: str
    model: str
    standing: str
    runtime: str
    load_s: float
    start_s: float
    """With starting the engine's process."""
    budget: tuple[BudgetLine, ...]
    capacity_tokens: int
    max_batch: int
    max_model_len: int
    kv_origin: str
    quantization: str
    optimizer_hash: str
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return it for people."""
        width = max(len(line.part) for line in self.budget)
        rows = [f"  {line.part:{width}}  {binary_size(line.num_bytes):>10}  {line.note}" for line in self.budget]
        return "\n".join(
            [
                f"{self.model} ({self.standing})",
                f"loaded in {self.load_s:.1f} s ({self.start_s:.1f} s with the process): {self.runtime}",
                "memory",
                *rows,
                f"KV cache: {self.capacity_tokens} tokens, {self.max_batch} requests at once, {self.max_model_len} tokens each; "
                f"{self.kv_origin}",
                f"quantization: {self.quantization}",
                f"optimizer: {self.optimizer_hash}",
                *(f"note: {note}" for note in self.notes),
                f"serving at {self.url}",
            ]
        )


def launch_card(model: LoadedModel, url: str) -> LaunchCard:
    """Return what a freshly loaded model is and holds; weights and process are measured, the KV pool is the plan's."""
    source, ready, engine = model.source, model.ready, model.keeper.running()
    process = psutil.Process(engine.pid).memory_info().rss
    pool = source.kv.pool_bytes
    free = psutil.virtual_memory().available
    return LaunchCard(
        url=url,
        model=source.name,
        standing=source.standing,
        runtime=f"{ready.runtime} {ready.version} on {ready.device}, {ready.precision}",
        load_s=ready.load_s,
        start_s=engine.start_s,
        budget=(
            BudgetLine(part="weights", num_bytes=ready.weight_bytes, note="as resident in the runtime"),
            BudgetLine(part="kv_reservation", num_bytes=pool, note="all pages of the plan"),
            BudgetLine(part="process", num_bytes=process, note="resident now, weights included"),
            BudgetLine(part="free", num_bytes=free, note="of the machine, now"),
            BudgetLine(
                part="margin", num_bytes=free - pool, note="free once every page is in use, where the pool is not held yet"
            ),
        ),
        capacity_tokens=source.kv.capacity_tokens,
        max_batch=ready.max_batch,
        max_model_len=ready.max_model_len,
        kv_origin=source.kv_origin,
        quantization=source.quantization,
        optimizer_hash=source.optimizer_hash,
        notes=ready.notes,
    )
