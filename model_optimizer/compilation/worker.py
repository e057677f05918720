"""One build step in its own process, so that a crash or a leak of a compiler cannot take the run down.

`python -m model_optimizer.compilation.worker SPEC.json` does what the specification says; the parent
writes `reproduce.py` beside the result first, so that a failed build can be repeated alone.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.compiled import FusedOp
from model_optimizer.compilation.graph_form import GraphForm
from model_optimizer.errors import CompileError, ModelOptimizerError
from model_optimizer.paths import PACKAGE_ROOT
from model_optimizer.store import write_atomically

if TYPE_CHECKING:
    import onnx

REPRODUCE = "reproduce.py"
LAYOUT = "layout.json"
LOG = "build.log"
ENGINE = "engine"
_SCRIPT = '''"""Repeat this build alone: `python {reproduce} [OUTPUT_DIRECTORY]`."""

import sys
from pathlib import Path

from model_optimizer.compilation.worker import BuildSpec, build

SPEC = """
{spec}
"""

if __name__ == "__main__":
    spec = BuildSpec.model_validate_json(SPEC)
    build(spec.model_copy(update={{"output": Path(sys.argv[1])}}) if len(sys.argv) > 1 else spec)
'''


class Range(Frozen):
    """Of a free dimension: least, usual and most."""

    least: int
    usual: int
    most: int


class ShapeProfile(Frozen):
    """The shapes that an engine is tuned for."""

    batch: Range
    sequence: Range
    """New tokens of a step."""
    past: Range
    """Tokens in the cache."""


class TensorRtBuild(Frozen):
    """One TensorRT engine."""

    profiles: tuple[ShapeProfile, ...]
    gpu: str | None = None
    """Compute capability, e.g. `sm89`; None = this machine's. Only TensorRT-RTX builds for a GPU that is not there."""
    optimization_level: int = 3
    """0 to 5: how long to look for fast kernels. Source: TensorRT's own default is 3."""
    timing_cache: Path | None = None
    """Read where it exists, written after the build."""
    version_compatible: bool = False
    """Whether later versions of the library may load the engine too."""
    hardware_compatible: bool = False
    """Whether GPUs of later generations may load it too."""


class BuildSpec(Frozen):
    """One build step: an ONNX export of `source`, or an engine from `source` = an export."""

    step: Literal["export", "onnxruntime", "openvino", "tensorrt"]
    source: Path
    output: Path
    checkpoint: Path | None = None
    """Packed checkpoint whose weights go into the engine; None for a float32 engine."""
    level: int = 1
    accuracy_level: int = 0
    block_size: int = 64
    precision: str = "float32"
    form: GraphForm = GraphForm()
    """How an export is drawn."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What an ONNX Runtime engine is opened on."""
    gain_rounds: int = 0
    """Interleaved rounds in which each fusion's gain is measured; 0 = not."""
    tensorrt: TensorRtBuild | None = None
    """What only TensorRT is told."""


def run_isolated(spec: BuildSpec, workspace: Path, timeout_s: float) -> None:
    """Run a build step in a child process; its output goes to build.log in the workspace.

    Raises:
        CompileError: it failed or ran out of time; carries the reproduce script.
    """
    reproduce = workspace / REPRODUCE
    text = spec.model_dump_json(indent=1)
    write_atomically(reproduce, _SCRIPT.format(reproduce=REPRODUCE, spec=text.replace("\\", "\\\\")).encode())
    write_atomically(workspace / "build.json", text.encode())
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "model_optimizer.compilation.worker", str(workspace / "build.json")]
    repeat = f"repeat it alone: {reproduce}"
    with (workspace / LOG).open("wb") as log:
        try:
            result = subprocess.run(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=timeout_s, env=environment, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"the {spec.step} build took longer than {timeout_s:g} s; {repeat}", reproduce) from error
    if result.returncode:
        lines = (workspace / LOG).read_text(errors="replace").strip().splitlines() or ["no output"]
        raise CompileError(f"the {spec.step} build ended with code {result.returncode}: {lines[-1]}; {repeat}", reproduce)


def build(spec: BuildSpec) -> None:
    """Do one build step in this process."""
    if spec.step == "export":
        from model_optimizer.compilation.export import export_model

        export_model(spec.source, spec.output, spec.form)
    elif spec.step == "openvino":
        from model_optimizer.compilation.openvino_engine import build_openvino

        build_openvino(spec)
    elif spec.step == "tensorrt":
        from model_optimizer.compilation.tensorrt_engine import build_tensorrt

        build_tensorrt(spec)
    else:
        from model_optimizer.compilation.onnxruntime_engine import build_onnxruntime

        build_onnxruntime(spec)


def fresh_engine(spec: BuildSpec) -> Path:
    """Return the engine's folder, empty."""
    engine = spec.output / ENGINE
    shutil.rmtree(engine, ignore_errors=True)
    engine.mkdir(parents=True)
    return engine


def graph_with_weights(spec: BuildSpec, folder: Path) -> "tuple[onnx.ModelProto, tuple[FusedOp, ...]]":
    """Return the export's graph, with the checkpoint's integer weights where there is one; its data file lies in `folder`."""
    import onnx

    from model_optimizer.compilation.external_data import MODEL
    from model_optimizer.compilation.swap import swap_weights

    if spec.checkpoint is not None:
        return swap_weights(spec.source, spec.checkpoint, folder, accuracy_level=spec.accuracy_level, block_size=spec.block_size)
    for data in spec.source.glob("*.data"):
        link_or_copy(data, folder / data.name)
    return onnx.load(spec.source / MODEL, load_external_data=False), ()


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or a copy where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def main(arguments: list[str]) -> int:
    """Run the build that the given JSON file describes; errors that a user can meet print one line."""
    try:
        build(BuildSpec.model_validate_json(Path(arguments[0]).read_bytes()))
    except ModelOptimizerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
