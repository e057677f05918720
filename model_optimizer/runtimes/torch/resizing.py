"""The pool controller beside a running engine: what it sees after every batch, and how its orders are carried out."""

import logging
import time

from model_optimizer.memory.controller import PoolController, Reading, ResizablePool, ResizeRules, apply
from model_optimizer.memory.kv_pool import KvPool

_log = logging.getLogger(__name__)
_SCATTER_EVERY = 32
"""Batches between two looks at page tables, which take time in proportion to the pages."""


class PoolKeeper:
    """Reads the pool after each batch and has it resized or put in order; called from the engine's thread only."""

    def __init__(self, rules: ResizeRules, pool: KvPool, min_pages: int, max_pages: int):
        self.num_orders = 0
        """Orders that were carried out."""
        self._pool = pool
        self._controller = PoolController(rules, min_pages, max_pages)
        self._num_looks = 0
        self._scatter_ratio = 0.0

    def look(self, engine: ResizablePool, num_starved: int) -> None:
        """Count one batch, or one look at an idle engine, and do what is due; no slot may be reserved meanwhile."""
        if self._num_looks % _SCATTER_EVERY == 0:
            self._scatter_ratio = self._pool.occupancy().scatter_ratio
        self._num_looks += 1
        pool = self._pool
        reading = Reading(time.monotonic(), pool.num_pages, pool.num_used, num_starved, self._scatter_ratio)
        order = self._controller.observe(reading)
        if order is None:
            return
        refusal = apply(order, engine)
        if refusal:
            _log.info("KV pool: %s to %d pages was not possible: %s", order.action, order.num_pages, refusal)
            return
        self.num_orders += 1
        _log.info("KV pool: %s, %d pages now: %s", order.action, order.num_pages, order.because)
