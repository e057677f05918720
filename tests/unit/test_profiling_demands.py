"""Limits that contradict each other or the model: found from headers alone."""

import json
import shutil
from pathlib import Path

import pytest

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.headers import read_headers
from model_optimizer.profiling.demands import GIB, refuse_impossible, refuse_unmatched, smallest_weight_bytes
from model_optimizer.spec import Sla

LINEAR = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
REST = 260 * 64 + 5 * 64


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_smallest_weight_bytes_counts_linears_at_the_fewest_bits(tiny_llama: Path, bits: int) -> None:
    assert smallest_weight_bytes(read_headers(tiny_llama), bits) == LINEAR * bits // 8 + 2 * REST


def test_refuse_impossible_refuses_memory_below_the_weights_and_nothing_above(tiny_llama: Path) -> None:
    need = LINEAR + 2 * REST
    refuse_impossible(Sla(max_model_len=512, memory_gib=need / GIB), 8, tiny_llama)
    with pytest.raises(
        UnsupportedError, match=r"sla\.memory_gib 0\.0001.* is infeasible: the weights alone take .* 8 bits"
    ) as caught:
        refuse_impossible(Sla(max_model_len=512, memory_gib=(need - 1) / GIB), 8, tiny_llama)
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    refuse_impossible(Sla(max_model_len=512, memory_gib=(need - 1) / GIB), 4, tiny_llama)


def test_refuse_impossible_refuses_more_positions_than_the_model_knows(tiny_llama: Path, tmp_path: Path) -> None:
    refuse_impossible(Sla(max_model_len=512), 8, tiny_llama)
    with pytest.raises(ConfigError, match=r"sla\.max_model_len 513 exceeds the 512 positions"):
        refuse_impossible(Sla(max_model_len=513), 8, tiny_llama)
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    refuse_impossible(Sla(max_model_len=10**6), 8, model)  # nothing stated, nothing to contradict


def test_refuse_unmatched_takes_whole_parts_of_names(tiny_llama: Path) -> None:
    refuse_unmatched(("q_proj", "layers.1", "mlp.up_proj", "lm_head"), tiny_llama)
    for pattern in ("proj", "layers.2", "up"):
        with pytest.raises(ConfigError, match=f"'{pattern}' matches no layer"):
            refuse_unmatched((pattern,), tiny_llama)
