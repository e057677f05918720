"""`model-optimizer quantize`: one checkpoint, or one GGUF file, into a new directory."""

import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flows.bootstrap import home
from flows.claim import claimed
from flows.cli.publish import Made, publish
from flows.progress import TerminalProgress, terminal
from model_optimizer.compilation.support import FRAMEWORKS
from model_optimizer.disk import require_writable
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.runtimes.triple import ORIGIN, origin_of

if TYPE_CHECKING:
    from model_optimizer.artifacts.base import Stored, Tree
    from model_optimizer.artifacts.compiled import CompiledModel
    from model_optimizer.artifacts.quantized import QuantizedModel
    from model_optimizer.artifacts.strategy import WeightRecipe
    from model_optimizer.artifacts.triple import LoadCheck, Triple
    from model_optimizer.compilation.target_framework import Loader
    from model_optimizer.quantization.calibration import CalibrationSource
    from model_optimizer.store import Store

GGUF = "gguf:"
SHORT = {"int8": 8.0, "int4": 4.0, "int3": 3.0, "int2": 2.0}
"""Words of `--quantize` that stand for a number of bits."""
DEFAULT_ENGINE = "onnxruntime"
LIBRARIES = ("compressed-tensors", "safetensors", "torch", "transformers")


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    model: str
    output: Path
    calibration_data: Path | None = None
    method: str = "rtn"
    bits: float | None = None
    form: str | None = None
    """`gguf:RECIPE`, a weight format, or int8, int4, int3, int2."""
    data_free: bool = False
    dry_run: bool = False
    level: int | None = None
    framework: str | None = None
    target_python: Path | None = None
    target_device: str = "auto"
    settings: QuantizationConfig = field(default_factory=QuantizationConfig)

    @property
    def gguf(self) -> str | None:
        """Return the GGUF recipe that was asked for."""
        return self.form.removeprefix(GGUF) if self.form and self.form.startswith(GGUF) else None

    @property
    def without_data(self) -> bool:
        return self.data_free or self.calibration_data is None

    @property
    def engine(self) -> str | None:
        """Return the runtime that an engine is asked for, if one is."""
        if self.framework and FRAMEWORKS.get(self.framework.partition("==")[0]).loads == "engine":
            return self.framework.partition("==")[0]
        return DEFAULT_ENGINE if self.level is not None else None


def quantize_to_directory(asked: Asked, *, as_json: bool) -> None:
    """Quantize through the store and copy the result to a directory that must not exist, or only say what that would take.

    Raises:
        ConfigError: the output exists, or an input is wrong.
    """
    loader = aim_at(asked)
    _refuse_contradictions(asked)
    if not asked.dry_run:
        require_writable(asked.output.absolute().parent)
    require_writable(home() / "store")
    with nullcontext() if asked.dry_run else claimed(asked.output):
        _refuse_existing(asked.output)  # somebody may have written it since it was looked at first
        _quantize(asked, loader, as_json=as_json)


