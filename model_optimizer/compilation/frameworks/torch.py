"""This project's own runtime on PyTorch: unpacks every scheme at load."""

from model_optimizer.compilation.support import FRAMEWORKS, Answer, Framework, Rule, Scheme, Standing

_CHECKPOINTS = frozenset(Scheme) - {Scheme.GGUF}

FRAMEWORKS.register("torch")(
    Framework(
        name="torch",
        loads="engine",
        distributions=("torch",),
        checked=("2.11", "2.13"),
        install="pip install 'torch>=2.10,<2.14'",
        rules=(
            Rule(
                _CHECKPOINTS,
                "cpu",
                Answer(
                    Standing.MEASURED, "weights are unpacked to float32; every format is held against its checkpoint in tests"
                ),
            ),
            Rule(
                _CHECKPOINTS,
                "gpu",
                Answer(Standing.UNTRIED, "torch computes what was unpacked; no figure of a GPU is committed"),
            ),
        ),
        otherwise=Answer(Standing.REFUSED, "it reads safetensors", "leave --format gguf out, or target llamacpp"),
    )
)
