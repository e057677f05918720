"""`model-optimizer memory MODEL`: where the bytes of an engine would go, what fits, and what would help most."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from flows.bootstrap import home
from flows.progress import TerminalProgress, terminal
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.spec import Spec

if TYPE_CHECKING:
    from model_optimizer.decisions import Decision
    from model_optimizer.memory.plan import Demand
    from model_optimizer.memory.subject import Subject
    from model_optimizer.memory.table import DeviceMemory, MemoryTable

S = TypeVar("S", bound=Spec)
GIB, GB = 2**30, 10**9
RUNTIMES = ("torch", "onnxruntime", "vllm", "llamacpp")


@dataclass(frozen=True)
class BudgetRequest:
    """What the budget is for; `settings` are KEY=VALUE of the sections sla, traffic and memory."""

    model: str
    profile: Path | None
    settings: tuple[tuple[str, str], ...]
    """(section, KEY=VALUE) pairs."""
    device: str
    runtime: str
    bits: float | None
    packed: bool


def print_budget(request: BudgetRequest, *, as_json: bool) -> None:
    """Print the budget table, capacity, options and symptoms.

    Raises:
        ConfigError: an input is wrong.
        UnsupportedError: not even one request fits (the table is printed all the same).
    """
    if request.runtime not in RUNTIMES:
        raise ConfigError(f"--runtime {request.runtime!r} is unknown; known: {', '.join(RUNTIMES)}")
    if request.bits is not None and not 1 <= request.bits <= 16:
        raise ConfigError(f"--bits is {request.bits:g}; give 1 to 16")
    demand, device = _demand(request), _device(request.device)
    from model_optimizer.memory.subject import read_subject
    from model_optimizer.memory.table import Asked, headline, memory_table

    subject = read_subject(_directory(request.model))
    demand, decisions = _with_page_tokens(demand, subject, device)
    asked = Asked(demand, device, request.runtime, request.bits, request.packed)
    table = memory_table(subject, asked).model_copy(update={"decisions": decisions})
    typer.echo(table.model_dump_json(indent=1) if as_json else "\n".join(_lines(table)))
    if not table.runs:
        raise UnsupportedError(f"{table.model} on {table.device} {headline(table)}; see the options above")


def _directory(model: str) -> Path:
    """Return a folder as it is, so that dimensions alone suffice; anything else is resolved as everywhere."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    from model_optimizer.models.resolve import check_reference, resolve_model
    from model_optimizer.spec import ModelRef
    from model_optimizer.store import Store

    check_reference(ModelRef(ref=model), Path.cwd())
    return resolve_model(ModelRef(ref=model), Path.cwd(), Store(home() / "store"), TerminalProgress(terminal())).tree.path


def _demand(request: BudgetRequest) -> "Demand":
    """Return the profile's demand, or the defaults, with what the options change."""
    from model_optimizer.memory.config import MemoryConfig
    from model_optimizer.memory.plan import Demand
    from model_optimizer.profile import load_profile
    from model_optimizer.spec import Sla, Traffic

    profile = load_profile(request.profile) if request.profile else None

    def stated(section: str) -> list[str]:
        return [setting for name, setting in request.settings if name == section]

    return Demand(
        _changed(profile.sla if profile else Sla(), stated("sla"), "sla"),
        _changed(profile.traffic if profile else Traffic(), stated("traffic"), "traffic"),
        _changed(profile.memory if profile else MemoryConfig(), stated("memory"), "memory"),
    )


