"""QA-087: a GPTQ run that is killed behind its first layer, and what may change before it is run again."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_optimizer.artifacts.base import Stage, Stored, Tree, file_sha256, tree_digest
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.quantization.stage import CHECKPOINT, PARTS, quantize
from model_optimizer.store import Store, stage_key

GROUPS_A_BLOCK, NUM_GROUPS = 4, 8
"""q/k/v, o, gate/up, down: layers that read one input are made together."""


class Killed(BaseException):
    """Stands for SIGKILL (`benchmarks/resume_kill9.py` sends the real one): nothing in the code under test may catch it."""


class Watch(Quiet):
    """Counts the groups of layers that are visited, and stops the world before number `kill_at`."""

    def __init__(self, kill_at: int | None = None):
        self.kill_at = kill_at

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for number, item in enumerate(items):
            if label == "quantize" and number == self.kill_at:
                raise Killed
            yield item


@dataclass(frozen=True)
class Case:
    """The three things that a user may touch between a kill and the next run."""

    model: Path
    calibration: Path
    group: int = 64

    def inputs(self) -> QuantizeInputs:
        source = CalibrationSource.of(CalibrationConfig(path=self.calibration), self.calibration.parent)
        recipe = WeightRecipe(method="gptq", formats=(f"int4-g{self.group}",))
        settings = {"kl_breaker_nats": 1e9, "sensitivity_sequences": 4, "sensitivity_tokens": 64}
        config = QuantizationConfig.model_validate(settings)
        return QuantizeInputs(fingerprint="test", model=Tree.of(self.model), recipe=recipe, calibration=source, config=config)

    def run(self, root: Path, progress: Quiet) -> Stored[QuantizedModel]:
        inputs, store = self.inputs(), Store(root)
        return store.produce(
            Stage.QUANTIZE,
            stage_key(inputs),
            QuantizedModel,
            lambda workspace: quantize(inputs, workspace, store=store, progress=progress),
        )

    def workspace(self, root: Path) -> Path:
        return Store(root).directory(Stage.QUANTIZE, stage_key(self.inputs()))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Case:
    folder = tmp_path_factory.mktemp("case")
    lines = [json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills."}) for n in range(12)]
    (folder / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return Case(Path(shutil.copytree(tiny_llama, folder / "model")), folder / "c.jsonl")


@pytest.fixture(scope="module")
def whole(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Stored[QuantizedModel]:
    return case.run(tmp_path_factory.mktemp("whole"), Quiet())


@pytest.fixture(scope="module")
def killed(case: Case, whole: Stored[QuantizedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose quantize entry has the layers of block 0 and nothing else; what is shared with others is finished."""
    root = tmp_path_factory.mktemp("killed")
    shutil.copytree(whole.directory.parents[1], root, dirs_exist_ok=True, ignore=shutil.ignore_patterns(Stage.QUANTIZE))
    with pytest.raises(Killed):
        case.run(root, Watch(kill_at=GROUPS_A_BLOCK))
    return root


def parts(case: Case, root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (case.workspace(root) / PARTS).iterdir()}


def test_resume_skips_the_layers_of_block_0_and_ends_bit_identical(
    case: Case, whole: Stored[QuantizedModel], killed: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(killed, tmp_path / "store"))
    before = parts(case, root)
    assert len(before) == 7 and all(".layers.0." in name for name in before)
    with pytest.raises(Killed):  # once more, three groups later: nothing of block 0 was written again
        case.run(root, Watch(kill_at=NUM_GROUPS - 1))
    assert {name: time for name, time in parts(case, root).items() if name in before} == before
    done = case.run(root, Quiet())
    assert tree_digest(done.directory / CHECKPOINT) == tree_digest(whole.directory / CHECKPOINT)


@pytest.mark.parametrize("damage", ["half", "bit"])
def test_resume_makes_a_damaged_layer_file_again(
    case: Case, whole: Stored[QuantizedModel], killed: Path, tmp_path: Path, damage: str
) -> None:
    root = Path(shutil.copytree(killed, tmp_path / "store"))
    path = min((case.workspace(root) / PARTS).iterdir())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "bit" else content[: len(content) // 2])
    done = case.run(root, Quiet())
    assert tree_digest(done.directory / CHECKPOINT) == tree_digest(whole.directory / CHECKPOINT)


def _flip_weight(folder: Path, case: Case) -> Case:
    model = Path(shutil.copytree(case.model, folder / "model"))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return Case(model, case.calibration)


def _flip_text(folder: Path, case: Case) -> Case:
    path = folder / "c.jsonl"
    path.write_bytes(case.calibration.read_bytes().replace(b"Flock 3 ", b"Clock 3 "))
    return Case(case.model, path)


def _other_recipe(_folder: Path, case: Case) -> Case:
    return Case(case.model, case.calibration, group=32)


@pytest.mark.parametrize("edit", [_flip_weight, _flip_text, _other_recipe])
def test_resume_after_an_edit_of_one_byte_takes_nothing_from_the_killed_run(
    case: Case, killed: Path, tmp_path: Path, edit: Callable[[Path, Case], Case]
) -> None:
    root = Path(shutil.copytree(killed, tmp_path / "store"))
    (tmp_path / "edited").mkdir()
    edited, before = edit(tmp_path / "edited", case), parts(case, root)
    done = edited.run(root, Quiet())
    assert done.key != stage_key(case.inputs()) and not done.cached
    assert parts(case, root) == before  # the killed run's layers wait for their own inputs
    alone = edited.run(tmp_path / "fresh", Quiet())
    assert tree_digest(done.directory / CHECKPOINT) == tree_digest(alone.directory / CHECKPOINT)


def test_finished_run_resumed_is_a_no_op(case: Case, whole: Stored[QuantizedModel]) -> None:
    root = whole.directory.parents[1]

    def state() -> dict[str, tuple[str, int]]:
        files = [path for path in root.rglob("*") if path.is_file() and path.name != "artifact.json" and path.suffix != ".lock"]
        return {str(path): (file_sha256(path), path.stat().st_mtime_ns) for path in files}

    before = state()
    again = case.run(root, Watch(kill_at=0))
    assert again.cached and again.artifact == whole.artifact and state() == before
