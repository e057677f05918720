"""Reading a profile: right values in, one clear line for every wrong one."""

from pathlib import Path

import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.profile import DeploymentProfile, load_profile

GOOD = """\
name: demo
model: {ref: ./model}
sla:
  concurrency: 2
calibration: {path: text.jsonl}
verify: {golden_sets: [qa]}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_load_profile_fills_defaults(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, GOOD))
    assert (profile.sla.concurrency, profile.sla.accuracy_loss_ratio) == (2, 0.003)
    assert profile.verify.soak.duration == 86400.0
    assert profile.quantization.kl_breaker_nats == 0.15


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("5min", 300), ("24h", 86400), ("1.5m", 90), ("7", 7)])
def test_load_profile_reads_durations(tmp_path: Path, text: str, seconds: float) -> None:
    assert load_profile(write(tmp_path, GOOD), (f"verify.soak.duration={text}",)).verify.soak.duration == seconds


def test_load_profile_accepts_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_profile(path).name == "demo"


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("  concurrency: 2", "  concurency: 2"), 4, ["sla.concurency", "unknown field", "did you mean 'concurrency'"]),
        (("  concurrency: 2", "  concurrency: many"), 4, ["sla.concurrency", "valid integer", "'many'"]),
        (("  concurrency: 2", "  concurrency: 0"), 4, ["greater than or equal to 1", "seen: 0"]),
        (("name: demo\n", ""), 1, ["name", "required"]),
        (("name: demo", "name: Demo Model"), 1, ["name", "'Demo Model'"]),
        (("{ref: ./model}", "{ref: ./model, trust_remote_code: true}"), 2, ["trust_remote_code", "False", "seen: True"]),
        (("{golden_sets: [qa]}", "{golden_sets: []}"), 6, ["verify.golden_sets", "at least 1 item"]),
        (("{golden_sets: [qa]}", "{golden_sets: [qa], soak: {duration: 60 parsecs}}"), 6, ["verify.soak.duration", "60 parsecs"]),
        (("{path: text.jsonl}", "{path: text.jsonl, num_samples: 5000}"), 5, ["less than or equal to 1024", "5000"]),
        (
            ("verify: {golden_sets: [qa]}", "verify: {golden_sets: [qa]}\nscan: {methods: [magic]}"),
            7,
            ["scan.methods.0", "'rtn'"],
        ),
    ],
)
def test_load_profile_names_file_line_value_and_allowed(
    tmp_path: Path, change: tuple[str, str], line: int, words: list[str]
) -> None:
    path = write(tmp_path, GOOD.replace(*change))
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"a: [", "not YAML"), (b"\xff\xfe\x00", "not YAML"), (b"just text", "maps at least"), (b"", "maps at least")],
)
def test_load_profile_refuses_what_is_not_a_mapping(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "demo.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_profile(path)


@pytest.mark.parametrize("override", ["nonsense", "=3", "name.deeper=1", "sla.concurrency=[", "sla.unknown=1"])
def test_load_profile_refuses_wrong_overrides(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        load_profile(write(tmp_path, GOOD), (override,))


def test_schema_describes_every_section() -> None:
    schema = DeploymentProfile.model_json_schema()
    assert set(schema["required"]) == {"name", "model", "calibration", "verify"}
    assert schema["additionalProperties"] is False
