"""A flow run that a process worker makes from a git commit, deployed by `prefect.yaml`."""

import json

from from_commit import MARK, Story
from mlflow.tracking import MlflowClient

from model_optimizer.release.verify import verify_bundle


def test_worker_runs_the_code_and_the_profile_of_the_commit(story: Story) -> None:
    assert story.second.states(MARK) == {"Completed"}
    client = MlflowClient(tracking_uri=f"sqlite:///{story.home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("model-optimizer/tiny")
    assert experiment is not None
    (parent,) = client.search_runs([experiment.experiment_id], f"tags.`mo.record_id` = '{story.second.run.id}'")
    assert parent.data.tags["git.sha"] == story.commit


def test_worker_comes_to_a_verdict_and_a_bundle_that_verifies(story: Story) -> None:
    outcome = json.loads((story.home / "runs" / f"{story.second.run.id}.json").read_text())
    assert outcome["verdict"] in ("ACCEPT", "REJECT", "INCONCLUSIVE")
    facts = verify_bundle(story.home / "bundles" / "tiny-v1", public_key=next(story.home.parent.rglob("signer/*.pub")))
    assert facts.manifest_sha256 == outcome["manifest_sha256"]
