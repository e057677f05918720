"""What a TensorRT build says while it runs and about what it made: phases, and the engine's layers with their precisions."""

import re
from dataclasses import dataclass

from model_optimizer.artifacts.compiled import FusedOp

PHASE = "phase: "
"""How a line of the build's log begins that says what it is at."""
BUILT = "built in {seconds:.2f} s, {cpu_seconds:.2f} s of CPU"
_BUILT = re.compile(r"^built in (?P<seconds>[\d.]+) s, (?P<cpu_seconds>[\d.]+) s of CPU$", re.MULTILINE)
_LAYER = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*),(?P<tensors>.*?)Metadata:(?P<metadata>.*)$")
_CONSTANTS = re.compile(r"Constants: \[(?P<constants>.*?)\], Outputs:")
_CODES = re.compile(r"Datatype: Int(?P<bits>4|8),")
"""Constants that are integer codes; indices and shapes are Int32 and Int64."""
_FUSED = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_LAYERS = "Layers:"
"""How the line of the builder's log begins that lists what was built, at detailed verbosity."""


@dataclass(frozen=True, slots=True)
class BuildTime:
    """What the builder took, without graph, imports and writing."""

    seconds: float
    cpu_seconds: float
    """Of all its threads; the same on a busy machine."""


def build_time(log: str) -> BuildTime | None:
    """Return what a build took; None where it did not come to its end."""
    found = _BUILT.search(log)
    return BuildTime(float(found["seconds"]), float(found["cpu_seconds"])) if found else None


def last_phase(log: str) -> str:
    """Return what a build was at when its log ended."""
    phases = [line.removeprefix(PHASE) for line in log.splitlines() if line.startswith(PHASE)]
    return phases[-1] if phases else "none"


def layers_of(log: tuple[str, ...]) -> tuple[FusedOp, ...]:
    """Return the layers of an engine as the builder listed them: name, kind, the graph's nodes that each does, and the width of
    the integer codes that it holds.

    Law: a weight that the builder unpacked is a constant of floating type, and its layer has no `bits`.
    """
    found = []
    for message in log:
        if not message.startswith(_LAYERS):
            continue
        for line in message.splitlines()[1:]:
            if match := _LAYER.match(line.strip()):
                nodes = tuple(_FUSED.findall(match["metadata"]))
                constants = _CONSTANTS.search(match["tensors"])
                widths = {int(bits) for bits in _CODES.findall(constants["constants"])} if constants else set()
                found.append(FusedOp(name=match["name"], kind=match["kind"], tensors=nodes, bits=max(widths, default=None)))
    return tuple(found)


def seen_integer(fused: tuple[FusedOp, ...], layers: tuple[FusedOp, ...]) -> tuple[FusedOp, ...]:
    """Return the weights that were given as codes, each with the engine's layer that holds its codes, where one does."""
    holders = {node: layer.name for layer in layers if layer.bits is not None for node in layer.tensors}
    return tuple(op.model_copy(update={"executed_by": holders.get(op.name) or holders.get(f"{op.name}/weight")}) for op in fused)
