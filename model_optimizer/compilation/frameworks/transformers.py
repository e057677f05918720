"""transformers with compressed-tensors: unpacks a checkpoint's codes to floats, on any device of torch."""

from model_optimizer.compilation.support import FRAMEWORKS, Answer, Framework, Rule, Scheme, Standing

_TRIED_ON_H200 = frozenset(
    {
        Scheme.FLOAT,
        Scheme.INT8_CHANNEL,
        Scheme.INT8_DYNAMIC,
        Scheme.FP8_DYNAMIC,
        Scheme.INT4_GROUP,
        Scheme.MIXED,
    }
)
_CHECKPOINTS = frozenset(Scheme) - {Scheme.GGUF}
_SAME_CODE = "transformers runs the same torch code on every GPU; tried on sm90 alone"

FRAMEWORKS.register("transformers")(
    Framework(
        name="transformers",
        loads="checkpoint",
        distributions=("transformers",),
        checked=("5.17",),
        install="pip install transformers==5.17.0 compressed-tensors==0.19.0",
        rules=(
            Rule(_CHECKPOINTS, "cpu", Answer(Standing.MEASURED, "every format loads in the tests with transformers 5.17")),
            Rule(
                _TRIED_ON_H200,
                "gpu",
                Answer(
                    Standing.MEASURED, "H200, transformers 5.17, compressed-tensors 0.19 (benchmarks/results/targets_h200.csv)"
                ),
                least=(9, 0),
                most=(9, 0),
            ),
            Rule(_CHECKPOINTS, "gpu", Answer(Standing.UNTRIED, _SAME_CODE)),
        ),
        otherwise=Answer(Standing.REFUSED, "GGUF is unpacked at load there", "leave --format gguf out, or target llamacpp"),
        canary="run_transformers.py",
    )
)
