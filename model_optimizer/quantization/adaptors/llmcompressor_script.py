"""Run by the interpreter of an llm-compressor environment, never imported by this product: one request in, one checkpoint out.

`python llmcompressor_script.py REQUEST` reads the request (JSON, written by llmcompressor.py beside it), quantizes, and
writes `response` last. Lines on standard output that begin with `@ ` tell what is going on: `@ layers N` after N more
layers are rounded, `@ note TEXT`. Everything else there and on standard error is the library's own log.
"""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("llmcompressor", "compressed-tensors", "transformers", "torch")
_ROUNDING = re.compile(r"Quantizing (\d+) module\(s\)")


def main(path: Path) -> None:
    """Do what a request says; with no model in it, tell the versions alone."""
    request = json.loads(path.read_text(encoding="utf-8"))
    versions = {name: version(name) for name in LIBRARIES}
    if request["model"] is not None:
        quantize(request)
    Path(request["response"]).write_text(json.dumps({"versions": versions}), encoding="utf-8")


def quantize(request: dict[str, object]) -> None:
    """Load the model, calibrate on the given tokens alone, round, and save the compressed checkpoint."""
    import torch
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from loguru import logger
    from transformers import AutoModelForCausalLM

    torch.manual_seed(int(str(request["seed"])))
    logger.add(_tell_rounded, level="INFO", format="{message}")
    _tell("note loading the model")
    model = AutoModelForCausalLM.from_pretrained(str(request["model"]), dtype=torch.float32)
    _tell("note calibrating and rounding")
    batches = _batches(Path(str(request["tokens"]))) if request["tokens"] is not None else None
    count = len(batches) if batches else 0
    oneshot(model=model, recipe=_recipe(request), dataset=batches, num_calibration_samples=count or 512)
    _tell("note saving")
    model.save_pretrained(str(request["output"]), save_compressed=True)


def _recipe(request: dict[str, object]):  # type: ignore[no-untyped-def]  # a class of a library that is absent here
    from llmcompressor.modifiers.gptq import GPTQModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]

    modifier = {"gptq": GPTQModifier, "rtn": QuantizationModifier}[str(request["method"])]
    return modifier(config_groups=request["groups"], ignore=request["ignore"])


def _batches(path: Path):  # type: ignore[no-untyped-def]  # torch's loader, whose item type is a dict of tensors
    """Return a loader that gives one calibration sequence at a time, in order."""
    import torch
    from safetensors.torch import load_file

    stored = load_file(path)
    sequences = stored["tokens"].split(stored["lengths"].tolist())
    samples = [{"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens)[None]} for tokens in sequences]
    return torch.utils.data.DataLoader(samples, batch_size=None, shuffle=False)  # type: ignore[arg-type]


def _tell_rounded(message: str) -> None:
    if match := _ROUNDING.search(message):
        _tell(f"layers {match[1]}")


def _tell(line: str) -> None:
    print(f"@ {line}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
