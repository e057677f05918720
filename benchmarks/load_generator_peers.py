"""Other load generators against the same scripted server: wrk, and GuideLLM in an environment of its own.

A peer that is not there, or that fails, gives no figure and the reason; it is never a win.
"""

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PATH = "/v1/completions"
_WRK_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '%s'
done = function(summary, latency, requests)
  io.write(string.format('RESULT {"requests": %%d, "seconds": %%f, "failed": %%d, "p50": %%f, "p90": %%f, "p95": %%f, ' ..
    '"p99": %%f, "p99.9": %%f}\\n', summary.requests, summary.duration / 1e6,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.status + summary.errors.timeout,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(95) / 1e3,
    latency:percentile(99) / 1e3, latency:percentile(99.9) / 1e3))
end
"""


@dataclass(frozen=True)
class PeerRun:
    """What a peer said of one run."""

    requests_per_s: float
    percentiles_ms: dict[float, float]
    """End to end, by ratio, as the peer's headline gives it."""
    scheduled_ms: dict[float, float]
    """The same from the intended start, where the peer tells it beside; else empty."""


class PeerFailed(Exception):
    """Why there is no figure."""


def run_wrk(url: str, body: str, *, connections: int, seconds: float, prefix: tuple[str, ...] = ()) -> PeerRun:
    """Run wrk, a closed loop on one thread.

    Raises:
        PeerFailed: it is not installed, or did not end well.
    """
    if shutil.which("wrk") is None:
        raise PeerFailed("no `wrk` on the path; Debian has it as a package")
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_WRK_SCRIPT % body)
        script.flush()
        command = [*prefix, "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "60s", "-s", script.name, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if done.returncode or line is None:
        raise PeerFailed(f"wrk ended with {done.returncode}: {(done.stderr or done.stdout)[-200:]}")
    found = json.loads(line.removeprefix("RESULT "))
    if found["failed"]:
        raise PeerFailed(f"wrk counts {found['failed']} failed requests")
    ratios = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
    return PeerRun(found["requests"] / found["seconds"], {ratio: found[name] for name, ratio in ratios.items()}, {})


def run_guidellm(peers: Path, url: str, profile: str, *, seconds: float, max_tokens: int) -> PeerRun:
    """Run GuideLLM with one profile, e.g. `kind=throughput` or `kind=poisson,rate=200`; it spreads over processes of its own.

    Raises:
        PeerFailed: it is not installed, or did not end well.
    """
    program = peers / "guidellm" / "bin" / "guidellm"
    if not program.is_file():
        raise PeerFailed(f"not installed: no {program}")
    with tempfile.TemporaryDirectory() as folder:
        prompts, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        rows = [json.dumps({"prompt": f"word {number}", "output_tokens_count": max_tokens}) for number in range(1000)]
        prompts.write_text("\n".join(rows) + "\n")
        settings = {
            "--backend": f"kind=openai_http,target={url},request_format={PATH},stream=false",
            "--profile": profile,
            "--constraint": f"kind=max_duration,seconds={seconds:g}",
            "--data": f"kind=json_file,path={prompts}",
            "--output": f"kind=json,path={report}",
        }
        command = [str(program), "run", "--disable-console", *(part for pair in settings.items() for part in pair)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        limit_s = seconds + 240
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment, cwd=folder)
        if done.returncode or not report.is_file():
            raise PeerFailed(f"guidellm ended with {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-300:]}")
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    told = {name: metrics[name]["successful"] for name in ("request_latency", "request_scheduled_latency") if metrics[name]}
    if not told["request_latency"]["count"]:
        raise PeerFailed("guidellm finished no request")
    names = {0.5: "p50", 0.9: "p90", 0.95: "p95", 0.99: "p99", 0.999: "p999"}
    found = {name: {ratio: 1e3 * it["percentiles"][key] for ratio, key in names.items()} for name, it in told.items()}
    return PeerRun(
        requests_per_s=metrics["requests_per_second"]["successful"]["mean"],
        percentiles_ms=found["request_latency"],
        scheduled_ms=found.get("request_scheduled_latency", {}),
    )