def _quantize(asked: Asked, loader: "Loader | None", *, as_json: bool) -> None:
    from model_optimizer.compilation.target_framework import refuse_architecture
    from model_optimizer.models.resolve import check_reference, resolve_model
    from model_optimizer.quantization.calibration_source import locate
    from model_optimizer.quantization.config import CalibrationConfig
    from model_optimizer.spec import ModelRef
    from model_optimizer.store import Store

    _refuse_unknown(asked)
    progress, store, here = TerminalProgress(terminal()), Store(home() / "store"), Path.cwd()
    if asked.calibration_data and not (config := CalibrationConfig(path=asked.calibration_data)).is_self:
        locate(config, here)
    check_reference(ModelRef(ref=asked.model), here)
    model = resolve_model(ModelRef(ref=asked.model), here, store, progress).tree
    if asked.engine:
        refuse_architecture(asked.engine, model.path)
    if asked.dry_run:
        _tell_forecast(asked, model, as_json=as_json)
        return
    work = _Work(asked, model, store, progress)
    made = work.gguf() if asked.gguf else work.rounded() if asked.without_data else work.quantized()
    check, unchecked_because = work.load(made, loader)
    triple = _triple(asked, model, check, unchecked_because)
    made = replace(
        made,
        warnings=(*made.warnings, *(loader.doubts if loader else ())),
        figures=made.figures | ({"load_canary": check.model_dump(mode="json")} if check else {}),
    )
    described = _metadata(asked, model, work.calibration_digest, made) | {"triple": triple.model_dump(mode="json")}
    publish(made, json.dumps(described, indent=1, sort_keys=True, ensure_ascii=False), asked.output)
    for warning in made.warnings:
        progress.note(f"warning: {warning}")
    if as_json:
        typer.echo(json.dumps(made.figures | {"output": str(asked.output)}, indent=1))
    else:
        said = ", ".join(f"{name} {value:.6g}" for name, value in made.figures.items() if isinstance(value, (int, float)))
        typer.echo(f"{asked.output}: {said}")


def _refuse_existing(output: Path) -> None:
    if output.exists():
        raise ConfigError(f"output {output} exists; it must be a new directory, nothing is overwritten")


def _refuse_contradictions(asked: Asked) -> None:
    """Refuse what cannot be meant together; nothing is read."""
    _refuse_existing(asked.output)
    if asked.data_free and asked.calibration_data:
        raise ConfigError(f"--data-free and --calibration-data {asked.calibration_data} contradict each other; leave one out")
    if asked.form and asked.bits is not None:
        raise ConfigError(f"--format {asked.form} and --bits {asked.bits:g} both say how weights are stored; leave one out")
    if asked.gguf is not None and (asked.method != "rtn" or asked.engine):
        raise ConfigError(
            f"--format {asked.form} is rounded by its own search and needs no engine; leave --quant_method {asked.method}, "
            "--compile-level and --target-framework out"
        )
    if asked.without_data and asked.engine:
        raise ConfigError("an engine is held against its checkpoint on text that was held out; give --calibration-data")


def _refuse_unknown(asked: Asked) -> None:
    """Refuse a name that no registry knows, and a method without the data that it needs."""
    from model_optimizer.formats.gguf.recipes import RECIPES, recipe_named
    from model_optimizer.formats.registry import FORMATS
    from model_optimizer.quantization.registry import METHODS

    if asked.gguf is not None:
        recipe_named(asked.gguf)
    elif asked.form and asked.form not in (*SHORT, *FORMATS.names()):
        known = ", ".join((*SHORT, *FORMATS.names(), *(GGUF + name for name in sorted(RECIPES))))
        raise ConfigError(f"unknown format {asked.form!r}; known: {known}")
    METHODS.get(asked.method)
    if asked.without_data and asked.method not in ("rtn", "rtn-mse", "rtn-percentile"):
        raise ConfigError(f"--quant_method {asked.method} weighs errors by data; give --calibration-data, or take rtn")
    if asked.without_data and asked.method != "rtn":
        raise ConfigError(f"without data only rtn rounds, not {asked.method}; give --calibration-data")


def aim_at(asked: Asked) -> "Loader | None":
    """Return the target framework, after making sure that it can be had and runs what was asked for; nothing is read.

    Raises:
        ConfigError: it, its interpreter or the device is unknown.
        UnsupportedError: it is missing, has another version, or does not run the scheme.
    """
    from flows.target import device_of, refuse_unopened, schemes_of_bits, schemes_of_formats
    from model_optimizer.compilation.support import Device, Scheme
    from model_optimizer.compilation.target_framework import Loader, TargetFramework

    if asked.framework is None:
        if asked.target_python is not None:
            raise ConfigError(f"--target-python {asked.target_python} is the interpreter of no framework; add --target-framework")
        return None
    target = TargetFramework.read(asked.framework, asked.target_python)
    device = device_of("auto") if asked.target_device == "auto" else Device.named(asked.target_device)
    if asked.gguf is not None:
        schemes = frozenset({Scheme.GGUF})
    elif asked.form and asked.form not in SHORT:
        schemes = schemes_of_formats((asked.form,), (asked.method,))
    else:
        bits = SHORT[asked.form] if asked.form else 8.0 if asked.bits is None else asked.bits
        schemes = schemes_of_bits(bits, (asked.method,))
    loader = Loader.of(target, schemes, device)
    if target.framework.loads == "engine":
        refuse_unopened(target.name)
    return loader


