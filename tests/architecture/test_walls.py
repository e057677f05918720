"""The walls of the house: what may import what, and what no file may contain."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_optimizer.paths import REPOSITORY_ROOT

SOURCES = sorted(
    path for root in ("model_optimizer", "tasks", "flows", "benchmarks") for path in (REPOSITORY_ROOT / root).rglob("*.py")
)
BLOCKED = ("prefect", "mlflow", "fastapi", "uvicorn", "onnxruntime", "openvino", "tensorrt", "vllm", "llama_cpp")

IMPORT_EVERY_MODULE = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(%r))  # an import of these now fails, a look for them finds nothing
import model_optimizer
count = 0
for module in pkgutil.walk_packages(model_optimizer.__path__, "model_optimizer."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        count += 1
print(count)
"""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ})


def test_engine_imports_without_orchestrator_tracker_and_inference_frameworks() -> None:
    done = _python(IMPORT_EVERY_MODULE % (BLOCKED,))
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        int(done.stdout)
        == sum(1 for path in (REPOSITORY_ROOT / "model_optimizer").rglob("*.py") if path.name not in ("__main__.py",)) - 1
    )


def test_import_contracts_are_kept() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], capture_output=True, text=True, cwd=REPOSITORY_ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("module", ["model_optimizer.profile", "flows.cli.main", "flows.prepare"])
def test_reading_a_profile_and_help_load_no_heavy_library(module: str) -> None:
    heavy = {"torch", "transformers", "prefect", "mlflow", "onnx", "scipy"}
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = _python(code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY_ROOT)))
def test_source_keeps_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    faults = [fault for node in ast.walk(tree) if (fault := _fault(node))]
    assert not faults
    assert len(text.splitlines()) <= 500


def _fault(node: ast.AST) -> str | None:
    """Return which rule a syntax node breaks, or None."""
    match node:
        case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
            return f"line {node.value.lineno}: trust_remote_code=True"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
            return f"line {node.lineno}: torch.load"
        case ast.Import(names=names) if any(name.name.split(".")[0] in ("pickle", "joblib", "dill") for name in names):
            return f"line {node.lineno}: pickle"
        case ast.Attribute(value=ast.Name(id="sys"), attr="path"):
            return f"line {node.lineno}: sys.path"
        case ast.FunctionDef() if (node.end_lineno or 0) - node.lineno >= 60:
            return f"line {node.lineno}: {node.name} is longer than 60 lines"
        case ast.ExceptHandler(type=ast.Name(id="Exception")) if not _at_process_edge(node):
            return f"line {node.lineno}: except Exception away from the process edge"
    return None


def _at_process_edge(handler: ast.ExceptHandler) -> bool:
    """Only an `error` that ends the process in the command line's main is allowed."""
    return any(isinstance(call, ast.Name) and call.id == "_end" for call in ast.walk(handler))


def test_packages_have_empty_init_files() -> None:
    filled = [path for path in SOURCES if path.name == "__init__.py" and path.read_text().strip()]
    assert filled == []
