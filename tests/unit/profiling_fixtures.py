"""A device and a model with round numbers, so that expectations can be computed by hand."""

from model_optimizer.artifacts.target import DeviceFacts, KvLayer, ModelFacts

MODEL = ModelFacts(
    architecture="A", model_type="llama", num_parameters=1_300_000, num_linear_parameters=800_000, num_layers=2, hidden_size=100,
    intermediate_size=400, num_heads=4, num_kv_heads=2, head_dim=25, vocab_size=2000, max_position=512, tied_head=True,
    dtype="float32", parameters_by_part={}, bytes_by_part={}, flop_per_token=2_000_000, flop_per_token_per_context=800,
    kv=(KvLayer(layer_type="full_attention", num_layers=2, bytes_per_token=800),),
)  # fmt: skip
CPU = DeviceFacts(
    kind="cpu", name="c", num_cores=2, instruction_sets=("avx2",), cache_bytes={"l2": 1000, "l3": 100_000}, memory_bytes=2**34,
    memory_free_bytes=2**33, copy_bytes_per_s=8e9, read_bytes_per_s=1e9, read_cached_bytes_per_s=4e9, matmul_flop_per_s=1e11,
)  # fmt: skip
