"""AutoRound: AutoScheme chooses bits per layer, sign gradient descent tunes the rounding of each block.

All options have groups of 64. AutoScheme counts a zero point that symmetric formats do not store, so its target is converted
to one that uses the whole budget. The default 200 iterations of 8 sequences take hours on few cores, so they run on a GPU alone;
a CPU gets its light recipe's 50, with one sequence a step. `--variant uniform` takes the one symmetric format that fills the
budget instead.
"""

import json
from pathlib import Path

import torch
from auto_round import AutoRound, AutoScheme
from auto_round.schemes import QuantizationScheme
from transformers import AutoTokenizer

from benchmarks.peers.job import SCALE_BITS, Job, Outcome, Stored, linears, measured

GROUP = 64
BITS = (2, 3, 4, 8)
"""What its own format can store."""
SCORED_TOKENS = 256
"""Leading tokens of each sequence that AutoScheme scores; its default."""
UNIFORM = {3.5: Stored(3, 32), 4.25: Stored(4, 64), 5.0: Stored(4, 16), 6.0: Stored(5, 16)}
ITERATIONS, BATCH = {"cpu": 50, "cuda": 200}, {"cpu": 1, "cuda": 8}


def target_of(true_bits: float) -> float:
    """Return what AutoScheme counts for a symmetric mix of so many true bits: b + (16 + b) / group instead of b + 16 / group."""
    scale_bits = SCALE_BITS / GROUP
    return (true_bits - scale_bits) * (1 + 1 / GROUP) + scale_bits


def write_texts(tokens_BT: torch.Tensor, tokenizer: object, target: Path) -> str:
    """Write the tokens as text, for AutoScheme reads files only; they come back as the same tokens."""
    texts = [tokenizer.decode(row) for row in tokens_BT.tolist()]
    again = [tokenizer(text)["input_ids"] for text in texts]
    assert again == tokens_BT.tolist(), "decoded calibration text does not give the same tokens"
    target.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return str(target)


def quantize(job: Job) -> Outcome:
    """Return the tuned, dequantized weights, as AutoRound leaves them in memory."""
    tokens_BT, model, tokenizer = job.read_tokens(), job.load_model(), AutoTokenizer.from_pretrained(job.model)
    job.output.mkdir(parents=True, exist_ok=True)
    num_sequences, length = tokens_BT.shape
    dataset: str | list[torch.Tensor]
    if job.variant == "uniform":
        stored = UNIFORM[job.bits]
        scheme = QuantizationScheme(bits=stored.bits, group_size=stored.group_size, sym=True)
        dataset = [row_T[None] for row_T in tokens_BT]
    else:
        options = [QuantizationScheme(bits=bits, group_size=GROUP, sym=True) for bits in BITS]
        scheme = AutoScheme(
            avg_bits=target_of(job.bits), options=options, seqlen=min(SCORED_TOKENS, length), enable_torch_compile=False
        )
        dataset = write_texts(tokens_BT, tokenizer, job.output / "calibration.jsonl")
    names, device = list(linears(model)), "cuda" if torch.cuda.is_available() else "cpu"
    with measured() as spent:
        rounder = AutoRound(
            model,
            tokenizer,
            scheme=scheme,
            dataset=dataset,
            iters=ITERATIONS[device],
            nsamples=num_sequences,
            seqlen=length,
            batch_size=BATCH[device],
            device_map=device,
            enable_torch_compile=False,
            seed=0,
        )
        model, chosen = rounder.quantize()
    layers = linears(model)
    stored = {name: Stored(chosen[name]["bits"], chosen[name]["group_size"], chosen[name]["sym"]) for name in names}
    settings = {"iterations": ITERATIONS[device], "batch": BATCH[device], "scheme": job.variant or "auto"}
    return Outcome({name: layers[name].weight for name in names}, stored, spent, settings, ("auto-round",))


if __name__ == "__main__":
    asked = Job.parse()
    quantize(asked).write(asked.output)
