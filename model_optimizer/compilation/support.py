"""Which framework executes which scheme on which device: known before any work starts, with the reason of every refusal.

One framework is one file of `frameworks/`. Loads neither torch nor any framework, so that a profile is held against it at once.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from model_optimizer.artifacts.strategy import FormatName, WeightRecipe
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.registry import Registry

Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU, e.g. (8, 9)."""
LOWEST: Capability = (0, 0)
HIGHEST: Capability = (99, 9)
CAPABILITIES: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""Columns of the matrix: Turing, two of Ampere, Ada, Hopper, two of Blackwell."""


class Scheme(StrEnum):
    """How numbers are stored and rounded, as far as frameworks care."""

    FLOAT = "float"
    INT8_CHANNEL = "int8-channel"
    INT8_DYNAMIC = "int8-activations-dynamic"
    INT8_STATIC = "int8-activations-static"
    FP8_DYNAMIC = "fp8-dynamic"
    FP8_STATIC = "fp8-static"
    INT6_GROUP = "int6-group"
    INT5_GROUP = "int5-group"
    INT4_GROUP = "int4-group"
    INT4_GROUP_ASYMMETRIC = "int4-group-asymmetric"
    INT3_GROUP = "int3-group"
    INT2_GROUP = "int2-group"
    NEGATIVE_SCALES = "negative-scales"
    """Symmetric groups whose scale may be below zero."""
    MIXED = "mixed"
    """Layers of several formats in one checkpoint."""
    GGUF = "gguf"


GRAPH_SCHEMES = frozenset(
    {
        Scheme.FLOAT,
        Scheme.INT8_CHANNEL,
        Scheme.INT4_GROUP,
        Scheme.INT4_GROUP_ASYMMETRIC,
        Scheme.INT3_GROUP,
        Scheme.INT2_GROUP,
        Scheme.NEGATIVE_SCALES,
        Scheme.MIXED,
    }
)
"""What the ONNX graph holds: MatMulNBits with a checkpoint's own codes, the rest in float32."""


_PLAIN = {
    "float32": Scheme.FLOAT,
    "int8-channel": Scheme.INT8_CHANNEL,
    "w8a8-int8": Scheme.INT8_DYNAMIC,
    "w8a8-int8-static": Scheme.INT8_STATIC,
    "fp8-dynamic": Scheme.FP8_DYNAMIC,
    "fp8-static": Scheme.FP8_STATIC,
}
_GROUPED = re.compile(r"int(?P<bits>\d)-g\d+(?P<asymmetric>-asym)?")
SIGNED_METHODS = ("awq", "gptq", "rtn-mse", "signround")
"""Methods that may give a symmetric group a negative scale; plain rounding never does."""


class Standing(StrEnum):
    """How an answer is known."""

    MEASURED = "measured"
    DOCUMENTED = "documented"
    """The framework's own source or manual says so; not tried here."""
    UNTRIED = "untried"
    """Nothing speaks against it, and nobody looked: the load canary decides."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of one scheme on one device; a refusal says what to do instead."""

    standing: Standing
    because: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """A CPU, or a GPU of one compute capability."""

    capability: Capability | None = None

    @classmethod
    def named(cls, text: str) -> "Device":
        """Read `cpu`, `sm89` or `8.9`.

        Raises:
            ConfigError: it is neither.
        """
        if text == "cpu":
            return cls()
        match = re.fullmatch(r"(\d{1,2})\.(\d)", text) or re.fullmatch(r"sm(\d{1,2})(\d)", text)
        if match is None:
            raise ConfigError(f"device {text!r} is unknown; allowed: cpu, or a compute capability such as sm89 or 8.9")
        return cls((int(match[1]), int(match[2])))

    @property
    def label(self) -> str:
        return "cpu" if self.capability is None else "sm{}{}".format(*self.capability)


