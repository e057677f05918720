"""What the server counts, in Prometheus' text form. Labels never hold prompts, names of clients or request numbers."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "model_optimizer_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server; a registry of their own, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry

        def histogram(name: str, words: str) -> Histogram:
            return Histogram(_PREFIX + name, words, buckets=_SECONDS, registry=registry)

        def gauge(name: str, words: str) -> Gauge:
            return Gauge(_PREFIX + name, words, registry=registry)

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, words, labels, registry=registry)

        self.requests = counter(
            "requests", "Requests to /v1 by endpoint and HTTP status; 499: the client left", "endpoint", "status"
        )
        self.finished = counter("answers", "Answers by how they ended", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were accepted")
        self.generated_tokens = counter("generated_tokens", "Tokens generated")
        self.request_seconds = histogram("request_seconds", "From arrival to the last token")
        self.first_token_seconds = histogram("time_to_first_token_seconds", "From arrival to the first token")
        self.inter_token_seconds = histogram("inter_token_seconds", "Between two tokens of one answer")
        self.open_requests = gauge("open_requests", "Requests accepted and not yet answered, running and waiting")
        self.running = gauge("requests_running", "Of these, requests that have got a token")
        self.waiting = gauge("requests_waiting", "Of these, requests that wait for their first token")
        self.engine_up = gauge("engine_up", "1 while an engine is loaded and answering")
        self.engine_restarts = gauge("engine_restarts", "How often the current model's engine was replaced after it ended")
        self.kv_bytes = gauge("kv_used_bytes", "Keys and values of requests that run now")
        self.kv_pool_bytes = gauge("kv_pool_bytes", "Set aside for keys and values by the plan")
        self.kv_held_bytes = gauge("kv_held_bytes", "Held for keys and values now, used or not; 0 where nothing is set aside")
        self.process_bytes = gauge("engine_process_bytes", "Resident size of the engine's process")
        self.swaps = counter("swaps", "Moves of a deployment root's current release that were followed or refused", "result")
        self.model = Gauge(
            _PREFIX + "model_info", "Always 1", ("name", "runtime", "quantization", "optimizer"), registry=registry
        )

    def text(self) -> bytes:
        """Return everything in the text exposition format."""
        return generate_latest(self._registry)
