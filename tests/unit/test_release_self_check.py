"""The package stage's own deployment: figures for a good bundle, a withdrawn sign-off for another."""

from pathlib import Path

import pytest
from deploy_fixtures import greedy, make_deployable_inputs, publish

from model_optimizer.artifacts.measure import Origin, Verdict
from model_optimizer.artifacts.release import Release
from model_optimizer.errors import ConfigError, HealthCheckFailed
from model_optimizer.protocols import Quiet
from model_optimizer.release import self_check as subject
from model_optimizer.release.deploy import deploy
from model_optimizer.release.deployment_root import Reason
from model_optimizer.release.self_check import NUM_ROUNDS, self_check
from model_optimizer.release.sign import SigningKey, ensure_key
from model_optimizer.release.verify import verify_bundle


def release(root: Path, checkpoint: Path, verdict: Verdict, *, right: bool = True) -> tuple[Release, SigningKey]:
    inputs = make_deployable_inputs(root, checkpoint)
    samples = greedy(checkpoint, inputs.baseline_engine)
    if not right:
        samples = (samples[0].model_copy(update={"tokens": (0, *samples[0].tokens[1:])}), samples[1])
    return publish(inputs, root, verdict, samples), ensure_key(inputs.config.signer.key)


@pytest.mark.parametrize("verdict", [Verdict.ACCEPT, Verdict.REJECT])
def test_self_check_measures_rollback_and_activation(tmp_path: Path, tiny_llama: Path, verdict: Verdict) -> None:
    made, key = release(tmp_path, tiny_llama, verdict)
    checked = self_check(made, tmp_path / "bundles", key, Quiet())
    figures = {measure.metric: measure for measure in checked.measures[len(made.measures) :]}
    assert set(figures) == {"robustness/rollback_ms", "robustness/activation_ms"}
    for measure in figures.values():
        assert (measure.num_samples, measure.origin) == (NUM_ROUNDS, Origin.MEASURED)
        assert measure.value is not None and measure.value > 0
    assert checked.decisions[-1].numbers["num_equal_samples"] == 4
    assert (checked.decision, checked.warnings) == (made.decision, ())
    assert sorted(path.name for path in (tmp_path / "bundles").iterdir() if path.is_dir()) == ["chat-v0", "chat-v1"]
    assert verify_bundle(tmp_path / "bundles" / "chat-v1", public_key=key.public).manifest_sha256 == made.manifest_sha256


def test_self_check_takes_no_space(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, key = release(tmp_path, tiny_llama, Verdict.ACCEPT)
    seen = []
    real = subject._back_and_forward

    def look(scratch: Path, release: Release) -> tuple[list[float], list[float]]:
        models = [scratch / "releases" / name / "model" / "model.safetensors" for name in ("chat-v0", "chat-v1")]
        seen.extend(path.stat().st_nlink for path in models)
        return real(scratch, release)

    monkeypatch.setattr(subject, "_back_and_forward", look)
    self_check(made, tmp_path / "bundles", key, Quiet())
    assert seen == [2, 2]


def test_self_check_copies_and_warns_where_there_are_no_links(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, key = release(tmp_path, tiny_llama, Verdict.ACCEPT)

    def refuse(*_arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refuse)
    checked = self_check(made, tmp_path / "bundles", key, Quiet())
    assert checked.warnings == ("the self-check copied both bundles: no hard links beside them (Operation not supported)",)


def test_self_check_withdraws_the_sign_off_of_a_bundle_with_other_outputs(tmp_path: Path, tiny_llama: Path) -> None:
    made, key = release(tmp_path, tiny_llama, Verdict.ACCEPT, right=False)
    assert made.decision == "signed-off"
    with pytest.raises(HealthCheckFailed, match=r"chat-v1: .*sample 1 of 2 differs from token 0"):
        self_check(made, tmp_path / "bundles", key, Quiet())
    record = verify_bundle(tmp_path / "bundles" / "chat-v1", public_key=key.public).record
    assert record is not None and (record.decision, record.verdict) == ("refused", Verdict.REJECT)
    assert record.gates[-1]["name"] == "self_check"
    with pytest.raises(ConfigError, match="self_check"):
        deploy(tmp_path / "bundles" / "chat-v1", tmp_path / "root", Reason("me"), public_key=key.public)
    assert not list((tmp_path / "bundles").glob(".chat.self-check/*"))
