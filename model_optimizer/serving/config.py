"""What serve.yaml may say. No web framework and no torch here.

engine: native                                          # or onnxruntime, openvino, vllm, llamacpp; a bundle names its own
native: {draft: ./small-model, num_drafts: 4}           # only where the engine is native
managed: {command: /opt/vllm/bin/vllm, dtype: bfloat16} # only where it is vllm or llamacpp
"""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError

from model_optimizer.runtimes.native_options import NativeOptions
from model_optimizer.runtimes.options import ManagedOptions, RuntimeOptions
from model_optimizer.spec import Spec
from model_optimizer.yaml_file import read_yaml

_RUNTIME_OF = {"native": "torch"}
"""Engines that are another name for a runtime."""


def _runtime(value: object) -> object:
    return _RUNTIME_OF.get(value, value) if isinstance(value, str) else value


def _section(value: object) -> object:
    return {"runtime": value} if isinstance(value, str) else value


class EngineConfig(Spec):
    """`engine: vllm` is short for `engine: {runtime: vllm}`."""

    runtime: Annotated[str | None, BeforeValidator(_runtime)] = Field(
        default=None,
        description="native, onnxruntime, openvino, vllm or llamacpp; left out: a bundle's own, else native. vllm also serves a "
        "bundle's checkpoint, and llamacpp its GGUF file, in place of the engine that was verified",
    )
    start_timeout_s: float = Field(default=900, gt=0, description="to load the model")
    share_prefixes: bool = Field(
        default=True, description="requests that begin alike share keys and values, where the runtime can"
    )
    stall_timeout_s: float = Field(
        default=300, gt=0, description="an engine with work that says nothing for so long is restarted"
    )


class KvConfig(Spec):
    """The cache of a model without kv_cache_config.json; where it has one, what is stated here may only narrow it."""

    memory_gib: float | None = Field(default=None, gt=0, description="for the whole engine; left out: 90 % of what is free")
    page_tokens: int | None = Field(default=None, ge=1, le=256)
    max_batch: int | None = Field(default=None, ge=1, le=1024, description="requests that run at once")
    max_model_len: int | None = Field(default=None, ge=16, description="prompt and answer together, in tokens")


class LimitsConfig(Spec):
    max_waiting: int = Field(default=64, ge=0, description="requests beyond those that run; more are answered 429")
    max_body_bytes: int = Field(default=2 << 20, ge=1024)
    max_new_tokens: int | None = Field(default=None, ge=1, description="longest answer; left out: what the model's length leaves")
    body_timeout_s: float = Field(default=30, gt=0, description="to receive a request")
    request_timeout_s: float = Field(default=600, gt=0, description="to answer it, waiting included")
    drain_timeout_s: float = Field(default=60, ge=0, description="for running requests once the server shall end")


class SamplingConfig(Spec):
    """What holds where a request does not say."""

    temperature: float = Field(default=0.0, ge=0, le=2, description="0 is greedy, as releases are verified")
    top_p: float = Field(default=1.0, gt=0, le=1)


class ApiKeyConfig(Spec):
    """Where the keys are that clients of /v1 must show; both left out: none is asked for. Probes and metrics stay open."""

    file: Path | None = Field(default=None, description="one key a line")
    environment: str | None = Field(default=None, description="name of a variable that holds one key")


class ServeConfig(Spec):
    model_path: Path | None = Field(default=None, description="bundle, deployment root or model directory; --model_path wins")
    public_key: Path | None = Field(default=None, description="whose signature a bundle must bear; left out: your own")
    allow_unsigned: bool = False
    served_name: str | None = Field(default=None, min_length=1, max_length=200, description="left out: the bundle's name")
    host: str = "127.0.0.1"
    watch_s: float = Field(default=1.0, gt=0, description="how often a deployment root is looked at")
    engine: Annotated[EngineConfig, BeforeValidator(_section)] = EngineConfig()
    native: NativeOptions | None = Field(default=None, description="how the native engine runs")
    managed: ManagedOptions | None = Field(default=None, description="where the program of vllm or llamacpp is, and its options")
    kv: KvConfig = KvConfig()
    limits: LimitsConfig = LimitsConfig()
    sampling: SamplingConfig = SamplingConfig()
    api_key: ApiKeyConfig = ApiKeyConfig()

    @property
    def options(self) -> RuntimeOptions:
        """Return what is stated for the runtime."""
        return RuntimeOptions(native=self.native, managed=self.managed)


def load_config(path: Path | None) -> ServeConfig:
    """Return what a serve.yaml says; the defaults for None.

    Raises:
        ConfigError: names file, line, field, the value seen and what is allowed.
    """
    if path is None:
        return ServeConfig()
    document = read_yaml(path, "it must map names to values, e.g. `kv: {max_batch: 8}`")
    try:
        return ServeConfig.model_validate(document.data)
    except ValidationError as error:
        raise document.fault(error, ServeConfig, "serve.yaml") from error
