"""What is sound must pass the checks before a run: quickly, without torch, whatever the encoding or the place."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import spoiling as to
from entry import Command
from tiny import write_project

from flows.prepare import read_request
from flows.surroundings import check_surroundings
from model_optimizer.errors import ConfigError
from model_optimizer.paths import REPOSITORY_ROOT

ODD = Path("with space") / "größe 模型 #1 100% {x}" / ("long" * 30) / ("path" * 25)


@pytest.fixture
def project(tmp_path: Path, tiny_llama: Path) -> Path:
    shutil.copytree(tiny_llama, tmp_path / "model")
    write_project(tmp_path / "project", tmp_path / "model")
    return tmp_path / "project"


def test_read_request_loads_no_torch(tmp_path: Path, project: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom flows.prepare import read_request\n"
        "from flows.surroundings import check_surroundings\n"
        "check_surroundings(read_request(Path(sys.argv[1])))\n"
        "print(sorted({'torch', 'transformers', 'prefect', 'mlflow', 'scipy', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(project / "tiny.yaml")], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_read_request_counts_the_parameters(project: Path) -> None:
    assert read_request(project / "tiny.yaml").num_parameters == 260 * 64 + 5 * 64 + 2 * (
        2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
    )


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_read_request_accepts_byte_order_marks_and_any_line_end_everywhere(project: Path, mark: bytes, newline: bytes) -> None:
    for name in ("tiny.yaml", "calibration.jsonl", "words/card.yaml", "words/items.jsonl"):
        path = project / name
        path.write_bytes(mark + path.read_bytes().replace(b"\n", newline))
    request = read_request(project / "tiny.yaml")
    assert (request.profile.name, request.profile.verify.golden_sets) == ("tiny", ("words",))


def test_read_request_accepts_some_bad_records_among_good_ones(project: Path) -> None:
    with (project / "calibration.jsonl").open("a") as stream:
        stream.write('{"text": 5}\n[1]\n{"messages": [{"role": "user", "content": "seven quiet lamps"}]}\n')
    read_request(project / "tiny.yaml")


def test_read_request_accepts_a_sharded_model(project: Path) -> None:
    to.sharded(to.nothing)(project.parent)
    assert read_request(project / "tiny.yaml").num_parameters > 0


def test_plan_and_quantize_work_in_a_folder_with_an_odd_long_name(tmp_path: Path, tiny_llama: Path, command: Command) -> None:
    folder = tmp_path / ODD
    assert len(str(ODD)) > 200
    shutil.copytree(tiny_llama, folder / "my model é")
    write_project(folder / "p", folder / "my model é")
    planned = command("plan", "tiny.yaml", "--json", cwd=folder / "p")
    assert planned.code == 0, planned.err
    assert [row["state"][:6] for row in json.loads(planned.out)["stages"]] == ["to run"] * 7
    arguments = ("--model_path", "../my model é", "--calibration_data", "calibration.jsonl", "--output_path", "out ü", "--json")
    done = command("quantize", *arguments, cwd=folder / "p")
    assert done.code == 0, done.err
    assert json.loads(done.out)["quantized_weights_ratio"] == 1.0
    assert (folder / "p" / "out ü" / "model.safetensors").stat().st_size > 100_000


class _Answer(BaseHTTPRequestHandler):
    """A server that answers every request with one status."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 401 if self.path.startswith("/guarded") else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_check_surroundings_tells_a_prefect_server_from_another(
    project: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    request = read_request(project / "tiny.yaml")
    for path in ("/api", "/api/", "/guarded"):  # one that wants a name is there all the same
        monkeypatch.setenv("PREFECT_API_URL", server + path)
        check_surroundings(request)
    monkeypatch.setenv("PREFECT_API_URL", server)
    with pytest.raises(ConfigError, match="/health answers 404, so no Prefect API is there"):
        check_surroundings(request)


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:9",
        "https://mlflow.example",
        "sqlite:///mlflow.db",
        "postgresql+psycopg2://u@h/db",
        "databricks",
        "./mlruns",
        "file:///tmp/mlruns",
        "/tmp/mlruns",
    ],
)
def test_check_surroundings_accepts_every_form_of_a_tracking_address(
    project: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    check_surroundings(read_request(project / "tiny.yaml"))
    assert not (project / ".model-optimizer").exists()


def test_shipped_profiles_pass() -> None:
    profiles = sorted((REPOSITORY_ROOT / "profiles").glob("*.yaml"))
    assert [read_request(path).profile.name for path in profiles] == [path.stem for path in profiles]
