"""llm-compressor's GPTQ with its defaults (sequential, static act-order, damping 0.01), one uniform format per budget.

It has no allocation of bits; each budget gets the uniform symmetric format that fills it exactly.
"""

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier

from benchmarks.peers.job import Job, Outcome, Stored, linears, measured

FORMATS = {3.5: Stored(3, 32), 4.25: Stored(4, 64), 5.0: Stored(4, 16), 6.0: Stored(5, 16)}


def quantize(job: Job) -> Outcome:
    """Return GPTQ's fake-quantized weights, as `oneshot` leaves them in memory."""
    stored, tokens_BT, model = FORMATS[job.bits], job.read_tokens(), job.load_model()
    rows = tokens_BT.tolist()
    dataset = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    weights = {
        "num_bits": stored.bits,
        "type": "int",
        "symmetric": stored.symmetric,
        "strategy": "group",
        "group_size": stored.group_size,
    }
    modifier = GPTQModifier(config_groups={"all": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    layers = linears(model)
    with measured() as spent:
        oneshot(
            model=model,
            dataset=dataset,
            recipe=[modifier],
            num_calibration_samples=len(rows),
            max_seq_length=tokens_BT.shape[1],
            shuffle_calibration_samples=False,
        )
    return Outcome(
        {name: layer.weight for name, layer in layers.items()},
        dict.fromkeys(layers, stored),
        spent,
        {"method": "gptq", "damping": modifier.dampening_frac, "actorder": "static", "block_size": modifier.block_size},
        ("llmcompressor", "compressed-tensors"),
    )


if __name__ == "__main__":
    asked = Job.parse()
    quantize(asked).write(asked.output)
