"""Bundles to export: one with an ONNX engine, one whose engine is the checkpoint, both of the tiny model."""

from dataclasses import dataclass
from pathlib import Path

from deploy_fixtures import greedy, make_deployable_inputs, publish
from serving_fixtures import bundle_inputs, write_onnx_model

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import SampleOutput


@dataclass(frozen=True)
class Made:
    """Bundles of one folder and the key that signed them."""

    bundles: Path
    key: Path


def make_onnx_bundles(root: Path, checkpoint: Path) -> Made:
    """Publish chat-v0 and chat-v1 with ONNX engines, and chat-v2 that was refused."""
    model = write_onnx_model(checkpoint, root / "onnx-model")
    inputs = bundle_inputs(root, checkpoint, model, model)
    sample = SampleOutput(prompt="a", prompt_tokens=(5, 6, 7), tokens=(8, 9), text="b", baseline_tokens=(8, 9), baseline_text="b")
    for verdict in (Verdict.ACCEPT, Verdict.REJECT):
        publish(inputs, root, verdict, (sample,))
    return Made(root / "bundles", root / "keys" / "key.pem.pub")


def make_torch_bundles(root: Path, checkpoint: Path) -> Made:
    """Publish chat-v0 (float32) and chat-v1 (int8-channel) that the torch runtime opens."""
    inputs = make_deployable_inputs(root, checkpoint)
    publish(inputs, root, Verdict.ACCEPT, greedy(checkpoint, inputs.baseline_engine))
    return Made(root / "bundles", root / "keys" / "key.pem.pub")
