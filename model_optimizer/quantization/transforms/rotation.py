"""Rotations that fold into stored weights: of attention's values (R2), and of the whole residual stream (R1).

    R2, per block:  v rows -> R^T v,  o columns -> o R                            always exact, also with grouped heads
    R1, per model:  E -> E R;  readers W -> W diag(g) R;  writers W -> R^T W;  norms -> 1;  head -> W diag(g) R

Rotated channels have no outliers, so that a group's step is small; random rotations differ, hence the best of N seeds, by the
output error that rounding to nearest leaves on the calibration inputs, relative to the output. No rotation is one of the
candidates. A tied head stays tied only where the final norm's gain is one number; otherwise it is stored on its own, and the
artifact says what that costs.

Source: Ashkboos et al. 2024, QuaRot, section 4 (stages 1a, 1b); Liu et al. 2024, SpinQuant, section 3.1 (R1, R2, seeds matter).

Shape letters: D hidden features, O output features, I input features.
"""

from collections.abc import Callable, Sequence

import torch
from pydantic import BaseModel

from model_optimizer.decisions import Decision
from model_optimizer.errors import UnsupportedError
from model_optimizer.journal import Journal
from model_optimizer.quantization.transforms.anatomy import Anatomy, Block, Norm
from model_optimizer.quantization.transforms.base import Edit, Folding, Job, rounded_formats, scale_columns
from model_optimizer.quantization.transforms.hadamard import Rotation
from model_optimizer.quantization.transforms.registry import TRANSFORMS
from model_optimizer.quantization.transforms.search import output_error, rounding_error
from model_optimizer.store import stage_key

JOURNAL = "rotations.jsonl"


class _Tried(BaseModel):
    """Relative output errors of one block: without rotation, then with each seed's."""

    block: str
    errors: list[float]


class RotateHeads:
    """R2: each block takes the seed that suits it, or none."""

    def fold(self, job: Job) -> Folding:
        folding = Folding()
        head_dim = job.anatomy.blocks[0].heads.head_dim
        rotations = [Rotation.random(head_dim, job.inputs.seed + number) for number in range(job.inputs.num_seeds)]
        tried = _try(job, rotations, _heads_error)
        chosen = [min(range(len(record.errors)), key=record.errors.__getitem__) for record in tried]
        for block, choice in zip(job.anatomy.blocks, chosen, strict=True):
            if choice:
                _rotate_heads(folding, job.anatomy, block, rotations[choice - 1])
        folding.decisions.append(
            Decision(
                subject="rotation of values",
                choice=f"{sum(map(bool, chosen))} of {len(chosen)} blocks are rotated",
                because=f"the best of {len(rotations)} random rotations and none by output error",
                numbers=_shares([record.errors[0] for record in tried], [min(record.errors) for record in tried]),
            )
        )
        return folding


class RotateResidual:
    """R1: one seed for the model, or none."""

    def fold(self, job: Job) -> Folding:
        anatomy, folding = job.anatomy, Folding()
        for block in anatomy.blocks:
            if block.odd:
                raise UnsupportedError(
                    f"the residual stream of {block.name} cannot be rotated: {block.odd[0]} multiplies its channels one by one "
                    "after the block; use rotation: heads"
                )
        rotations = [Rotation.random(anatomy.hidden_size, job.inputs.seed + number) for number in range(job.inputs.num_seeds)]
        tried = _try(job, rotations, _residual_error)
        totals = [sum(errors) for errors in zip(*(record.errors for record in tried), strict=True)]
        choice = min(range(len(totals)), key=totals.__getitem__)
        if choice:
            _rotate_residual(folding, job, rotations[choice - 1])
        folding.decisions.append(
            Decision(
                subject="rotation of the residual stream",
                choice=f"seed {job.inputs.seed + choice - 1}" if choice else "none",
                because=f"it leaves the least output error of {len(rotations)} random rotations and none",
                numbers=_shares([totals[0]], [totals[choice]]) | {"worst_left_ratio": max(totals[1:]) / totals[0]},
            )
        )
        return folding


def _shares(plain: Sequence[float], chosen: Sequence[float]) -> dict[str, float]:
    return {"output_error_left_ratio": sum(chosen) / sum(plain) if sum(plain) else 1.0}


_Error = Callable[[Job, Block, Rotation | None], float]


def _try(job: Job, rotations: Sequence[Rotation], error: _Error) -> list[_Tried]:
    """Return every block's errors; blocks that the journal holds are not tried again."""
    journal = Journal(job.workspace / JOURNAL, stage_key(job.inputs), _Tried)
    rest = job.anatomy.blocks[len(journal.records) :]
    for block in job.progress.track(rest, "rotations", len(rest)):
        errors = [error(job, block, rotation) for rotation in (None, *rotations)]
        journal.append(_Tried(block=block.name, errors=errors))
    return journal.records


def rotate_rows(rotation: Rotation, start: int, stop: int) -> Edit:
    """Return the edit that turns outputs y into y R for rows `start` to `stop` of a matrix, or elements of a bias."""

    def rotate(tensor: torch.Tensor) -> torch.Tensor:
        rotated = tensor.clone()
        part = tensor[start:stop]
        rotated[start:stop] = rotation.forward(part.T).T if part.ndim == 2 else rotation.forward(part)
        return rotated

    return rotate


