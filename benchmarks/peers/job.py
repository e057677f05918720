"""One job of a peer: which model, which calibration tokens, how many bits; and the one form in which every peer reports.

Runs in a peer's own environment (`PEER/bin/python -m benchmarks.peers.NAME.quantize`, in the repository's root), so it may
import torch and safetensors only, and nothing of the product.

Shape letters: B sequences, T tokens of one sequence, O output features, I input features.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

WEIGHTS, RESULT = "weights.safetensors", "result.json"
SCALE_BITS = 16
"""Scales are counted as float16, whatever the peer computes with."""
UNQUANTIZED_BITS = 16
"""What a layer without a format is counted as."""


@dataclass(frozen=True)
class Stored:
    """How one layer is stored; `group_size` None = one scale per output channel."""

    bits: int
    group_size: int | None = None
    symmetric: bool = True

    @property
    def label(self) -> str:
        if self.bits >= UNQUANTIZED_BITS:
            return f"float{self.bits}"
        grain = f"g{self.group_size}" if self.group_size else "channel"
        return f"int{self.bits}-{grain}{'' if self.symmetric else '-asym'}"

    def num_bits(self, out_features: int, in_features: int) -> int:
        """Return payload, scales and zero points of a weight [O, I]; padding is not counted, which favours peers."""
        payload = out_features * in_features * self.bits
        if self.bits >= UNQUANTIZED_BITS:
            return payload
        groups = out_features * (-(-in_features // self.group_size) if self.group_size else 1)
        return payload + groups * (SCALE_BITS + (0 if self.symmetric else self.bits))


@dataclass(frozen=True)
class Job:
    model: Path
    tokens: Path
    """A safetensors file with `tokens_BT`."""
    bits: float
    """True bits per weight that the result may have at most."""
    output: Path
    variant: str = ""
    """Another way of the same tool, where it has one."""

    @classmethod
    def parse(cls) -> "Job":
        parser = argparse.ArgumentParser()
        for name in ("model", "tokens", "output"):
            parser.add_argument(f"--{name}", type=Path, required=True)
        parser.add_argument("--bits", type=float, required=True)
        parser.add_argument("--variant", default="")
        return cls(**vars(parser.parse_args()))

    def read_tokens(self) -> torch.Tensor:
        """Return the calibration tokens [B, T]."""
        return load_file(self.tokens)["tokens_BT"]

    def load_model(self) -> nn.Module:
        """Return the float32 model in eval mode."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        return model


@dataclass
class Spent:
    """Time of quantization alone, and the process's peak memory at its end."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of all threads; a busy machine stretches it least."""
    peak_rss_bytes: int = 0


@contextmanager
def measured() -> Iterator[Spent]:
    spent, start, start_cpu = Spent(), time.perf_counter(), time.process_time()
    yield spent
    spent.wall_s = time.perf_counter() - start
    spent.cpu_s = time.process_time() - start_cpu
    spent.peak_rss_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(frozen=True)
class Outcome:
    """What a peer made: dequantized weights and how they are stored, by layer name."""

    weights: Mapping[str, torch.Tensor]
    stored: Mapping[str, Stored]
    spent: Spent
    settings: Mapping[str, str | int | float | bool]
    libraries: tuple[str, ...] = field(default=())

    @property
    def true_bits(self) -> float:
        total = sum(self.stored[name].num_bits(*weight_OI.shape) for name, weight_OI in self.weights.items())
        return total / sum(weight_OI.numel() for weight_OI in self.weights.values())

    def write(self, output: Path) -> None:
        """Write `weights.safetensors` (float32) and `result.json`."""
        output.mkdir(parents=True, exist_ok=True)
        save_file({name: weight_OI.detach().float().contiguous() for name, weight_OI in self.weights.items()}, output / WEIGHTS)
        formats = {name: stored.label for name, stored in self.stored.items()}
        write_report(output, self.true_bits, formats, self.spent, self.settings, self.libraries)


def write_report(
    output: Path,
    true_bits: float,
    formats: Mapping[str, str],
    spent: Spent,
    settings: Mapping[str, str | int | float | bool],
    libraries: tuple[str, ...] = (),
) -> None:
    """Write `result.json`; it comes last, so that its presence says that the output is whole."""
    result = {
        "true_bits": true_bits,
        "formats": dict(formats),
        **asdict(spent),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in (*libraries, "torch", "transformers")},
        "settings": dict(settings),
    }
    (output / RESULT).write_text(json.dumps(result, indent=1), encoding="utf-8")


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by name; the head stays as it is."""
    return {name: it for name, it in model.named_modules() if isinstance(it, nn.Linear) and not name.endswith("lm_head")}
