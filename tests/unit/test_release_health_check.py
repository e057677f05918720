"""health_check.sh against servers that speak like each of those it knows, with curl alone and with python3 alone."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from model_optimizer.paths import PACKAGE_ROOT
from model_optimizer.release.endpoints import OURS, SERVERS, server_of
from model_optimizer.store import canonical_json

SCRIPT = PACKAGE_ROOT / "release" / "data" / "health_check.sh"
TOOLS = ("sh", "dirname", "grep", "sed", "awk", "tr")
TEXTS = {
    "The sky is": " blue.",
    'say "text": now\n': 'a "quoted" },{"prompt":"x" \\ line\n\tend',
    "Où?": "là-bas 天空 \u0003�",
}
COMPLETIONS = {"model-optimizer": "/v1/completions", "vllm": "/v1/completions", "llamacpp": "/v1/completions"}
COMPLETIONS |= {"openvino": "/v3/completions", "triton": "/v2/models/chat-v1/generate"}


class Peer(ThreadingHTTPServer):
    """Answers as one server does, at its paths only."""

    name: str
    key: str | None
    ascii_only: bool
    texts: dict[str, str]
    asked: list[dict[str, object]]


class Answers(BaseHTTPRequestHandler):
    server: Peer

    def do_GET(self) -> None:
        self._say(200 if self.path == SERVERS[self.server.name].ready else 404, {})

    def do_POST(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self._say(401, {"error": {"message": "no key"}})
            return
        if self.path != COMPLETIONS[self.server.name]:
            self._say(404, {})
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.server.name == "triton":
            self._say(200, {"model_name": "chat-v1", "model_version": "1", "text_output": self.server.texts[body["text_input"]]})
        else:
            choice = {"index": 0, "text": self.server.texts[body["prompt"]], "logprobs": None, "finish_reason": "length"}
            self._say(200, {"id": "1", "object": "text_completion", "choices": [choice], "usage": {"total_tokens": 4}})

    def _say(self, status: int, document: dict[str, object]) -> None:
        content = json.dumps(document, ensure_ascii=self.server.ascii_only, indent=1).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        pass


@contextmanager
def peer(name: str, *, key: str | None = None, ascii_only: bool = False) -> Iterator[Peer]:
    served = Peer(("127.0.0.1", 0), Answers)
    served.name, served.key, served.ascii_only, served.texts, served.asked = name, key, ascii_only, dict(TEXTS), []
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield served
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """What of a bundle the script reads: itself and data/sample.json."""
    place = tmp_path / "chat-v1"
    (place / "data").mkdir(parents=True)
    values = {"DEVICE_KIND": "cpu", "INSTRUCTION_SETS": "", "SERVER": "model-optimizer", "MODEL_NAME": "chat-v1"}
    text = SCRIPT.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    (place / "health_check.sh").write_text(text)
    samples = [{"prompt": prompt, "prompt_tokens": [1], "text": answer, "tokens": [5, 6, 7]} for prompt, answer in TEXTS.items()]
    (place / "data" / "sample.json").write_bytes(canonical_json({"decoding": "greedy", "samples": samples}))
    return place


def only(folder: Path, *programs: str) -> Path:
    """A folder for PATH that holds these programs and what every POSIX system has."""
    place = folder / "-".join(("bin", *programs))
    place.mkdir()
    for name in (*TOOLS, *programs):
        found = str(Path(sys.executable).resolve()) if name == "python3" else shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not installed")
        (place / name).symlink_to(found)
    return place


def check(bundle: Path, *arguments: str, path: Path | None = None, **variables: str) -> tuple[int, str]:
    environment = {"PATH": str(path) if path else os.environ["PATH"], "LC_ALL": "C.UTF-8", **variables}
    command = [shutil.which("sh"), bundle / "health_check.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_health_check_knows_the_endpoints_of_each_server(bundle: Path, name: str) -> None:
    with peer(name) as served:
        url = f"http://127.0.0.1:{served.server_port}"
        code, said = check(bundle, "--server", name, url + "/")
    assert (code, said) == (0, f"device: ok (cpu)\nendpoint: ok ({url}{SERVERS[name].ready})\noutput: ok (3 samples)\n")
    prompts = [body["text_input" if name == "triton" else "prompt"] for body in served.asked]
    assert prompts == list(TEXTS), "what a prompt holds arrives as it is"
    if name == "triton":
        assert served.asked[0]["parameters"] == {"max_tokens": 3, "temperature": 0, "exclude_input_in_output": True}
    else:
        assert {name: value for name, value in served.asked[0].items() if name != "prompt"} == {
            "model": "chat-v1",
            "max_tokens": 3,
            "temperature": 0,
        }


@pytest.mark.parametrize("program", ["curl", "python3"])
def test_health_check_needs_only_one_of_curl_and_python3(bundle: Path, tmp_path: Path, program: str) -> None:
    path = only(tmp_path, program)
    with peer("vllm", key="secret") as served:
        url = f"http://127.0.0.1:{served.server_port}"
        assert check(bundle, "--server", "vllm", url, path=path, MODEL_API_KEY="secret")[0] == 0
        code, said = check(bundle, "--server", "vllm", url, path=path, MODEL_API_KEY="other")
        assert code == 12 and "output: sample 1 was not answered" in said and "401" in said
        served.key = None
        served.texts["The sky is"] = " green."
        code, said = check(bundle, "--server", "vllm", url, path=path)
        assert code == 12 and said.endswith('output: sample 1 gave " green.", expected " blue."\n')
    assert check(bundle, url, path=path)[0] == 11


def test_health_check_without_either_says_so(bundle: Path, tmp_path: Path) -> None:
    code, said = check(bundle, "http://127.0.0.1:9", path=only(tmp_path))
    assert code == 11 and "neither curl nor python3 is here" in said


def test_health_check_compares_what_is_said_and_not_how_it_is_written(bundle: Path, tmp_path: Path) -> None:
    path = only(tmp_path, "curl", "python3")
    with peer("llamacpp", ascii_only=True) as served:
        assert check(bundle, "--server", "llamacpp", f"http://127.0.0.1:{served.server_port}", path=path)[0] == 0


def test_health_check_takes_server_model_and_address_from_the_environment(bundle: Path) -> None:
    with peer("triton") as served:
        variables = {"MODEL_SERVER": "triton", "MODEL_URL": f"http://127.0.0.1:{served.server_port}"}
        assert check(bundle, **variables)[0] == 0
        code, said = check(bundle, "--model", "other", **variables)
        assert code == 12 and "was not answered" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--server", "torchserve"), "unknown server 'torchserve'; known: model-optimizer, vllm, llamacpp, triton, openvino"),
        (("--server",), "usage: health_check.sh"),
        (("--fast",), "usage: health_check.sh"),
        (("a", "b"), "usage: health_check.sh"),
        (("--model", 'x","y":"'), "holds a character that is none of"),
    ],
)
def test_health_check_ends_with_2_where_it_is_called_wrongly(bundle: Path, arguments: tuple[str, ...], words: str) -> None:
    code, said = check(bundle, *arguments)
    assert code == 2 and words in said


def test_health_check_ends_with_12_where_the_samples_cannot_be_read(bundle: Path) -> None:
    (bundle / "data" / "sample.json").write_text('{"samples":[{"prompt":"a","text":7}]}')
    with peer("vllm") as served:
        code, said = check(bundle, "--server", "vllm", f"http://127.0.0.1:{served.server_port}")
    assert code == 12 and "output: data/sample.json cannot be read at sample 1" in said


@pytest.mark.parametrize(
    ("runtime", "server"),
    [("torch", OURS.name), ("onnxruntime", OURS.name), ("openvino", OURS.name), ("vllm", "vllm"), ("llamacpp", "llamacpp")],
)
def test_server_of_returns_who_serves_a_bundle_of_a_runtime(runtime: str, server: str) -> None:
    assert server_of(runtime).name == server
