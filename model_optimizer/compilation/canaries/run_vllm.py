"""Continue prompts greedily with vLLM. Runs alone in vLLM's own interpreter: `python run_vllm.py REQUEST.json ANSWER.json`."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""One process, a small cache, and no cores claimed: it runs beside others. Source: vLLM 0.32, `vllm/envs.py`."""
GPU_SHARE_RATIO = 0.3
"""Of a GPU's memory, at least; more where the weights need it."""


def share_of_gpu(model: Path) -> float:
    """Return the share of the GPU that vLLM may take, so that a canary fits beside other work."""
    import torch

    if not torch.cuda.is_available():
        return GPU_SHARE_RATIO
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return min(0.9, max(GPU_SHARE_RATIO, 2 * weights / torch.cuda.get_device_properties(0).total_memory))


def main(request: Path, answer: Path) -> None:
    wanted = json.loads(request.read_bytes())
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    vllm = importlib.import_module("vllm")

    start = time.monotonic()
    engine = vllm.LLM(
        wanted["model"],
        skip_tokenizer_init=True,
        max_model_len=wanted["max_length"],
        max_num_seqs=len(wanted["prompts"]),
        gpu_memory_utilization=share_of_gpu(Path(wanted["model"])),
        enforce_eager=True,
    )
    load_s = time.monotonic() - start
    sampling = vllm.SamplingParams(temperature=0, max_tokens=wanted["num_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in wanted["prompts"]]
    tokens = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, sampling, use_tqdm=False)]
    answer.write_text(json.dumps({"version": vllm.__version__, "tokens": tokens, "load_s": load_s}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
