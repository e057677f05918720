"""llama.cpp: reads GGUF, and nothing else."""

from model_optimizer.compilation.support import FRAMEWORKS, Answer, Framework, Rule, Scheme, Standing

FRAMEWORKS.register("llamacpp")(
    Framework(
        name="llamacpp",
        loads="gguf",
        distributions=(),
        checked=(),
        install="a build of llama.cpp with `llama-server`",
        rules=(
            Rule(
                frozenset({Scheme.GGUF}),
                "cpu",
                Answer(Standing.MEASURED, "files of every recipe are read back by llama.cpp and answer in its server"),
            ),
            Rule(frozenset({Scheme.GGUF}), "gpu", Answer(Standing.UNTRIED, "llama.cpp has CUDA kernels; none was run here")),
        ),
        otherwise=Answer(
            Standing.REFUSED, "it reads GGUF files alone", "make one with `model-optimizer quantize --format gguf:q4_k_m`"
        ),
    )
)