@dataclass(frozen=True, slots=True)
class Rule:
    """The answer for some schemes on CPUs, or on GPUs whose capability lies in a range, both ends included."""

    schemes: frozenset[Scheme]
    on: Literal["cpu", "gpu"]
    answer: Answer
    least: Capability = LOWEST
    most: Capability = HIGHEST

    def covers(self, scheme: Scheme, device: Device) -> bool:
        if scheme not in self.schemes or (device.capability is None) != (self.on == "cpu"):
            return False
        return device.capability is None or self.least <= device.capability <= self.most


@dataclass(frozen=True, slots=True)
class Framework:
    """One inference framework: what it loads, which versions the facts were found with, and the facts."""

    name: str
    loads: Literal["checkpoint", "engine", "gguf"]
    distributions: tuple[str, ...]
    """Whose installed version counts; the first that is there. Empty: no Python distribution says it."""
    checked: tuple[str, ...]
    """Minor versions, e.g. `0.24`, that the facts were found with."""
    install: str
    rules: tuple[Rule, ...]
    """The first that covers scheme and device answers."""
    otherwise: Answer
    canary: str | None = None
    """Script of `canaries/` that loads what it loads and continues prompts; None where nothing can be asked."""

    def answer(self, scheme: Scheme, device: Device) -> Answer:
        """Return what is known of a scheme on a device."""
        return next((rule.answer for rule in self.rules if rule.covers(scheme, device)), self.otherwise)

    def schemes(self, device: Device) -> tuple[Scheme, ...]:
        """Return what is not refused on a device."""
        return tuple(scheme for scheme in Scheme if self.answer(scheme, device).standing is not Standing.REFUSED)


FRAMEWORKS: Registry[Framework] = Registry("target framework", "model_optimizer.compilation.frameworks")


def scheme_of(format_name: FormatName) -> Scheme:
    """Return the scheme of a weight format, by its name.

    Raises:
        ConfigError: the name follows no known pattern.
    """
    if format_name in _PLAIN:
        return _PLAIN[format_name]
    if (match := _GROUPED.fullmatch(format_name)) is None:
        raise ConfigError(f"weight format {format_name!r} belongs to no scheme; known: {', '.join(_PLAIN)}, int4-g64 and alike")
    return Scheme(f"int{match['bits']}-group{'-asymmetric' if match['asymmetric'] else ''}")


def schemes_of(recipe: WeightRecipe) -> frozenset[Scheme]:
    """Return every scheme that a recipe needs of the framework that loads it."""
    found = {scheme_of(name) for name in recipe.formats}
    symmetric_groups = {it for it in found if it.endswith("-group")}
    if symmetric_groups and recipe.method in SIGNED_METHODS:
        found.add(Scheme.NEGATIVE_SCALES)
    if len(recipe.formats) > 1:
        found.add(Scheme.MIXED)
    return frozenset(found)


def refuse_unsupported(framework: Framework, schemes: Iterable[Scheme], device: Device) -> tuple[str, ...]:
    """Return a sentence for every scheme that was never tried there.

    Raises:
        UnsupportedError: one line with every scheme that does not run, why, and what does.
    """
    answers = {scheme: framework.answer(scheme, device) for scheme in sorted(schemes)}
    if refused := {scheme: it for scheme, it in answers.items() if it.standing is Standing.REFUSED}:
        reasons = "; ".join(f"{scheme}: {it.because}" for scheme, it in refused.items())
        advice = list(dict.fromkeys(it.advice for it in refused.values() if it.advice))
        known = ", ".join(framework.schemes(device)) or "nothing"
        raise UnsupportedError(
            f"{framework.name} on {device.label} does not run {reasons}; it runs {known} there"
            + "".join(f"; {words}" for words in advice)
        )
    untried = {scheme: it for scheme, it in answers.items() if it.standing is Standing.UNTRIED}
    return tuple(f"{framework.name} on {device.label}, {scheme}: {it.because}" for scheme, it in untried.items())
