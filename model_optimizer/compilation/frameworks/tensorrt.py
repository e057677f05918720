"""TensorRT and TensorRT-RTX: DequantizeLinear in a strongly typed graph.

Facts of TensorRT-RTX 1.7.1 on machines without a GPU: engines were built, none was run.
"""

from model_optimizer.compilation.support import FRAMEWORKS, Answer, Framework, Rule, Scheme, Standing

_BUILT = frozenset(
    {Scheme.FLOAT, Scheme.INT8_CHANNEL, Scheme.INT8_STATIC, Scheme.INT4_GROUP, Scheme.INT3_GROUP, Scheme.INT2_GROUP, Scheme.MIXED}
)
_HOPPER = Answer(
    Standing.REFUSED,
    "TensorRT-RTX does not run on compute capability 9.0 and 10.0, and TensorRT 10 and 11 were never had to try",
    "install NVIDIA's own `tensorrt` package and build there, or target vllm or onnxruntime",
)

FRAMEWORKS.register("tensorrt")(
    Framework(
        name="tensorrt",
        loads="engine",
        distributions=("tensorrt", "tensorrt-rtx"),
        checked=("1.7",),
        install="pip install tensorrt-rtx",
        rules=(
            Rule(frozenset(Scheme), "gpu", _HOPPER, least=(9, 0), most=(10, 9)),
            Rule(
                _BUILT,
                "gpu",
                Answer(Standing.MEASURED, "TensorRT-RTX 1.7 builds engines for it in the tests, without a GPU"),
                least=(8, 9),
                most=(8, 9),
            ),
            Rule(
                _BUILT,
                "gpu",
                Answer(Standing.MEASURED, "TensorRT-RTX 1.7 builds engines for it in the tests, without a GPU"),
                least=(12, 0),
                most=(12, 0),
            ),
            Rule(
                _BUILT, "gpu", Answer(Standing.DOCUMENTED, "TensorRT-RTX 1.7 lists sm75 to sm89, sm120 and sm121"), least=(7, 5)
            ),
            Rule(
                frozenset({Scheme.NEGATIVE_SCALES}),
                "gpu",
                Answer(
                    Standing.MEASURED, "blocks of int4 codes may have them; int8 codes may not (tensorrt_rtx 1.7, its parser)"
                ),
                least=(7, 5),
            ),
            Rule(
                frozenset({Scheme.INT4_GROUP_ASYMMETRIC, Scheme.FP8_DYNAMIC, Scheme.FP8_STATIC}),
                "gpu",
                Answer(Standing.REFUSED, "only symmetric integers go into this graph", "take int4-g64 or int8-channel"),
            ),
            Rule(
                frozenset({Scheme.INT8_DYNAMIC}),
                "gpu",
                Answer(Standing.REFUSED, "its steps are found per token", "freeze them: w8a8-int8-static"),
            ),
            Rule(
                frozenset({Scheme.INT5_GROUP, Scheme.INT6_GROUP}),
                "gpu",
                Answer(Standing.REFUSED, "blocks of wider codes than 4 bits were never built", "take int4-g64 or int8-channel"),
            ),
            Rule(
                frozenset(Scheme),
                "cpu",
                Answer(Standing.REFUSED, "it runs on NVIDIA GPUs", "target onnxruntime, openvino or torch"),
            ),
        ),
        otherwise=Answer(Standing.REFUSED, "it reads ONNX, on GPUs of compute capability 7.5 and newer", "target onnxruntime"),
    )
)
