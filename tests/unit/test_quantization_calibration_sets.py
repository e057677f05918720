"""Text that is not the user's: the built-in sets, and what a model writes itself."""

import json
import re
from pathlib import Path

import pytest

from model_optimizer.artifacts.base import Tree
from model_optimizer.errors import ConfigError
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.quantization.calibration import CalibrationSource, check_calibration, prepare, texts
from model_optimizer.quantization.calibration_source import Sampler, built_in_sets
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.verification.golden import find_golden_set, load_golden_set
from model_optimizer.verification.leakage import normalise, refuse_leakage

HAN = re.compile(r"[\u4e00-\u9fff]")


def built_in(name: str, **settings: object) -> CalibrationSource:
    return CalibrationSource.of(CalibrationConfig.model_validate({"path": f"builtin:{name}", **settings}), Path("nowhere"))


@pytest.mark.parametrize("name", ["general", "code", "dialogue"])
def test_built_in_sets_are_different_texts_in_two_languages(name: str) -> None:
    found = texts(built_in(name))
    chinese = [text for text in found if HAN.search(text)]
    assert len(found) >= 48 and 10 <= len(chinese) <= len(found) - 20
    assert len({normalise(text) for text in found}) == len(found)
    openings = [normalise(text)[:24] for text in found]
    assert len(set(openings)) == len(openings), "texts that begin alike are made from one pattern"
    assert any(HAN.search(text) for text in found[:6]) and not all(HAN.search(text) for text in found[:6])


def test_built_in_sets_hold_no_golden_item(tmp_path: Path) -> None:
    sets = [load_golden_set(find_golden_set(name, tmp_path)) for name in ("quickstart-en", "quickstart-zh")]
    refuse_leakage(texts(built_in("all")), sets)


def test_all_takes_the_sets_in_turns_and_loses_no_record(tiny_llama: Path) -> None:
    source = built_in("all", num_samples=12)
    single = [text for name in built_in_sets() for text in texts(built_in(name))]
    assert sorted(texts(source)) == sorted(single)
    assert set(texts(source)[:3]) == {texts(built_in(name))[0] for name in ("general", "code", "dialogue")}
    prepared = prepare(source, tiny_llama)
    assert prepared.report.num_used == 12 and prepared.report.num_bad == 0
    assert any("'builtin:all', no data of your own" in warning for warning in prepared.warnings)


def test_own_data_earns_no_such_warning(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts(built_in("general"))))
    prepared = prepare(CalibrationSource.of(CalibrationConfig(path=Path("own.jsonl")), tmp_path), tiny_llama)
    assert not any("your own" in warning for warning in prepared.warnings)


def test_built_in_dialogues_calibrate_a_model_without_chat_template(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "base")
    (model / "chat_template.jinja").unlink()
    source = built_in("dialogue")
    assert len(check_calibration(source, model)) >= 48
    prepared = prepare(source, model)
    assert prepared.report.num_used + prepared.report.num_held_out >= 48
    assert any("no chat template" in warning for warning in prepared.warnings)


def test_of_names_the_known_sets_when_one_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown built-in calibration set 'novels'; known: code, dialogue, general, all"):
        built_in("novels")


def own_words(model: Path, cache: Path, **settings: object) -> CalibrationSource:
    config = CalibrationConfig.model_validate({"path": "self", "num_samples": 6, "max_length": 24, **settings})
    return CalibrationSource.of(config, cache, Sampler(model=Tree.of(model), cache=cache))


def test_self_text_is_the_same_every_time_and_kept(tiny_llama: Path, tmp_path: Path) -> None:
    first, again = own_words(tiny_llama, tmp_path / "a"), own_words(tiny_llama, tmp_path / "b")
    assert first.model_dump() == again.model_dump() and not (tmp_path / "a").exists()
    assert texts(first) == texts(again) and len(texts(first)) == 8  # 6 of 8 calibrate when a quarter is held out
    kept = first.tree.path.read_bytes()
    assert kept == again.tree.path.read_bytes()
    written = first.tree.path.stat().st_mtime_ns
    prepared = prepare(first, tiny_llama)
    assert first.tree.path.stat().st_mtime_ns == written
    assert prepared.report.num_used == 6 and any("wrote itself" in warning for warning in prepared.warnings)


def test_self_text_depends_on_model_and_seed(tiny_llama: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=1)
    sources = [own_words(tiny_llama, tmp_path), own_words(tiny_llama, tmp_path, seed=1), own_words(other, tmp_path)]
    assert len({source.tree.digest for source in sources}) == len({texts(source) for source in sources}) == 3


def test_self_text_follows_the_models_own_distribution(tiny_llama: Path) -> None:
    """Second tokens after one first token, against the softmax of the model's logits."""
    import torch
    from transformers import AutoModelForCausalLM

    from model_optimizer.quantization.self_sampling import write_sequences

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    generator = torch.Generator().manual_seed(3)
    drawn = write_sequences(model, torch.full((4000, 1), 70), 2, [0, 1, 2, 3], generator)
    with torch.no_grad():
        logits_V = model(torch.tensor([[70]])).logits[0, -1]
    logits_V[:4] = -torch.inf
    expected_V = logits_V.softmax(-1)
    counts_V = torch.bincount(torch.tensor([tokens[1] for tokens in drawn]), minlength=260)
    assert counts_V[:4].sum() == 0
    deviation_V = (counts_V / 4000 - expected_V).abs()
    assert (deviation_V <= 5 * (expected_V * (1 - expected_V) / 4000).sqrt() + 1e-9).all()


def test_of_refuses_self_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sampled from the model"):
        CalibrationSource.of(CalibrationConfig(path=Path("self")), tmp_path)
