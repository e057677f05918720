"""Continue prompts greedily with OpenVINO. Runs alone: `python run_openvino.py REQUEST.json ANSWER.json`.

Every step reads the whole sequence from an empty cache: slow, and free of everything but the engine.
"""

import json
import sys
import time
from pathlib import Path

PAST = "past_key_values."


def main(request: Path, answer: Path) -> None:
    wanted = json.loads(request.read_bytes())
    import numpy as np
    import openvino

    start = time.monotonic()
    core = openvino.Core()
    model = core.read_model(Path(wanted["model"]) / "openvino_model.xml")
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    load_s = time.monotonic() - start
    empty = {}
    for port in model.inputs:
        if PAST in port.get_any_name():
            _, heads, _, dim = port.get_partial_shape()
            empty[port.get_any_name()] = np.zeros((1, heads.get_length(), 0, dim.get_length()), np.float32)
    found = []
    for prompt in wanted["prompts"]:
        tokens = list(prompt)
        for _ in range(wanted["num_tokens"]):
            feeds = {
                "input_ids": np.array([tokens], np.int64),
                "attention_mask": np.ones((1, len(tokens)), np.int64),
                "position_ids": np.arange(len(tokens), dtype=np.int64)[None],
                "logits_from": np.array([len(tokens) - 1], np.int64),
            }
            logits_BTV = compiled(feeds | empty)["logits"]
            tokens.append(int(logits_BTV[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    version = openvino.__version__.partition("-")[0]
    answer.write_text(json.dumps({"version": version, "tokens": found, "load_s": load_s}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
