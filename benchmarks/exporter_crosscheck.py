"""Our ONNX graph beside those of two other exporters, and all three beside transformers: logits, tokens, nodes, seconds.

    make bench NAME=exporter_crosscheck ARGS="--peers FOLDER"

`optimum` is optimum-onnx with transformers 4, `genai` the model builder of ONNX Runtime GenAI; each runs in its own environment,
FOLDER/<tool>/bin/python, see benchmarks/peers/<tool>/requirements.txt. Every graph is run here by the same ONNX Runtime on the
same tokens: sequences of 1 to 184 tokens at once, and 16 tokens decoded greedily with keys and values fed back. transformers 4
does not read where transformers 5 writes the rotary base, and would take 10000 in silence: its copy of the model says it there.

Shape letters: T tokens, V vocabulary.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from model_optimizer.compilation.export import export_model
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.parity import Reference, parity_sequences, reference_of
from model_optimizer.metrics.kl_divergence import mean_kl_nats
from model_optimizer.models.tiny import write_tiny_llama

OURS = "ours"
WORDS = 400


class Graph:
    """A decoder as ONNX, fed by the names of its inputs."""

    def __init__(self, path: Path, model: Path):
        config = json.loads((model / "config.json").read_bytes())
        self._heads = config["num_key_value_heads"]
        self._width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]

    def step(
        self, tokens: tuple[int, ...], past: dict[str, NDArray[np.float32]] | None
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Return the logits [T, V] of the new tokens, and all keys and values by the name under which they go in again."""
        cache = self._empty() if past is None else past
        length = next(iter(cache.values())).shape[2]
        feeds: dict[str, NDArray[np.generic]] = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, length + len(tokens)), np.int64),
            "position_ids": np.arange(length, length + len(tokens))[None],
            "logits_from": np.zeros(1, np.int64),
            **cache,
        }
        found = self._session.run(None, {name: value for name, value in feeds.items() if name in self._inputs})
        by_name = dict(zip(self._outputs, found, strict=True))
        logits_TV: NDArray[np.float32] = by_name.pop("logits")[0]
        return logits_TV, {name.replace("present", "past_key_values"): value for name, value in by_name.items()}

    def greedy(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        logits_TV, cache = self.step(prompt, None)
        found = [int(logits_TV[-1].argmax())]
        while len(found) < count:
            logits_TV, cache = self.step((found[-1],), cache)
            found.append(int(logits_TV[-1].argmax()))
        return tuple(found)

    def _empty(self) -> dict[str, NDArray[np.float32]]:
        empty = np.zeros((1, self._heads, 0, self._width), np.float32)
        return dict.fromkeys((name for name in self._inputs if name.startswith("past_key_values")), empty)


def readable_by_transformers_4(model: Path, folder: Path) -> Path:
    """Copy weights and configuration, with the rotary base where transformers 4 looks for it, and no tokenizer."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_bytes())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = config.get("dtype", "float32")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for weights in model.glob("*.safetensors*"):
        shutil.copyfile(weights, folder / weights.name)
    return folder


def by_optimum(python: Path, model: Path, folder: Path) -> list[str]:
    source = readable_by_transformers_4(model, folder.with_name("transformers4"))
    task = ["--task", "text-generation-with-past", "--no-post-process"]
    return [str(python), "-m", "optimum.exporters.onnx", "--model", str(source), *task, str(folder)]


def by_genai(python: Path, model: Path, folder: Path) -> list[str]:
    where = ["-i", str(model), "-o", str(folder), "-c", str(folder.with_name("cache"))]
    return [str(python), "-m", "onnxruntime_genai.models.builder", *where, "-p", "fp32", "-e", "cpu"]


EXPORTERS: dict[str, Callable[[Path, Path, Path], list[str]]] = {"optimum": by_optimum, "genai": by_genai}


def export(tool: str, model: Path, folder: Path, peers: Path, limit_s: float) -> str | None:
    """Let a tool write `folder/model.onnx`; return why there is none."""
    if tool == OURS:
        export_model(model, folder)
        return None
    python = (peers / tool / "bin" / "python").absolute()
    if not python.is_file():
        return f"{python} is not there; see benchmarks/peers/{tool}/requirements.txt"
    try:
        command = EXPORTERS[tool](python, model, folder)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"{tool} took longer than {limit_s:g} s"
    if (folder / MODEL).is_file():
        return None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return f"{tool} ended with {done.returncode}: {said[-1] if said else 'no output'}"


def figures_of(tool: str, folder: Path, model: Path, reference: Reference, ours: list[NDArray[np.float32]]) -> list[Figure]:
    """Return the graph against transformers and, where it is another's, against ours."""
    opened = Graph(folder / MODEL, model)
    found = [opened.step(tokens, None)[0] for tokens in reference.sequences]
    num = sum(len(tokens) for tokens in reference.sequences)
    against = {"transformers": list(reference.logits_TV), **({OURS: ours} if tool != OURS else {})}
    figures = []
    for name, expected in against.items():
        worst = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
        kl = sum(mean_kl_nats(b, a) * len(a) for a, b in zip(found, expected, strict=True)) / num
        figures.append(Figure(tool, f"max_difference_to_{name}", worst, "logit", n=num))
        figures.append(Figure(tool, f"kl_to_{name}_nats", kl, "nats", n=num))
    greedy = opened.greedy(reference.prompt, len(reference.greedy))
    figures.append(Figure(tool, "greedy_equal", float(greedy == reference.greedy), "ratio", n=len(greedy)))
    num_nodes = len(onnx.load(folder / MODEL, load_external_data=False).graph.node)
    if tool == OURS:
        ours += found
    return [*figures, Figure(tool, "num_nodes", num_nodes, "nodes")]


def tokens_of(model: Path) -> tuple[int, ...]:
    """Return random tokens that the model knows."""
    size = int(json.loads((model / "config.json").read_bytes())["vocab_size"])
    return tuple(np.random.default_rng(0).integers(4, size, WORDS).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="`tiny`, a directory, or a reference to resolve")
    parser.add_argument("--peers", type=Path, default=Path(".model-optimizer/peers"), help="FOLDER/<tool>/bin/python")
    parser.add_argument("--limit-s", type=float, default=600, help="of each export")
    asked = parser.parse_args()
    figures, ours = list[Figure](), list[NDArray[np.float32]]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = write_tiny_llama(root / "tiny") if asked.model == "tiny" else resolved(asked.model).absolute()
        reference = reference_of(model, parity_sequences((tokens_of(model),)))
        for tool in (OURS, *EXPORTERS):
            start = time.monotonic()
            reason = export(tool, model, root / tool, asked.peers, asked.limit_s)
            if reason is not None:
                figures.append(Figure(tool, "max_difference_to_transformers", None, "logit", reason=reason))
                continue
            figures.append(Figure(tool, "export_s", time.monotonic() - start, "s", n=1))
            figures += figures_of(tool, root / tool, model, reference, ours)
    append(__file__, figures, ("torch", "transformers", "onnx", "onnxruntime"))


if __name__ == "__main__":
    main()
