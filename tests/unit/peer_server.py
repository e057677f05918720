"""A test peer: a real HTTP server process that speaks vLLM's completions endpoint, with a rule in place of a model.

Token number n of an answer is `rule(prompt, n)`. It is started as `PROGRAM serve MODEL --port N ...`, as vLLM is, has a child
of its own as vLLM has, and misbehaves where the first token of a prompt says so.
"""

import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REFUSE, BREAK, CRASH, SLOW = 250, 251, 252, 253
"""First tokens of prompts that it answers with 400, breaks off after 3 tokens, dies of after 3 tokens, or takes its time over."""
VERSION = "0.0-test-peer"


def rule(prompt: list[int], number: int) -> int:
    """Return token `number` of the answer to a prompt: a letter of the test tokenizer."""
    return 68 + (sum(prompt) + 7 * number) % 26


class Peer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    arguments: dict[str, str] = {}
    num_open = 0

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, b"")
        elif self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            self._answer(401, b"no key")
        elif self.path == "/version":
            self._answer(200, json.dumps({"version": VERSION}).encode())
        else:
            self._answer(200, json.dumps({"arguments": self.arguments, "num_open": Peer.num_open}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, first = asked["prompt"], asked["prompt"][0]
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}" or first == REFUSE:
            self._answer(400, json.dumps({"error": {"message": "the test peer refuses this"}}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        Peer.num_open += 1
        try:
            for number in range(asked["max_tokens"]):
                if number == 3 and first == BREAK:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if number == 3 and first == CRASH:
                    os._exit(9)
                if first == SLOW:
                    time.sleep(0.02)
                self._token(asked, rule(prompt, number), number == asked["max_tokens"] - 1)
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except OSError:
            self.close_connection = True
        finally:
            Peer.num_open -= 1

    def _token(self, asked: dict[str, object], token: int, last: bool) -> None:
        stopped = token in asked["stop_token_ids"]  # type: ignore[operator]
        choice = {
            "index": 0,
            "text": "",
            "token_ids": [token],
            "logprobs": {
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [-0.25],
                "top_logprobs": [{f"token_id:{token}": -0.25}],
            },
            "finish_reason": "stop" if stopped else "length" if last else None,
            "stop_reason": token if stopped else None,
        }
        self._chunk(b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def write_program(path: Path) -> Path:
    """Write an executable that is this peer."""
    path.write_text(f"#!{sys.executable}\n" + Path(__file__).read_text(encoding="utf-8"))
    path.chmod(0o755)
    return path


def main() -> None:
    _, model, *rest = sys.argv[1:]
    Peer.arguments = {"model": model, **dict(zip(rest[::2], rest[1::2], strict=True))}
    if "FAIL_WITH" in os.environ:
        print("loading\n" + os.environ["FAIL_WITH"], flush=True)
        sys.exit(3)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "child of the test peer"])
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer((Peer.arguments["--host"], int(Peer.arguments["--port"])), Peer)
    server.serve_forever()


if __name__ == "__main__":
    main()