def _changed(section: S, settings: list[str], name: str) -> S:
    """Return a section with KEY=VALUE settings; a dot reaches into it, e.g. `prompt_tokens.p95=4000`."""
    import yaml
    from pydantic import ValidationError

    data = section.model_dump()
    for setting in settings:
        path, equals, value = setting.partition("=")
        *outer, key = path.split(".")
        place = data
        for part in outer:
            if not isinstance(place.get(part), dict):
                raise ConfigError(f"--{name} {setting!r}: {part!r} has no parts; write --{name} KEY=VALUE")
            place = place[part]
        if not equals or not key:
            raise ConfigError(f"--{name} {setting!r} names no value; write --{name} KEY=VALUE")
        try:
            place[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--{name} {setting!r}: the value is unreadable: {' '.join(str(error).split())}") from error
    try:
        return type(section).model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--{name} {field}: {message}; seen: {first['input']!r}") from error


def _device(name: str) -> "DeviceMemory":
    """Return what `auto`, `cpu`, `cuda` or a device of the catalogue offers; the free memory of this machine's own devices."""
    from model_optimizer.hardware.catalogue import read_entry
    from model_optimizer.memory.budget import CUDA_CONTEXT_BYTES, PROCESS_BYTES, RUNTIME_CONTEXT_BYTES
    from model_optimizer.memory.table import DeviceMemory

    if name in ("auto", "cuda"):
        import torch

        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            return DeviceMemory(torch.cuda.get_device_name(), free, CUDA_CONTEXT_BYTES, 0, "bfloat16")
        if name == "cuda":
            raise UnsupportedError("--device cuda: no GPU is usable here; name one of the catalogue, e.g. --device l40s, or cpu")
    if name in ("auto", "cpu"):
        import psutil

        return DeviceMemory("cpu", psutil.virtual_memory().available, RUNTIME_CONTEXT_BYTES, PROCESS_BYTES, "float32")
    entry = read_entry(name)
    return DeviceMemory(entry.name, int(entry.memory_gb * GB), CUDA_CONTEXT_BYTES, 0, "bfloat16")


def _with_page_tokens(demand: "Demand", subject: "Subject", device: "DeviceMemory") -> "tuple[Demand, tuple[Decision, ...]]":
    """Return the demand with a page size; `auto` is measured on this machine's CPU or GPU and remembered."""
    from dataclasses import replace

    from model_optimizer.memory.config import AUTO_PAGE_TOKENS

    if demand.config.page_tokens != AUTO_PAGE_TOKENS:
        return demand, ()
    import torch

    from model_optimizer.memory.page_size import CANDIDATES, cached_page_sizes, choose_page_tokens, typical_tokens

    precision = device.dtype if demand.config.kv_precision == "auto" else demand.config.kv_precision
    layout = subject.geometry.layout(CANDIDATES[0], precision, device.dtype)
    place = "cuda" if torch.cuda.is_available() and device.name != "cpu" else "cpu"
    figures = cached_page_sizes(home() / "page_sizes.json", layout, typical_tokens(demand.traffic), place)
    decision = choose_page_tokens(figures)
    config = demand.config.model_copy(update={"page_tokens": int(decision.numbers["page_tokens"])})
    return replace(demand, config=config), (decision,)


def _lines(table: "MemoryTable") -> list[str]:
    from model_optimizer.memory.budget import binary_size
    from model_optimizer.memory.table import headline

    lines = [f"{table.model} ({table.attention}) on {table.device} with {table.runtime}", ""]
    for line in table.budget:
        lines.append(f"{line.part:16} {binary_size(line.num_bytes):>12}  {line.note}")
    token = binary_size(table.kv.bytes_per_token)
    lines += [
        "",
        f"{headline(table)}",
        f"KV cache: {table.kv_note}, {token} a token",
    ]
    if table.options:
        lines += ["", "what would help, most first (each alone)"]
        for option in table.options:
            fits = "fits then" if option.fits_then and not table.fits else ""
            lines.append(f"{option.change:48} saves {binary_size(option.saved_bytes):>10}  {fits:9}  price: {option.price}")
    lines += ["", "out of memory: what it looks like, and what it means"]
    for row in table.symptoms:
        lines += [
            f"{row.when:5} {row.symptom}",
            f"      cause: {row.cause}",
            f"      here: {row.here}",
            f"      do: {row.remedy}",
        ]
    return lines + [decision.sentence() for decision in table.decisions]
