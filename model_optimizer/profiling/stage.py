"""Stage 1: measure the machine, read the model, set both against what is asked, and stop where physics says no."""

from pathlib import Path

from pydantic import Field

from model_optimizer.artifacts.base import StageInputs, Tree
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.decisions import Decision
from model_optimizer.errors import UnsupportedError
from model_optimizer.hardware.catalogue import probe_kind
from model_optimizer.hardware.probe import probe_device
from model_optimizer.models.facts import read_facts
from model_optimizer.models.grid import detect_grid
from model_optimizer.prediction.roofline import balanced_batch, decoder_cost, measured_rates
from model_optimizer.profiling.budget import budget_lines
from model_optimizer.profiling.business import decision_table, questions
from model_optimizer.profiling.feasibility import Ask, infeasible
from model_optimizer.profiling.measures import measures
from model_optimizer.protocols import Progress
from model_optimizer.spec import Cost, Sla, Target, Traffic

RUN_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
"""What unquantized weights and the KV cache are held in: float32 on a CPU, where bfloat16 was measured 2 to 15 times slower."""
RUN_BITS = {"cpu": 32, "cuda": 16}


class ProfileInputs(StageInputs):
    """The model, and what is asked of it."""

    model: Tree
    target: Target
    sla: Sla
    traffic: Traffic
    cost: Cost = Cost()
    source: str = Field(default="", exclude=True)
    """Where the model came from, for people; see `ResolvedModel.source`."""
    source_bytes: int | None = None
    """Size of the original weight files where the model was imported from another format."""


def profile_target(inputs: ProfileInputs, workspace: Path, *, progress: Progress) -> TargetProfile:
    """Return what the machine, the model and the business are; writes no files.

    Raises:
        ConfigError: unknown hardware, or the model's config lacks a field.
        UnsupportedError: the hardware is elsewhere, or no engine could meet the service level here; the message has the numbers.
    """
    kind = probe_kind(inputs.target.hardware)
    progress.note("reading the model's config and shard headers")
    device = probe_device(kind, progress)
    facts = read_facts(inputs.model.path, kv_dtype=RUN_DTYPE[device.kind])
    grid = detect_grid(inputs.model.path)
    facts = facts.model_copy(update={"source_grid": grid})
    ask = Ask(device=device, model=facts, sla=inputs.sla, traffic=inputs.traffic, run_bits=RUN_BITS[device.kind])
    if reasons := infeasible(ask):
        raise UnsupportedError(
            "the service level cannot be met here: " + "; ".join(reasons) + "; relax the limit or change the machine"
        )
    budget = budget_lines(ask)
    return TargetProfile(
        device=device,
        model=facts,
        budget=budget,
        decision_table=decision_table(ask, budget, inputs.cost),
        questions=questions(ask, budget),
        measures=measures(ask, budget, inputs.source_bytes),
        decisions=_decisions(ask, inputs.source),
        warnings=_warnings(ask),
    )


def _decisions(ask: Ask, source: str) -> tuple[Decision, ...]:
    """Return what this stage decided for those that follow."""
    device, facts = ask.device, ask.model
    batch = balanced_batch(decoder_cost(facts, ask.run_bits), measured_rates(device))
    memory_bound = ask.sla.concurrency < batch
    limit = "memory bandwidth" if memory_bound else "arithmetic"
    origin = f" of {source}" if source else ""
    made = [
        Decision(
            subject="device",
            choice=device.name,
            because="it is the one that was asked for" if ask.device.kind == "cuda" else "it is the CPU of this machine",
            numbers={
                "read_gb_per_s": device.read_bytes_per_s / 1e9,
                "copy_gb_per_s": device.copy_bytes_per_s / 1e9,
                "matmul_gflop_per_s": device.matmul_flop_per_s / 1e9,
            },
        ),
        Decision(
            subject="bottleneck",
            choice="fewer weight bytes" if memory_bound else "fewer operations",
            because=f"at {ask.sla.concurrency} streams decoding is limited by {limit}",
            numbers={"balanced_batch": batch, "concurrency": float(ask.sla.concurrency)},
        ),
    ]
    if facts.source_grid:
        made.append(
            Decision(
                subject="source weights",
                choice=f"treated as already quantized ({facts.source_grid})",
                because=f"sampled linear weights{origin} lie on that grid, so a quantizer with the same grid loses nothing "
                "and proves nothing",
            )
        )
    return tuple(made)


def _warnings(ask: Ask) -> tuple[str, ...]:
    """Return what the report must show beside the figures."""
    told = []
    if ask.model.source_grid:
        told.append(
            f"the source weights already lie on a {ask.model.source_grid} grid: accuracy losses are measured against those, "
            "and quantization to the same grid is nearly lossless by construction"
        )
    if ask.sla.max_model_len > ask.model.max_position > 0:
        told.append(
            f"sla.max_model_len {ask.sla.max_model_len} exceeds the {ask.model.max_position} positions that the model knows"
        )
    longest = ask.traffic.prompt_tokens.p95 + ask.traffic.output_tokens.p95
    if longest > ask.sla.max_model_len:
        told.append(f"p95 prompt + p95 output is {longest} tokens, more than sla.max_model_len {ask.sla.max_model_len}")
    return tuple(told)
