"""GPU slots: runs that share a Prefect server take turns on its GPUs.

A global concurrency limit says how many stages may use a GPU at once: `prefect gcl create gpu --limit 1`. A run takes a slot
for every stage that it makes and gives it back after it, so that a run on a GPU never measures beside another one. Prefect
renews the slot's lease while the stage lasts; after kill -9 the slot is free again when the lease ends. Without such a limit,
and for a run on a CPU, nothing is waited for.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from flows.target import device_of
from model_optimizer.protocols import Progress

log = logging.getLogger(__name__)

LIMIT_VARIABLE = "MODEL_OPTIMIZER_GPU_LIMIT"
"""Names another limit: a worker per machine has one of its own."""
DEFAULT_LIMIT = "gpu"
LEASE_S = 300.0
"""How long a slot of a killed run stays taken."""

Slot = Callable[[], AbstractContextManager[None]]


def slot_for(hardware: str, progress: Progress) -> Slot:
    """Return what a stage holds while it works: a slot of the GPU limit, or nothing where `target.hardware` is a CPU."""
    if device_of(hardware).capability is None:
        return nullcontext
    return lambda: gpu_slot(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT, progress)


@contextmanager
def gpu_slot(name: str, progress: Progress) -> Iterator[None]:
    """Hold one slot of the limit `name`, waiting for it if need be; return at once where the server has no such limit.

    A lease that cannot be renewed is warned of and does not end the stage: hours of work are worth more than a turn.
    """
    limit = _find(name)
    if limit is None or not limit.active:
        yield
        return
    if limit.active_slots >= limit.limit:
        line = f"waiting for a GPU: all {limit.limit} slots of the limit {name!r} are taken (`prefect gcl inspect {name}`)"
        log.info(line)
        progress.note(line)
    with concurrency(name, occupy=1, lease_duration=LEASE_S, strict=False):
        yield


def _find(name: str) -> GlobalConcurrencyLimitResponse | None:
    """Return the limit as it stands, or None where the server has none."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            return None
