"""Settings and fixtures that every test shares: no network, quiet services, tiny models."""

import os
from pathlib import Path

import pytest

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(name, value)

from model_optimizer.models.tiny import write_tiny_llama  # noqa: E402


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama with a tied head."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
