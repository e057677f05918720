"""The soak flow on a tiny model: hours are cached, a longer soak goes on, another model is refused."""

import shutil
from pathlib import Path

import pytest

from flows.soak import soak
from flows.soak_request import SoakOptions
from model_optimizer.errors import ConfigError

PROFILE = """\
soak: {duration: 2h, segment: 30min, drift_every: 1h, requests_per_segment: 12}
concurrency: 2
traffic: {prompt_tokens: {p50: 8, p95: 20, max: 40}, output_tokens: {p50: 3, p95: 6, max: 8}}
"""


def test_soak_goes_on_where_it_was_and_refuses_a_changed_model(
    prefect_server: None, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.yaml").write_text(PROFILE, encoding="utf-8")
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    options = SoakOptions(target=str(model), profile="short.yaml", control=False, output="out")
    first = soak(options)
    assert (first.soak.equivalent_s, first.soak.num_segments, first.soak.num_sessions) == (7200, 4, 1)
    assert first.level == "provisional" and first.soak.num_failed == 0 and first.not_accelerated
    again = soak(options)  # nothing is left: no process is started, the journal gives the same report
    assert again == first
    longer = soak(options.model_copy(update={"duration": "3h"}))
    assert (longer.soak.num_segments, longer.soak.num_sessions) == (6, 2)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match="other inputs: engine_digest"):
        soak(options)