def _unrotate_rows(rotation: Rotation, start: int, stop: int) -> Edit:
    def rotate(weight_OI: torch.Tensor) -> torch.Tensor:
        rotated_OI = weight_OI.clone()
        rotated_OI[start:stop] = rotation.backward(weight_OI[start:stop].T).T
        return rotated_OI

    return rotate


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _relative(job: Job, layer: str, fold: Edit, unfold: Edit) -> float:
    """Return a layer's rounding error over its output's power; 0 where it is not rounded."""
    formats = rounded_formats(job, (layer,))
    if not formats:
        return 0.0
    weight_OI, moment_II = job.weight(f"{layer}.weight"), job.moment(layer)
    power = max(output_error(weight_OI, moment_II), torch.finfo(torch.float32).tiny)
    return rounding_error({layer: weight_OI}, formats, moment_II, fold, unfold) / power


def _heads_error(job: Job, block: Block, rotation: Rotation | None) -> float:
    values, output = block.heads.values, block.heads.output
    if rotation is None:
        return _relative(job, values.layer, _same, _same) + _relative(job, output, _same, _same)
    place = (rotation, values.start, values.stop)
    of_values = _relative(job, values.layer, rotate_rows(*place), _unrotate_rows(*place))
    return of_values + _relative(job, output, rotation.forward, rotation.backward)


def _rotate_heads(folding: Folding, anatomy: Anatomy, block: Block, rotation: Rotation) -> None:
    values = block.heads.values
    rotate = rotate_rows(rotation, values.start, values.stop)
    folding.add(f"{values.layer}.weight", rotate)
    if values.layer in anatomy.biases:
        folding.add(f"{values.layer}.bias", rotate)
    folding.add(f"{block.heads.output}.weight", rotation.forward)


def _gain(job: Job, norm: Norm) -> torch.Tensor:
    return norm.offset + job.weight(norm.weight)


def _residual_error(job: Job, block: Block, rotation: Rotation | None) -> float:
    if rotation is None:
        readers = [reader for edge in block.edges if isinstance(edge.source, Norm) for reader in edge.readers]
        return sum(_relative(job, layer, _same, _same) for layer in (*readers, *block.writers))
    total = 0.0
    for edge in block.edges:
        if isinstance(edge.source, Norm):
            gain_D = _gain(job, edge.source)
            # a channel without gain carries nothing, whatever its column is
            inverse_D = torch.where(gain_D == 0, 0, 1 / gain_D)
            fold = _then(scale_columns(gain_D), rotation.forward)
            unfold = _then(rotation.backward, scale_columns(inverse_D))
            total += sum(_relative(job, reader, fold, unfold) for reader in edge.readers)
    place = (rotation, 0, rotation.width)
    return total + sum(_relative(job, writer, rotate_rows(*place), _unrotate_rows(*place)) for writer in block.writers)


def _then(first: Edit, second: Edit) -> Edit:
    return lambda tensor: second(first(tensor))


def _rotate_residual(folding: Folding, job: Job, rotation: Rotation) -> None:
    anatomy = job.anatomy
    folding.add(f"{anatomy.embedding}.weight", rotation.forward)
    _rotate_head(folding, job, rotation)
    rotate = rotate_rows(rotation, 0, rotation.width)
    for block in anatomy.blocks:
        for edge in block.edges:
            if isinstance(edge.source, Norm):
                _absorb(folding, job, edge.source, edge.readers)
                for reader in edge.readers:
                    folding.add(f"{reader}.weight", rotation.forward)
        for writer in block.writers:
            folding.add(f"{writer}.weight", rotate)
            if writer in anatomy.biases:
                folding.add(f"{writer}.bias", rotate)


def _absorb(folding: Folding, job: Job, norm: Norm, readers: Sequence[str]) -> None:
    """Move a norm's gain into what reads it."""
    gain_D = _gain(job, norm)
    for reader in readers:
        folding.add(f"{reader}.weight", scale_columns(gain_D))
    folding.add(norm.weight, lambda _: torch.full_like(gain_D, 1 - norm.offset))


def _rotate_head(folding: Folding, job: Job, rotation: Rotation) -> None:
    """Let the head read the rotated stream; a tied one is untied unless the final norm's gain is the same everywhere."""
    anatomy = job.anatomy
    gain_D = _gain(job, anatomy.final_norm)
    if anatomy.tied and bool((gain_D == gain_D[0]).all()):
        return
    head = f"{anatomy.head}.weight"
    if anatomy.tied:
        folding.untied = True
        folding.added[head] = f"{anatomy.embedding}.weight"
        folding.warnings.append(
            f"the head {anatomy.head} no longer shares the embedding's matrix ({{added_mb:.1f}} MB more): the final norm's gain "
            "differs between channels and must go into the head alone once the residual stream is rotated; rotation: heads keeps "
            "the tie"
        )
    _absorb(folding, job, anatomy.final_norm, (anatomy.head,))
    folding.add(head, rotation.forward)


TRANSFORMS.register("rotate-heads")(RotateHeads())
TRANSFORMS.register("rotate-residual")(RotateResidual())
