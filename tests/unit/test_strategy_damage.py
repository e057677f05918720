"""KL and flips on real runtimes of tiny models, against softmax arithmetic done here; resumed where the journal ends."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.journal import Journal
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.protocols import LogitsRuntime, Quiet
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.strategy.damage import Damage, Open, measure_damage, windows

PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=512, max_batch=2, max_model_len=256)
TEXTS = (tuple(range(4, 44)), tuple(range(60, 80)))


def opener(directory: Path) -> Open:
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch"))
    return lambda: RUNTIMES.get("torch").open(engine, directory, PLAN)


def damage_in(directory: Path) -> Journal[Damage]:
    return Journal(directory / "damage.jsonl", "k", Damage)


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("other"), seed=1)


def log_probs(directory: Path, text: tuple[int, ...]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text])).logits[0].double().log_softmax(-1)


def test_measure_damage_is_kl_of_the_softmax_and_counts_flips(tiny_llama: Path, other_llama: Path, tmp_path: Path) -> None:
    engines = {"same": opener(tiny_llama), "other": opener(other_llama)}
    found = measure_damage(engines, opener(tiny_llama), TEXTS, damage_in(tmp_path), Quiet())
    assert found["same"].kl_nats == (0.0, 0.0) and found["same"].num_flips == 0
    expected, flips = [], 0
    for text in TEXTS:
        p, q = log_probs(tiny_llama, text), log_probs(other_llama, text)
        expected.append(float((p.exp() * (p - q)).sum(-1).mean()))
        flips += int((p.argmax(-1) != q.argmax(-1)).sum())
    assert found["other"].kl_nats == pytest.approx(expected, rel=1e-4)
    assert (found["other"].num_flips, found["other"].window_tokens) == (flips, (40, 20))
    assert np.mean(found["other"].weighted_kl_nats) == pytest.approx((expected[0] * 40 + expected[1] * 20) / 60, rel=1e-4)
    # 2 layers of 64 x (64 + 32 + 32 + 64 + 3 x 128) and 2 norms, the tied embedding, the last norm; RoPE tables
    parameters = 2 * (64 * (64 + 32 + 32 + 64 + 384) + 128) + 260 * 64 + 64
    assert 4 * parameters <= found["same"].weight_bytes <= 4 * parameters + 1024


def test_measure_damage_runs_only_what_the_journal_lacks(tiny_llama: Path, other_llama: Path, tmp_path: Path) -> None:
    opened: list[str] = []

    def counted(label: str, directory: Path) -> Open:
        def open_engine() -> LogitsRuntime:
            opened.append(label)
            return opener(directory)()

        return open_engine

    engines = {"same": counted("same", tiny_llama), "other": counted("other", other_llama)}
    first = measure_damage(engines, counted("reference", tiny_llama), TEXTS, damage_in(tmp_path), Quiet())
    assert opened == ["reference", "same", "other"]
    journal = tmp_path / "damage.jsonl"
    journal.write_bytes(journal.read_bytes()[:-30])  # killed while the second row was written
    opened.clear()
    second = measure_damage(engines, counted("reference", tiny_llama), TEXTS, damage_in(tmp_path), Quiet())
    assert opened == ["reference", "other"]
    assert second["same"] == first["same"]
    assert second["other"].kl_nats == first["other"].kl_nats
    opened.clear()
    assert measure_damage(engines, counted("reference", tiny_llama), TEXTS, damage_in(tmp_path), Quiet()) == second
    assert opened == []
    assert [path.name for path in tmp_path.iterdir()] == ["damage.jsonl"]


def test_windows_cut_documents_within_the_budget_and_never_across_a_border() -> None:
    documents = (tuple(range(300)), tuple(range(5)), tuple(range(100)), tuple(range(50)))
    found = windows(documents, 400)
    assert [len(window) for window in found] == [256, 44, 100]
    assert found[1] == tuple(range(256, 300))
    assert [len(window) for window in windows(documents, 400, longest=128)] == [128, 128, 44, 100]


def test_weighted_kl_of_unequal_windows_averages_over_tokens() -> None:
    damage = Damage(
        label="x", kl_nats=(0.1, 0.4), window_tokens=(30, 10), num_flips=0, weight_bytes=0, growth_bytes=0, open_s=0.0
    )
    assert np.mean(damage.weighted_kl_nats) == pytest.approx((0.1 * 30 + 0.4 * 10) / 40)
