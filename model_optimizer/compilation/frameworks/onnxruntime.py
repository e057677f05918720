"""ONNX Runtime: MatMulNBits with the checkpoint's own codes."""

from model_optimizer.compilation.support import FRAMEWORKS, GRAPH_SCHEMES, Answer, Framework, Rule, Scheme, Standing

_ROUNDED_INPUTS = frozenset({Scheme.INT8_DYNAMIC, Scheme.INT8_STATIC, Scheme.FP8_DYNAMIC, Scheme.FP8_STATIC})
_ON_H200 = frozenset({Scheme.FLOAT, Scheme.INT8_CHANNEL, Scheme.INT4_GROUP})

FRAMEWORKS.register("onnxruntime")(
    Framework(
        name="onnxruntime",
        loads="engine",
        distributions=("onnxruntime", "onnxruntime-gpu"),
        checked=("1.32",),
        install="pip install onnxruntime==1.32.0 onnx",
        rules=(
            Rule(
                GRAPH_SCHEMES,
                "cpu",
                Answer(Standing.MEASURED, "engines of it pass parity in the tests, onnxruntime 1.32; int3 is held in 4 bits"),
            ),
            Rule(
                _ON_H200,
                "gpu",
                Answer(
                    Standing.MEASURED,
                    "onnxruntime-gpu 1.30 on an H200, compile.onnxruntime_device: cuda: mean KL below 0.0001 nats, greedy tokens "
                    "as transformers' (benchmarks/results/targets_h200.csv)",
                ),
                least=(9, 0),
                most=(9, 0),
            ),
            Rule(
                GRAPH_SCHEMES,
                "gpu",
                Answer(
                    Standing.UNTRIED, "compile.onnxruntime_device: cuda was tried on an H200, with float, int8 and int4 weights"
                ),
            ),
            *(
                Rule(
                    _ROUNDED_INPUTS,
                    on,
                    Answer(
                        Standing.REFUSED,
                        "MatMulNBits has no step for inputs of a checkpoint's own",
                        "take int8-channel (the engine may round inputs itself), or target vllm",
                    ),
                )
                for on in ("cpu", "gpu")
            ),
            *(
                Rule(
                    frozenset({Scheme.INT5_GROUP, Scheme.INT6_GROUP}),
                    on,
                    Answer(Standing.REFUSED, "MatMulNBits holds 2, 4 or 8 bits", "take 4 or 8 bits"),
                )
                for on in ("cpu", "gpu")
            ),
        ),
        otherwise=Answer(Standing.REFUSED, "it reads ONNX", "leave --format gguf out, or target llamacpp"),
        canary="run_onnxruntime.py",
    )
)
