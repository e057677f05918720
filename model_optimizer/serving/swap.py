"""Follow the link `current` of a deployment root: load what it points to, then let new requests go there."""

import asyncio
import logging

from model_optimizer.errors import ModelOptimizerError
from model_optimizer.release.deployment_root import CURRENT, DeploymentRoot
from model_optimizer.serving.service import Service, load_model

log = logging.getLogger(__name__)


async def follow_root(service: Service, root: DeploymentRoot) -> None:
    """Look at the link again and again; what does not verify or open is told and the model before it goes on.

    Both models are in memory until the last request of the earlier one has ended. Law: no request is refused or
    cut off by a swap.
    """
    refused: str | None = None
    while True:
        await asyncio.sleep(service.config.watch_s)
        try:
            name = (root.path / CURRENT).readlink().name
        except OSError:
            continue
        if name == service.active.source.name:
            refused = None
        if name in (service.active.source.name, refused):
            continue
        try:
            model = await load_model(root.path, service.config)
        except (ModelOptimizerError, OSError, ValueError) as error:  # it may have been taken away meanwhile
            refused = name
            service.metrics.swaps.labels("refused").inc()
            log.warning(
                "%s is current in %s and cannot be served: %s; %s goes on", name, root.path, error, service.active.source.name
            )
            continue
        refused = None
        log.warning("%s is served from now on; %s ends with its last request", model.source.name, service.active.source.name)
        service.swap(model)
        service.metrics.swaps.labels("done").inc()
