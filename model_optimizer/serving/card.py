"""What is printed when a server starts: how long loading took, where the bytes go, what fits, what was done to the weights."""

import psutil

from model_optimizer.artifacts.base import Frozen
from model_optimizer.memory.budget import binary_size
from model_optimizer.memory.table import MemoryTable, headline
from model_optimizer.serving.budget import loaded_table
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
    memory: MemoryTable
    capacity_tokens: int
    max_batch: int
    max_model_len: int
    kv_origin: str
    quantization: str
    optimizer_hash: str
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return it for people."""
        table = self.memory
        width = max(len(line.part) for line in table.budget)
        rows = [f"  {line.part:{width}}  {binary_size(line.num_bytes):>10}  {line.note}" for line in table.budget]
        return "\n".join(
            [
                f"{self.model} ({self.standing})",
                f"loaded in {self.load_s:.1f} s ({self.start_s:.1f} s with the process): {self.runtime}",
                f"memory ({table.attention}, on {table.device} with {table.runtime})",
                *rows,
                headline(table),
                f"KV cache: {self.capacity_tokens} tokens, {self.max_batch} requests at once, {self.max_model_len} tokens each; "
                f"{self.kv_origin}",
                f"quantization: {self.quantization}",
                f"optimizer: {self.optimizer_hash}",
                *(f"note: {note}" for note in self.notes),
                f"serving at {self.url}",
            ]
        )


def launch_card(model: LoadedModel, url: str) -> LaunchCard:
    """Return what a freshly loaded model is and holds; its memory table beside it."""
    source, ready, engine = model.source, model.ready, model.keeper.running()
    process = psutil.Process(engine.pid)
    resident = sum(it.memory_info().rss for it in (process, *process.children(recursive=True)))
    return LaunchCard(
        url=url,
        model=source.name,
        standing=source.standing,
        runtime=f"{ready.runtime} {ready.version} on {ready.device}, {ready.precision}",
        load_s=ready.load_s,
        start_s=engine.start_s,
        memory=loaded_table(source, ready, resident),
        capacity_tokens=source.kv.capacity_tokens,
        max_batch=ready.max_batch,
        max_model_len=ready.max_model_len,
        kv_origin=source.kv_origin,
        quantization=source.quantization,
        optimizer_hash=source.optimizer_hash,
        notes=ready.notes,
    )
