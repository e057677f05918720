"""Continue prompts greedily with transformers. Runs alone: `python run_transformers.py REQUEST.json ANSWER.json`."""

import importlib
import json
import sys
import time
from pathlib import Path


def main(request: Path, answer: Path) -> None:
    wanted = json.loads(request.read_bytes())
    import torch

    transformers = importlib.import_module("transformers")

    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(wanted["model"], dtype="auto", local_files_only=True).to(device)
    load_s = time.monotonic() - start
    found = []
    for prompt in wanted["prompts"]:
        tokens_BT = torch.tensor([prompt], device=device)
        output_BT = model.generate(
            tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            do_sample=False,
            min_new_tokens=wanted["num_tokens"],
            max_new_tokens=wanted["num_tokens"],
            pad_token_id=0,
            eos_token_id=None,
        )
        found.append(output_BT[0, len(prompt) :].tolist())
    answer.write_text(json.dumps({"version": transformers.__version__, "tokens": found, "load_s": load_s}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
