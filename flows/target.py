"""What the target framework of a profile means for a run; refused here, before anything is started."""

from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.compilation.support import Device, Scheme, schemes_of
from model_optimizer.compilation.target_framework import Loader, TargetFramework
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.profile import DeploymentProfile
from model_optimizer.runtimes.registry import RUNTIMES

FULL_BITS, INT8_BITS = 32, 8
INT4_TRUE_BITS = 4.5
"""From here on a mixed budget is shared by int4 and int8 alone: 4 bits, and a scale of 16 for at least 32 weights."""
_GROUPS = {4: Scheme.INT4_GROUP, 3: Scheme.INT3_GROUP, 2: Scheme.INT2_GROUP}


def aim(profile: DeploymentProfile) -> tuple[DeploymentProfile, Loader | None]:
    """Return the profile with the runtimes that its target framework leaves, and that framework.

    Raises:
        ConfigError: the framework or its interpreter is unknown, or `scan.runtimes` leaves it out.
        UnsupportedError: it is not installed, has another version, or does not run a scheme of the scan.
    """
    target = profile.target
    if target.framework is None:
        if target.python is not None:
            raise ConfigError(f"target.python {target.python} has no framework to run; state one, e.g. target.framework: vllm")
        return profile, None
    wanted = TargetFramework.read(target.framework, target.python)
    if wanted.framework.loads == "gguf":
        raise UnsupportedError(
            f"target.framework {wanted.label}: a run releases safetensors and engines; make a GGUF file with "
            "`model-optimizer quantize --format gguf:q4_k_m`"
        )
    loader = Loader.of(wanted, schemes_of_profile(profile), device_of(target.hardware), target.canary_timeout_s)
    if wanted.framework.loads != "engine":
        return profile, loader
    if "runtimes" in profile.scan.model_fields_set and profile.scan.runtimes != (wanted.name,):
        raise ConfigError(
            f"target.framework {wanted.label} runs engines of its own and scan.runtimes is {list(profile.scan.runtimes)}; "
            f"leave scan.runtimes out, or state [{wanted.name}]"
        )
    refuse_unopened(wanted.name)
    return profile.model_copy(update={"scan": profile.scan.model_copy(update={"runtimes": (wanted.name,)})}), loader


def refuse_unopened(runtime: str) -> None:
    """Refuse a framework whose engines can be built and not opened here.

    Raises:
        UnsupportedError: says why.
    """
    support = RUNTIMES.get(runtime).supports(Strategy(weights=WeightRecipe(), runtime=runtime))
    if not support.supported:
        raise UnsupportedError(f"target.framework {runtime}: {support.reason}")


def device_of(hardware: str) -> Device:
    """Return the device that `target.hardware` stands for; `auto` is this machine's GPU where it has one."""
    from model_optimizer.hardware.catalogue import read_entry
    from model_optimizer.hardware.cuda import nvml_facts

    if hardware == "cpu":
        return Device()
    if hardware != "auto":
        return Device.named(read_entry(hardware).compute_capability)
    present = [gpu.compute_capability for gpu in nvml_facts() if gpu.compute_capability is not None]
    return Device.named(present[0]) if present else Device()


def schemes_of_profile(profile: DeploymentProfile) -> frozenset[Scheme]:
    """Return every scheme that a candidate of the scan may need."""
    pinned = profile.quantization.default_precision
    names = {override.precision for override in profile.quantization.layer_overrides}
    methods = tuple(dict.fromkeys(profile.scan.methods))
    if pinned != "auto":
        found = schemes_of_formats((pinned,), methods)
    else:
        found = frozenset[Scheme]().union(*(schemes_of_bits(bits, methods) for bits in profile.scan.bits))
    for name in names:
        found |= schemes_of_formats((name,), methods) | {Scheme.MIXED}
    return found


def schemes_of_formats(formats: tuple[str, ...], methods: tuple[str, ...]) -> frozenset[Scheme]:
    """Return the schemes of a uniform recipe by every method."""
    if formats == ("float32",):
        return frozenset({Scheme.FLOAT})
    recipes = [WeightRecipe.model_validate({"method": method, "formats": formats}) for method in methods]
    return frozenset[Scheme]().union(*(schemes_of(recipe) for recipe in recipes))


def schemes_of_bits(bits: float, methods: tuple[str, ...]) -> frozenset[Scheme]:
    """Return the schemes of `scan.bits`; which groups divide the layers makes no difference to a framework."""
    if bits == FULL_BITS:
        return frozenset({Scheme.FLOAT})
    if bits == INT8_BITS:
        return frozenset({Scheme.INT8_CHANNEL})
    if bits in _GROUPS:
        return schemes_of_formats((f"int{bits:g}-g64",), methods)
    names = ("int4-g64",) if bits >= INT4_TRUE_BITS else ("int2-g64", "int3-g64", "int4-g64")
    found = frozenset[Scheme]().union(*(schemes_of_formats((name,), methods) for name in names))
    return found | {Scheme.INT8_CHANNEL, Scheme.MIXED}
