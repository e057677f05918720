"""Train the scales of a rounded model so that its words come closest to the full model's; codes stay as they are.

    minimise mean over tokens of KL(teacher || student),  student weight = unit x scale exp(theta),  theta from 0, one per group

Teacher and student are one model object: float weights are there once, the student's are made of int8 codes when a layer
runs and again when it is differentiated. The last calibration samples never train; the scales that do best on them are kept,
as they will be stored, so that the result is never worse there than the start. Progress is on disk every few steps: a killed
run continues to the same bytes (on the CPU, where sums have one order). Rounded activations are not modelled.

Source: Chen et al. 2024, EfficientQAT, section 3.3 (end-to-end training of quantization parameters alone), with the model
itself as teacher. Measured on SmolLM2-135M, GPTQ in int3-g64, 20 steps at 3e-3 on 35 x 256 tokens of wikitext2-valid: KL over
2,048 tokens of wikitext2-test 0.424 -> 0.343 nats, 204 s on one core, 2.9 GB at most.

Shape letters: O output features, I input features, G groups along I, K inputs of one group, T tokens, V vocabulary.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from model_optimizer.decisions import Decision
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.base import QuantizedTensor, WeightFormat, storable
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Progress
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.linear_models import load_linear
from model_optimizer.quantization.logits_kl import kl_nats
from model_optimizer.quantization.parts import Parts
from model_optimizer.store import write_atomically

FOLDER = "distilled"
STATE = "state.safetensors"
SEQUENCES_PER_STEP = 2
JOURNAL_STEPS = 10
"""Steps between two looks at the samples that do not train, each journalled."""
VALIDATION_SHARE = 8
"""One sample in so many does not train, up to MAX_VALIDATION."""
MAX_VALIDATION = 8
LAST_RATE_RATIO = 0.1
"""The learning rate falls along a cosine to this share of itself."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """What is trained on what."""

    model: Path
    """The full-precision checkpoint that was rounded."""
    plan: Mapping[str, str]
    """Layer -> format name."""
    parts: Parts
    """The rounded layers."""
    sequences: tuple[tuple[int, ...], ...]
    """Calibration tokens; never the held-out ones."""
    num_steps: int
    learning_rate: float
    seed: int

    @classmethod
    def of(
        cls, config: QuantizationConfig, calibration: CalibrationSource, model: Path, plan: Mapping[str, str], parts: Parts
    ) -> Self:
        """Return what a profile says about distillation; text is read only if there are steps."""
        samples = prepare(calibration, model).samples[: config.distill_sequences] if config.distill_steps else ()
        return cls(
            model=model,
            plan=plan,
            parts=parts,
            sequences=tuple(tokens[: config.distill_tokens] for tokens in samples),
            num_steps=config.distill_steps,
            learning_rate=config.distill_learning_rate,
            seed=config.seed,
        )

    @property
    def num_validation(self) -> int:
        return min(MAX_VALIDATION, max(1, len(self.sequences) // VALIDATION_SHARE))

    def identity(self) -> str:
        """Return what a journal is for."""
        content = [sorted(self.plan.items()), self.sequences, self.num_steps, self.learning_rate, self.seed]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def distill(run: Distillation, workspace: Path, *, progress: Progress) -> tuple[Parts, tuple[Decision, ...]]:
    """Return the layers with trained scales, as parts of their own below `workspace`, and what training did.

    Without steps the rounded layers themselves are meant.

    Raises:
        ConfigError: fewer than two calibration samples.
        UnsupportedError: a planned layer is no torch.nn.Linear of the model.
    """
    if not run.num_steps:
        return run.parts, ()
    if len(run.sequences) < 2:
        raise ConfigError(
            f"distillation needs two calibration samples, one to train on and one to judge by; {len(run.sequences)} given"
        )
    student = Student(run)
    state = _State.resume(workspace / FOLDER / STATE, run, student)
    _train(run, student, state, workspace / FOLDER / STATE, progress)
    finished = Parts(workspace / FOLDER)
    for layer, best_OG in zip(student.layers, state.best, strict=True):
        finished.write(layer.name, run.plan[layer.name], replace(layer.tensor, scale_OG=layer.stored_scale(best_OG)))
    return finished, (_decision(run, state),)


def forget(workspace: Path) -> None:
    """Remove what only a killed run would need."""
    shutil.rmtree(workspace / FOLDER, ignore_errors=True)


class RoundedLinear(nn.Module):
    """A linear layer that computes with its own weight or with codes and scales, as its student says."""

    def __init__(self, name: str, linear: nn.Linear, tensor: QuantizedTensor, weight_format: WeightFormat):
        super().__init__()
        self.name = name
        self.tensor = tensor
        self.rounded = False
        self._linear = linear
        self._format = weight_format
        self._codes_OI = tensor.codes_OI.to(linear.weight.device)
        self._zero_OG = None if tensor.zero_OG is None else tensor.zero_OG.to(linear.weight.device)
        self._scale_OG = tensor.scale_OG.float().to(linear.weight.device)
        self.log_change_OG = nn.Parameter(torch.zeros_like(self._scale_OG))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor
        if not self.rounded:
            outputs = self._linear(inputs)
            return outputs
        outputs = _Product.apply(inputs, self.log_change_OG, self)  # type: ignore[no-untyped-call]
        return outputs if self._linear.bias is None else outputs + self._linear.bias

    def units(self) -> torch.Tensor:
        """Return the weights in steps [O, G, K]: weight = unit x scale."""
        tensor = QuantizedTensor(self._codes_OI, torch.ones_like(self._scale_OG), self._zero_OG)
        return self._format.dequantize(tensor).reshape(*self._scale_OG.shape, -1)

    def scale(self, log_change_OG: torch.Tensor) -> torch.Tensor:
        """Return the float32 scales of a change."""
        return self._scale_OG * log_change_OG.exp()

    def stored_scale(self, log_change_OG: torch.Tensor) -> torch.Tensor:
        """Return the scales of a change in the type that the format stores, on the CPU."""
        return storable(self.scale(log_change_OG.to(self._scale_OG.device)), self.tensor.scale_OG.dtype).cpu()


class _Product(torch.autograd.Function):
    """y = x W^T with W = unit x scale, made when it is needed and kept by nobody."""

    @staticmethod
    def forward(ctx: "_Context", inputs: torch.Tensor, log_change_OG: torch.Tensor, layer: RoundedLinear) -> torch.Tensor:
        ctx.save_for_backward(inputs, log_change_OG)
        ctx.layer = layer
        weight_OI = (layer.units() * layer.scale(log_change_OG)[..., None]).flatten(1)
        return inputs @ weight_OI.T

    @staticmethod
    def backward(ctx: "_Context", gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        inputs, log_change_OG = ctx.saved_tensors
        units_OGK, scale_OG = ctx.layer.units(), ctx.layer.scale(log_change_OG)
        gradient_TO, inputs_TI = gradient.flatten(0, -2), inputs.flatten(0, -2)
        of_weight_OGK = (gradient_TO.T @ inputs_TI).reshape(units_OGK.shape)
        of_log_OG = torch.linalg.vecdot(of_weight_OGK, units_OGK) * scale_OG
        return gradient @ (units_OGK * scale_OG[..., None]).flatten(1), of_log_OG, None


class _Context(torch.autograd.function.FunctionCtx):
    """What a product remembers."""

    layer: RoundedLinear
    saved_tensors: tuple[torch.Tensor, torch.Tensor]


class Student:
    """A model whose planned layers can be rounded or not; on the GPU where there is one."""

    def __init__(self, run: Distillation):
        self.model = load_linear(run.model).requires_grad_(False)
        if torch.cuda.is_available():
            nn.Module.to(self.model, torch.device("cuda"))
        names = [name for name, chosen in run.plan.items() if FORMATS.get(chosen).on_grid]
        self.layers = tuple(_replace(self.model, name, run.plan[name], run.parts) for name in names)
        self.parameters = [layer.log_change_OG for layer in self.layers]

    def logits(self, tokens: Sequence[int], *, rounded: bool) -> torch.Tensor:
        """Return [T, V] of the student, or of the teacher that it is without rounding."""
        for layer in self.layers:
            layer.rounded = rounded
        inputs_1T = torch.tensor([list(tokens)], device=self.model.device)
        logits_1TV: torch.Tensor = self.model(input_ids=inputs_1T, use_cache=False).logits
        return logits_1TV[0]

    @torch.no_grad()
    def stored_kl_nats(self, sequences: Sequence[Sequence[int]]) -> float:
        """Return the mean KL per token with scales as they would be stored."""
        trained = [parameter.clone() for parameter in self.parameters]
        for layer in self.layers:
            stored_OG = layer.stored_scale(layer.log_change_OG).float().to(layer.log_change_OG.device)
            layer.log_change_OG.copy_((stored_OG / layer.scale(torch.zeros_like(stored_OG))).log())
        total = 0.0
        for tokens in sequences:
            total += kl_nats(self.logits(tokens, rounded=False), self.logits(tokens, rounded=True)).sum().item()
        for parameter, before in zip(self.parameters, trained, strict=True):
            parameter.copy_(before)
        return total / sum(map(len, sequences))

    def add_gradients(self, tokens: Sequence[int], num_tokens: int) -> None:
        """Add the gradients of the summed KL of one sequence over `num_tokens`."""
        with torch.no_grad():
            teacher_TV = self.logits(tokens, rounded=False).log_softmax(-1)
        student_TV = self.logits(tokens, rounded=True).log_softmax(-1)
        loss = nn.functional.kl_div(student_TV, teacher_TV, reduction="sum", log_target=True) / num_tokens
        torch.autograd.backward(loss)


def _replace(model: PreTrainedModel, name: str, format_name: str, parts: Parts) -> RoundedLinear:
    linear = model.get_submodule(name) if name in dict(model.named_modules()) else None
    if not isinstance(linear, nn.Linear):
        raise UnsupportedError(f"{name} is no torch.nn.Linear, whose scales alone are trained; set quantization.distill_steps: 0")
    tensor = parts.read(name, format_name)
    assert tensor is not None, f"the part of {name} vanished before its scales were trained"
    rounded = RoundedLinear(name, linear, tensor, FORMATS.get(format_name))
    model.set_submodule(name, rounded)
    return rounded


@dataclass(slots=True)
class _State:
    """Where training stands: everything that the next step depends on."""

    step: int
    optimizer: torch.optim.Adam
    parameters: list[nn.Parameter]
    best: list[torch.Tensor]
    start_kl_nats: float
    best_kl_nats: float
    best_step: int

    @classmethod
    def resume(cls, path: Path, run: Distillation, student: Student) -> "_State":
        """Return the journalled state, or that of the start."""
        optimizer = torch.optim.Adam(student.parameters, lr=run.learning_rate)
        zeros = [torch.zeros_like(parameter, device="cpu") for parameter in student.parameters]
        state = cls(0, optimizer, student.parameters, zeros, math.nan, math.nan, 0)
        if not state._load(path, run.identity()):
            state.start_kl_nats = state.best_kl_nats = student.stored_kl_nats(_validation(run))
        return state

    def save(self, path: Path, identity: str) -> None:
        """Write the state; it is durable on return."""
        moments = [self.optimizer.state[parameter] for parameter in self.parameters]
        tensors: dict[str, torch.Tensor] = {}
        for number, (parameter, moment, best_OG) in enumerate(zip(self.parameters, moments, self.best, strict=True)):
            tensors |= {
                f"{number}.change": parameter.detach().cpu(),
                f"{number}.first": moment["exp_avg"].cpu(),
                f"{number}.second": moment["exp_avg_sq"].cpu(),
                f"{number}.best": best_OG,
            }
        figures = [self.step, self.start_kl_nats, self.best_kl_nats, self.best_step]
        write_atomically(path, save(tensors, metadata={"identity": identity, "figures": json.dumps(figures)}))

    def _load(self, path: Path, identity: str) -> bool:
        """Take what a journal of the same run says, and return whether there was one."""
        try:
            with safe_open(path, framework="pt") as stream:
                metadata = stream.metadata() or {}
                if metadata.get("identity") != identity:
                    return False
                figures = json.loads(metadata["figures"])
                self.step, self.start_kl_nats, self.best_kl_nats, self.best_step = figures
                for number, parameter in enumerate(self.parameters):
                    with torch.no_grad():
                        parameter.copy_(stream.get_tensor(f"{number}.change"))
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(float(self.step)),
                        "exp_avg": stream.get_tensor(f"{number}.first").to(parameter.device),
                        "exp_avg_sq": stream.get_tensor(f"{number}.second").to(parameter.device),
                    }
                    self.best[number] = stream.get_tensor(f"{number}.best")
        except (FileNotFoundError, SafetensorError):
            return False
        return True


def _validation(run: Distillation) -> tuple[tuple[int, ...], ...]:
    return run.sequences[-run.num_validation :]


def _train(run: Distillation, student: Student, state: _State, path: Path, progress: Progress) -> None:
    for step in progress.track(range(state.step, run.num_steps), "distillation", run.num_steps - state.step):
        batch = _batch(run, step)
        state.optimizer.zero_grad(set_to_none=True)
        for tokens in batch:
            student.add_gradients(tokens, sum(map(len, batch)))
        cosine = (1 + math.cos(math.pi * step / run.num_steps)) / 2
        state.optimizer.param_groups[0]["lr"] = run.learning_rate * (LAST_RATE_RATIO + (1 - LAST_RATE_RATIO) * cosine)
        state.optimizer.step()
        state.step = step + 1
        if state.step % JOURNAL_STEPS == 0 or state.step == run.num_steps:
            found = student.stored_kl_nats(_validation(run))
            if found < state.best_kl_nats:
                state.best_kl_nats, state.best_step = found, state.step
                state.best = [parameter.detach().cpu().clone() for parameter in student.parameters]
            state.save(path, run.identity())


def _batch(run: Distillation, step: int) -> list[tuple[int, ...]]:
    """Return the sequences of a step: each round goes over all that train, in an order of its own."""
    training = run.sequences[: -run.num_validation]
    chosen = []
    for place in range(step * SEQUENCES_PER_STEP, (step + 1) * SEQUENCES_PER_STEP):
        of_round = torch.Generator().manual_seed((run.seed << 32) + place // len(training))
        order = torch.randperm(len(training), generator=of_round)
        chosen.append(training[int(order[place % len(training)])])
    return chosen


def _decision(run: Distillation, state: _State) -> Decision:
    return Decision(
        subject="scale-only self-distillation",
        choice=f"the scales of step {state.best_step}" if state.best_step else "the scales as they were rounded",
        because=f"they give the least KL to the full model on {run.num_validation} calibration samples that do not train",
        numbers={
            "before_kl_nats": state.start_kl_nats,
            "after_kl_nats": state.best_kl_nats,
            "num_steps": run.num_steps,
            "num_training_sequences": len(run.sequences) - run.num_validation,
        },
    )
