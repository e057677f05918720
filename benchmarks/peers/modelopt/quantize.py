"""ModelOpt AutoQuantize, gradient method, over the seven weight formats that ours chooses among.

Formats say their true bits (`effective_bits`), so the constraint is the budget itself. Scores are kept beside the outputs and
reused by the next budget, as its `checkpoint` is meant to be.
"""

import modelopt.torch.quantization as mtq
import torch
from torch import nn

from benchmarks.peers.job import SCALE_BITS, Job, Outcome, Stored, linears, measured

FORMATS = (Stored(2, 64), Stored(3, 64), Stored(3, 32), Stored(4, 64), Stored(5, 64), Stored(6, 64), Stored(8))
SCORED_SEQUENCES = 8
"""Of the calibration sequences; its own advice for saving time is to score on fewer."""
FEWEST_INPUTS = 576
"""Scales of int8 weigh most in layers of the fewest inputs; counted so in every layer, the budget is never exceeded."""


def config_of(stored: Stored) -> dict[str, object]:
    """Return ModelOpt's form of a weight-only format whose scales minimise squared error."""
    grain: dict[str, object] = {"block_sizes": {-1: stored.group_size}} if stored.group_size else {"axis": 0}
    return {
        "quant_cfg": [
            {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": stored.bits, **grain}},
            {"quantizer_name": "*input_quantizer", "enable": False},
        ],
        "algorithm": "mse",
        "effective_bits": stored.bits + SCALE_BITS / (stored.group_size or FEWEST_INPUTS),
    }


def quantize(job: Job) -> Outcome:
    """Search, then fold the chosen fake quantization into the weights."""
    tokens_BT, model = job.read_tokens(), job.load_model()
    search = job.output.parent / "modelopt-search.pth"
    restored = search.exists()
    rows = [{"input_ids": row_T[None], "labels": row_T[None]} for row_T in tokens_BT]
    with measured() as spent:
        model, _ = mtq.auto_quantize(
            model,
            constraints={"effective_bits": job.bits, "cost": {"excluded_module_name_patterns": ["*lm_head*"]}},
            quantization_formats=[config_of(it) for it in FORMATS],
            data_loader=rows,
            forward_step=lambda model, row: model(**row, use_cache=False),
            loss_func=lambda output, row: output.loss,
            disabled_layers=["*lm_head*"],
            num_calib_steps=1,  # scales of weights need no data
            num_score_steps=SCORED_SEQUENCES,
            method="gradient",
            checkpoint=str(search),
        )
        layers = linears(model)
        stored = {name: stored_as(layer) for name, layer in layers.items()}
        mtq.fold_weight(model)
    settings = {"method": "gradient", "scored_sequences": min(SCORED_SEQUENCES, len(rows)), "search_restored": restored}
    return Outcome({name: layer.weight for name, layer in layers.items()}, stored, spent, settings, ("nvidia-modelopt",))


def stored_as(layer: nn.Module) -> Stored:
    """Read from a searched layer's own quantizer how its weight is stored."""
    quantizer = layer.weight_quantizer
    if not quantizer.is_enabled:
        return Stored(16)
    return Stored(quantizer.num_bits, (quantizer.block_sizes or {}).get(-1))


if __name__ == "__main__":
    torch.manual_seed(0)
    asked = Job.parse()
    quantize(asked).write(asked.output)
