"""Ask llm-compressor, in its own interpreter, to quantize a model that the walk of this product does not cover.

It needs other versions of shared libraries than this product, so that it is spoken to through files and a process: our
calibration tokens and a request go in; a checkpoint comes out, of which codes and scales are taken, exactly. What is
published is written here, so that it looks like every other checkpoint.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from pydantic import BaseModel
from safetensors.torch import save

from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.formats.base import WeightFormat
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Progress
from model_optimizer.store import write_atomically

VARIABLE = "MODEL_OPTIMIZER_LLMCOMPRESSOR_PYTHON"
"""Names the interpreter of an environment with llm-compressor; a variable, so that no result depends on a path."""
INSTALL = "python -m venv ENV && ENV/bin/pip install llmcompressor==0.14.0.1 transformers==5.17.0"
"""Versions that were tried. Source: tests/unit/test_quantization_adaptor.py against that environment."""
SCRIPT = Path(__file__).with_name("llmcompressor_script.py")
METHODS = ("gptq", "rtn")
REQUEST, RESPONSE, TOKENS, OUTPUT, LOG = "request.json", "response.json", "tokens.safetensors", "theirs", "llmcompressor.log"
_LOG_LINES = 5

Follow = Callable[[Iterator[str]], object]
"""Reads all lines that the script tells."""


class Response(BaseModel):
    """What the script writes last."""

    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class OutsideJob:
    """What llm-compressor is asked for."""

    model: Path
    plan: Mapping[str, str]
    """Every linear layer -> format name."""
    method: str
    sequences: Sequence[tuple[int, ...]]
    """Calibration tokens, prepared here; unused by rtn."""
    seed: int = 0

    @property
    def on_grid(self) -> tuple[str, ...]:
        """Return the layers that are to be rounded."""
        return tuple(layer for layer, name in self.plan.items() if FORMATS.get(name).on_grid)


def configured_interpreter() -> Path:
    """Return the interpreter that the environment names.

    Raises:
        UnsupportedError: none is named, or it is no file; says what to install.
    """
    stated = os.environ.get(VARIABLE)
    if not stated or not Path(stated).is_file():
        seen = f"names {stated!r}, which is no file" if stated else "is not set"
        raise UnsupportedError(
            f"llm-compressor quantizes what this product does not cover, in an environment of its own, and {VARIABLE} {seen}; "
            f"install one ({INSTALL}) and set it to ENV/bin/python"
        )
    return Path(stated)


def library_versions(interpreter: Path, workspace: Path) -> dict[str, str]:
    """Return the versions of llm-compressor and what it stands on; seconds.

    Raises:
        UnsupportedError: the interpreter has no llm-compressor.
    """
    request = {"model": None, "response": str(workspace / RESPONSE)}
    return _run(interpreter, request, workspace, list).versions


def quantize_outside(job: OutsideJob, interpreter: Path, workspace: Path, *, progress: Progress) -> Path:
    """Let llm-compressor quantize; return the directory of its checkpoint.

    Raises:
        UnsupportedError: a method or format that it is not asked for here, or it failed; the log's last lines are told.
        IntegrityError: it ended well and left no whole response.
    """
    request = build_request(job, workspace)
    if request["tokens"] is not None:
        write_atomically(workspace / TOKENS, save(calibration_tensors(job.sequences)))
    total = len(job.on_grid) if job.method == "gptq" else None

    def follow(lines: Iterator[str]) -> None:
        for _ in progress.track(_rounded_layers(lines, progress), "llm-compressor", total):
            pass

    response = _run(interpreter, request, workspace, follow)
    progress.note("; ".join(f"{name} {version}" for name, version in response.versions.items()))
    return workspace / OUTPUT


def build_request(job: OutsideJob, workspace: Path) -> dict[str, object]:
    """Return what the script reads.

    Raises:
        UnsupportedError: a method or format that llm-compressor is not asked for here.
    """
    if job.method not in METHODS:
        raise UnsupportedError(f"llm-compressor is not asked for method {job.method!r}; allowed: {', '.join(METHODS)}")
    names = sorted({job.plan[layer] for layer in job.on_grid})
    groups = {
        f"group_{number}": {
            "targets": [layer for layer in job.on_grid if job.plan[layer] == name],
            "weights": _weight_arguments(FORMATS.get(name)),
        }
        for number, name in enumerate(names)
    }
    return {
        "model": str(job.model),
        "method": job.method,
        "groups": groups,
        "ignore": [layer for layer in job.plan if layer not in set(job.on_grid)],
        "tokens": str(workspace / TOKENS) if job.method == "gptq" else None,
        "seed": job.seed,
        "output": str(workspace / OUTPUT),
        "response": str(workspace / RESPONSE),
    }


def _weight_arguments(weight_format: WeightFormat) -> dict[str, object]:
    if weight_format.storage != "pack-quantized" or not weight_format.symmetric or weight_format.activation is not None:
        raise UnsupportedError(
            f"llm-compressor is not asked for {weight_format.name} here; allowed are symmetric integer weights, such as int4-g64"
        )
    return {
        "num_bits": weight_format.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if weight_format.group_size is None else "group",
        "group_size": weight_format.group_size,
        "scale_dtype": "float16",
    }


def calibration_tensors(sequences: Sequence[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return all tokens one after another, and how many each sequence has."""
    flat = [token for tokens in sequences for token in tokens]
    return {"tokens": torch.tensor(flat, dtype=torch.int64), "lengths": torch.tensor([len(it) for it in sequences])}


def _rounded_layers(lines: Iterator[str], progress: Progress) -> Iterator[str]:
    """Yield once per layer that the script says is rounded, and hand its notes on."""
    for line in lines:
        kind, _, rest = line.removeprefix("@ ").partition(" ")
        if kind == "layers":
            yield from [rest] * int(rest)
        elif kind == "note":
            progress.note(f"llm-compressor: {rest}")


def _run(interpreter: Path, request: Mapping[str, object], workspace: Path, follow: Follow) -> Response:
    """Run the script as a process of its own, which ends with this call, whatever happens."""
    (workspace / RESPONSE).unlink(missing_ok=True)
    write_atomically(workspace / REQUEST, json.dumps(request, indent=1).encode())
    command = [str(interpreter), "-I", str(SCRIPT), str(workspace / REQUEST)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (workspace / LOG).open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment, text=True, cwd=workspace
        )
        try:
            assert process.stdout is not None, "it was asked for"
            follow(_told(process.stdout, log))
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    if code:
        raise UnsupportedError(f"llm-compressor in {interpreter} ended with code {code}: {_last_lines(workspace / LOG)}")
    if not (workspace / RESPONSE).is_file():
        raise IntegrityError(f"{interpreter} ended well and left no {RESPONSE}; see {workspace / LOG}")
    return Response.model_validate_json((workspace / RESPONSE).read_bytes())


def _told(lines: Iterator[str], log: TextIO) -> Iterator[str]:
    """Yield the script's own lines; others go to the log."""
    for line in lines:
        if line.startswith("@ "):
            yield line.rstrip("\n")
        else:
            log.write(line)


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_LOG_LINES:]) or "no output"
