"""Continue prompts greedily with ONNX Runtime. Runs alone: `python run_onnxruntime.py REQUEST.json ANSWER.json`.

Every step reads the whole sequence from an empty cache: slow, and free of everything but the engine. An engine that writes its
cache in place gets one with room for the sequence.
"""

import json
import sys
import time
from pathlib import Path

PAST, PRESENT = "past_key_values.", "present."
CACHE, IN_PLACE = "cache", "in_place"
"""Metadata of the engine. Source: runtimes/ort_models.py, which is not here when this runs alone."""


def main(request: Path, answer: Path) -> None:
    wanted = json.loads(request.read_bytes())
    import numpy as np
    import onnxruntime

    start = time.monotonic()
    session = onnxruntime.InferenceSession(str(Path(wanted["model"]) / "model.onnx"), providers=["CPUExecutionProvider"])
    load_s = time.monotonic() - start
    caches = [it for it in session.get_inputs() if it.name.startswith(PAST)]
    in_place = session.get_modelmeta().custom_metadata_map.get(CACHE) == IN_PLACE
    found = []
    for prompt in wanted["prompts"]:
        tokens = list(prompt)
        for _ in range(wanted["num_tokens"]):
            room = len(tokens) if in_place else 0
            binding = session.io_binding()
            binding.bind_cpu_input("input_ids", np.array([tokens], np.int64))
            binding.bind_cpu_input("attention_mask", np.ones((1, len(tokens)), np.int64))
            binding.bind_cpu_input("position_ids", np.arange(len(tokens), dtype=np.int64)[None])
            if "logits_from" in {it.name for it in session.get_inputs()}:
                binding.bind_cpu_input("logits_from", np.array([len(tokens) - 1], np.int64))
            binding.bind_output("logits")
            for cache in caches:
                empty = np.zeros((1, cache.shape[1], room, cache.shape[3]), np.float32)
                part = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
                binding.bind_ortvalue_input(cache.name, part)
                if in_place:
                    binding.bind_ortvalue_output(PRESENT + cache.name.removeprefix(PAST), part)
            session.run_with_iobinding(binding)
            logits_BTV = binding.get_outputs()[0].numpy()
            tokens.append(int(logits_BTV[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    answer.write_text(json.dumps({"version": onnxruntime.__version__, "tokens": found, "load_s": load_s}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
