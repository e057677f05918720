"""`model-optimizer init` and `doctor`."""

import json
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from flows.bootstrap import home
from model_optimizer.disk import require_writable
from model_optimizer.errors import ConfigError

TEMPLATE = """\
# `model-optimizer schema` prints what every field means and allows.
name: {name}
model: {{ref: "{model}"}}
target: {{hardware: auto}}
sla:
  concurrency: 4
  max_model_len: 512
  accuracy_loss_ratio: 0.02      # largest loss of golden-set score that is still acceptable
traffic:
  prompt_tokens: {{p50: 64, p95: 128, max: 256}}
  output_tokens: {{p50: 16, p95: 32, max: 64}}
calibration:
  path: calibration.jsonl        # your own requests: one JSON object per line with `text` or `messages`
scan:
  bits: [4, 6, 8, 32]            # 4 and 8 are formats, 6 is a mixed budget, 32 the baseline
  runtimes: [torch, onnxruntime]
verify:
  golden_sets: [quickstart-en]   # a shipped set, or a folder with card.yaml and items.jsonl
  soak: {{duration: 24h}}
"""
LIBRARIES = (
    "torch",
    "transformers",
    "optimum",
    "onnx",
    "onnxruntime",
    "compressed-tensors",
    "prefect",
    "mlflow",
    "model-signing",
)
OPTIONAL = {"gguf": "gguf", "openvino": "openvino", "fastapi": "serve", "triton": "kernels", "onnxruntime-gpu": "gpu"}
NEEDED_BYTES = 8 << 30
"""What the quickstart writes, with room to spare."""


def write_profile(path: Path, model: str) -> None:
    """Write a first profile.

    Raises:
        ConfigError: the file exists.
        StorageError: its folder cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists and is left as it is; name another file")
    require_writable(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEMPLATE.format(name=path.stem.lower().replace("_", "-"), model=model), encoding="utf-8")
    typer.echo(f"wrote {path}; put your calibration texts beside it, then: model-optimizer plan {path}")


def examine_machine(*, as_json: bool) -> None:
    """Print versions, devices, disk and servers; raise for what a run cannot do without.

    Raises:
        ConfigError: the folder cannot be written or the disk is too full.
    """
    from model_optimizer.hardware.cuda import nvml_names

    facts = {
        "python": sys.version.split()[0],
        "libraries": {name: _installed(name) or "missing" for name in LIBRARIES},
        "extras": {
            name: _installed(name) or f"absent; pip install 'model-optimizer-pipeline[{extra}]'"
            for name, extra in OPTIONAL.items()
        },
        "gpus": list(nvml_names()),
        "cores": os.cpu_count(),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "home": str(home()),
        "prefect": os.environ.get("PREFECT_API_URL", "temporary server, started by each run"),
        "mlflow": os.environ.get("MLFLOW_TRACKING_URI", f"sqlite below {home()}"),
    }
    typer.echo(
        json.dumps(facts, indent=1) if as_json else "\n".join(f"{name:16} {_plain(value)}" for name, value in facts.items())
    )
    if not os.access(Path.cwd(), os.W_OK):
        raise ConfigError(f"{Path.cwd()} cannot be written; run from a folder that can")
    free = shutil.disk_usage(Path.cwd()).free
    if free < NEEDED_BYTES:
        raise ConfigError(f"only {free >> 20} MiB are free in {Path.cwd()}; the quickstart needs {NEEDED_BYTES >> 20} MiB")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    return ", ".join(str(item) for item in value) or "none" if isinstance(value, list) else str(value)
