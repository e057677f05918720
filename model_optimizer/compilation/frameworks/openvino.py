"""OpenVINO on CPUs: the same graph as ONNX Runtime's, converted."""

from model_optimizer.compilation.support import FRAMEWORKS, GRAPH_SCHEMES, Answer, Framework, Rule, Scheme, Standing

FRAMEWORKS.register("openvino")(
    Framework(
        name="openvino",
        loads="engine",
        distributions=("openvino",),
        checked=("2026.4",),
        install="pip install openvino==2026.4.1",
        rules=(
            Rule(GRAPH_SCHEMES, "cpu", Answer(Standing.MEASURED, "engines of it pass parity in the tests, openvino 2026.4")),
            Rule(
                frozenset(Scheme),
                "gpu",
                Answer(
                    Standing.REFUSED, "OpenVINO computes on CPUs and on Intel's GPUs", "set target.hardware: cpu, or target vllm"
                ),
            ),
            Rule(
                frozenset({Scheme.INT8_DYNAMIC, Scheme.INT8_STATIC, Scheme.FP8_DYNAMIC, Scheme.FP8_STATIC}),
                "cpu",
                Answer(
                    Standing.REFUSED,
                    "the graph has no step for inputs of a checkpoint's own",
                    "take int8-channel (the engine may round inputs itself), or target vllm",
                ),
            ),
            Rule(
                frozenset({Scheme.INT5_GROUP, Scheme.INT6_GROUP}),
                "cpu",
                Answer(Standing.REFUSED, "MatMulNBits holds 2, 4 or 8 bits", "take 4 or 8 bits"),
            ),
        ),
        otherwise=Answer(Standing.REFUSED, "it reads ONNX or its own format", "leave --format gguf out, or target llamacpp"),
        canary="run_openvino.py",
    )
)