def _recipe(asked: Asked, model: Path) -> "WeightRecipe":
    """Return how weights are to be stored."""
    from model_optimizer.artifacts.strategy import WeightRecipe
    from model_optimizer.quantization.layers import find_layers
    from model_optimizer.strategy.space import recipe

    if asked.form and asked.form not in SHORT:
        if asked.form == "float32":
            raise ConfigError("--format float32 leaves the model as it is; give another format")
        return WeightRecipe.model_validate({"method": asked.method, "formats": (asked.form,)})
    bits = SHORT[asked.form] if asked.form else 8 if asked.bits is None else asked.bits
    plain = recipe(bits, find_layers(model).linears)
    if not plain.quantized:
        raise ConfigError(f"--bits {bits:g} leaves the model as it is; give 8, 4, 3, 2 or a budget between 2 and 8")
    if asked.without_data and plain.bits_budget:
        raise ConfigError(f"--bits {bits:g} is shared out by what layers lose on data; give --calibration-data, or 8, 4, 3, 2")
    return WeightRecipe.model_validate(plain.model_dump() | {"method": asked.method})


class _Work:
    """Makes what was asked for, through the store, so that a killed command goes on and a repeated one copies."""

    def __init__(self, asked: Asked, model: "Tree", store: "Store", progress: TerminalProgress):
        from model_optimizer.hardware.fingerprint import fingerprint

        self._asked, self._model, self._store, self._progress = asked, model, store, progress
        self._fingerprint = fingerprint()
        self._calibration = self._source()

    @property
    def calibration_digest(self) -> str | None:
        return self._calibration.tree.digest if self._calibration else None

    def _source(self) -> "CalibrationSource | None":
        from model_optimizer.quantization.calibration import CalibrationSource
        from model_optimizer.quantization.calibration_source import Sampler
        from model_optimizer.quantization.config import CalibrationConfig

        if self._asked.calibration_data is None:
            return None
        sampler = Sampler(model=self._model, cache=home() / "calibration")
        return CalibrationSource.of(CalibrationConfig(path=self._asked.calibration_data), Path.cwd(), sampler)

    def gguf(self) -> Made:
        """Return the model as one GGUF file, with the configuration and tokenizer that `serve` reads beside it."""
        from model_optimizer.artifacts.exported import GgufModel
        from model_optimizer.formats.gguf.writer import served_beside
        from model_optimizer.quantization.gguf_export import KIND, GgufInputs, export_gguf
        from model_optimizer.store import stage_key

        inputs = GgufInputs(
            fingerprint=self._fingerprint,
            model=self._model,
            recipe=(self._asked.gguf or "").lower(),
            name=Path(self._asked.model.partition(":")[2] or self._asked.model).absolute().name,
            calibration=self._calibration,
            config=self._asked.settings,
        )
        stored = self._store.produce(
            KIND,
            stage_key(inputs),
            GgufModel,
            lambda workspace: export_gguf(inputs, workspace, store=self._store, progress=self._progress),
        )
        artifact = stored.artifact
        figures = artifact.model_dump(include={"num_bytes", "bits_per_weight", "tensor_types", "importance_tokens", "file"})
        said = tuple(decision.sentence() for decision in artifact.decisions)
        recipe: dict[str, object] = {"gguf": artifact.recipe}
        files = {**served_beside(self._model.path), artifact.file: stored.directory / artifact.file}
        return Made(files, figures, said, artifact.warnings, recipe)

    def rounded(self) -> Made:
        """Return a checkpoint that was rounded without data."""
        from model_optimizer.artifacts.exported import RoundedModel
        from model_optimizer.quantization.data_free import DataFreeInputs, round_model
        from model_optimizer.store import stage_key

        recipe = _recipe(self._asked, self._model.path)
        inputs = DataFreeInputs(fingerprint=self._fingerprint, model=self._model, format=recipe.formats[0])
        stored = self._store.produce(
            "rounded",
            stage_key(inputs),
            RoundedModel,
            lambda workspace: round_model(inputs, workspace, progress=self._progress),
        )
        artifact = stored.artifact
        figures = artifact.coverage.model_dump() | {"data_free": True}
        said = tuple(decision.sentence() for decision in artifact.decisions)
        checkpoint = stored.directory / artifact.checkpoint
        return Made({"": checkpoint}, figures, said, artifact.warnings, recipe.model_dump(mode="json"))

    def quantized(self) -> Made:
        """Return a calibrated checkpoint, with an engine where one is asked for."""
        from model_optimizer.artifacts.base import Stage
        from model_optimizer.artifacts.quantized import QuantizedModel
        from model_optimizer.quantization.shared import QuantizeInputs
        from model_optimizer.quantization.stage import quantize
        from model_optimizer.store import stage_key

        assert self._calibration is not None, "refused before"
        inputs = QuantizeInputs(
            fingerprint=self._fingerprint,
            model=self._model,
            recipe=_recipe(self._asked, self._model.path),
            calibration=self._calibration,
            config=self._asked.settings,
        )
        stored = self._store.produce(
            Stage.QUANTIZE,
            stage_key(inputs),
            QuantizedModel,
            lambda workspace: quantize(inputs, workspace, store=self._store, progress=self._progress),
        )
        artifact = stored.artifact
        if artifact.checkpoint is None:
            raise IntegrityError("a quantized recipe gave no checkpoint; this is a bug")
        files, written = {"": stored.directory / artifact.checkpoint}, dict[str, str]()
        figures = artifact.coverage.model_dump() | {"predicted_kl_nats": artifact.predicted_kl_nats}
        if self._asked.engine:
            compiled = self._compiled(inputs.recipe, stored)
            engine = compiled.artifact.engine
            files["layout.json"] = compiled.directory / compiled.artifact.layout
            files[f"engines/{engine.runtime}"] = compiled.directory / engine.directory
            written = {f"engines/{engine.runtime}/{ORIGIN}": origin_of(engine).model_dump_json(indent=1)}
            figures |= {"engine_bytes": engine.num_bytes, "parity_kl_nats": compiled.artifact.parity.mean_kl_nats}
        said = tuple(decision.sentence() for decision in artifact.decisions)
        return Made(files, figures, said, artifact.warnings, inputs.recipe.model_dump(mode="json"), written)

    def load(self, made: Made, loader: "Loader | None") -> "tuple[LoadCheck | None, str]":
        """Let the target framework load what was made; return what came of it, or None and why it did not run."""
        from model_optimizer.compilation.canary import check_load

        if loader is None:
            return None, "no target framework was stated (--target-framework)"
        if self._asked.gguf:
            return None, "llama.cpp has no load canary; `serve` with `engine: llamacpp` loads the file"
        engine = made.files.get(f"engines/{loader.target.name}")
        self._progress.note(f"load canary: {loader.target.label}")
        return check_load(loader, engine or made.files[""], made.files[""])

    def _compiled(self, recipe: "WeightRecipe", quantized: "Stored[QuantizedModel]") -> "Stored[CompiledModel]":
        from pydantic import ValidationError

        from model_optimizer.artifacts.base import Stage
        from model_optimizer.artifacts.compiled import CompiledModel
        from model_optimizer.artifacts.strategy import Strategy
        from model_optimizer.compilation.config import CompileConfig
        from model_optimizer.compilation.stage import CompileInputs, compile_model
        from model_optimizer.store import stage_key

        assert self._calibration is not None, "refused before"
        try:
            config = CompileConfig() if self._asked.level is None else CompileConfig(level=self._asked.level)
        except ValidationError as error:
            raise ConfigError(f"--compile-level {self._asked.level}: {error.errors()[0]['msg'].lower()}") from error
        inputs = CompileInputs(
            fingerprint=self._fingerprint,
            model=self._model,
            quantized=quantized,
            strategy=Strategy(weights=recipe, runtime=self._asked.engine or DEFAULT_ENGINE),
            config=config,
            calibration=self._calibration,
        )
        return self._store.produce(
            Stage.COMPILE,
            stage_key(inputs),
            CompiledModel,
            lambda workspace: compile_model(inputs, workspace, store=self._store, progress=self._progress),
        )


