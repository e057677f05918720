"""Which servers answer for a bundle, and where they say that they live, are ready, and complete text.

"Triton" here is the Inference Server. `health_check.sh` holds the same facts in its own language; a test compares them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Server:
    """One server's endpoints; ports are its own defaults."""

    name: str
    ready: str
    """Answers 200 when requests are taken."""
    live: str
    """Answers 200 while the process works, loading included where the server tells the two apart."""
    port: int


OURS = Server("model-optimizer", ready="/health", live="/v2/health/live", port=8000)
SERVERS = {
    server.name: server
    for server in (
        OURS,
        # Source: vllm serve, `/health` of its OpenAI server (0.32)
        Server("vllm", ready="/health", live="/health", port=8000),
        # Source: llama-server's README: 503 while it loads, 200 when it is ready
        Server("llamacpp", ready="/health", live="/health", port=8080),
        # Source: KServe's Open Inference Protocol, which both speak
        Server("triton", ready="/v2/health/ready", live="/v2/health/live", port=8000),
        Server("openvino", ready="/v2/health/ready", live="/v2/health/live", port=8000),
    )
}
"""By name."""
_OWN_SERVERS = {"vllm": "vllm", "llamacpp": "llamacpp"}
"""Runtimes that bring a server; every other engine is opened by ours."""


def server_of(runtime: str) -> Server:
    """Return the server that a bundle of this runtime is served by where nothing else is said."""
    return SERVERS[_OWN_SERVERS.get(runtime, OURS.name)]