def _tell_forecast(asked: Asked, model: "Tree", *, as_json: bool) -> None:
    """Say how long it would take and how much memory; nothing is quantized."""
    from model_optimizer.quantization.layers import find_layers
    from model_optimizer.quantization.preflight import forecast, forecast_gguf

    if asked.gguf:
        told = forecast_gguf(model.path, asked.gguf)
    else:
        settings = None if asked.without_data else asked.settings
        told = forecast(find_layers(model.path).linears, _recipe(asked, model.path), settings)
    figures = {
        "predicted_s": told.total_s,
        "predicted_peak_bytes": told.peak_bytes,
        "predicted_output_bytes": told.checkpoint_bytes,
        "predicted_s_by_step": told.seconds,
    }
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    steps = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in told.seconds.items())
    typer.echo(
        f"{asked.model}: about {told.total_s:.3g} s ({steps}), {told.peak_bytes / 2**20:.0f} MiB of memory, "
        f"{told.checkpoint_bytes / 1e6:.1f} MB written; predicted, nothing was done"
    )


def _triple(asked: Asked, model: "Tree", check: "LoadCheck | None", because: str) -> "Triple":
    """Return train framework, optimizer and inference framework, each with its version."""
    from model_optimizer.artifacts.triple import Component, Triple
    from model_optimizer.compilation.target_framework import TargetFramework
    from model_optimizer.release.version import DISTRIBUTION, package_version
    from model_optimizer.runtimes.triple import training_framework

    inference = Component(name="none", version="not stated")
    if asked.framework or asked.engine:
        target = TargetFramework.read(asked.framework or DEFAULT_ENGINE)
        found = target.found()
        version = check.version if check else found.version if found else target.version
        inference = Component(name=target.name, version=version or "not stated")
    return Triple(
        training=training_framework(model.path),
        optimizer=Component(name=DISTRIBUTION, version=package_version()),
        inference=inference,
        checked=(check,) if check else (),
        unchecked_because=None if check else because,
    )


def _metadata(asked: Asked, model: "Tree", calibration_digest: str | None, made: Made) -> dict[str, object]:
    """Return metadata.json: what was made of what, by what; no time and no path, so that a rerun gives the same bytes."""
    from model_optimizer.release.version import optimizer_hash, package_version

    libraries = (*LIBRARIES, "gguf") if asked.gguf else LIBRARIES
    return {
        "strategy": made.recipe,
        "model_ref": asked.model,
        "model_sha256": model.digest,
        "calibration_sha256": calibration_digest,
        "optimizer": package_version(),
        "optimizer_hash": optimizer_hash(),
        "seeds": {"quantization": asked.settings.seed},
        "frameworks": {name: metadata.version(name) for name in libraries},
        "figures": made.figures,
        "decisions": list(made.decisions),
        "warnings": list(made.warnings),
    }
