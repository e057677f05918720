"""Prefect's results in S3-compatible storage, as a team of several workers sets it; the store stays the only truth."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from prefect import State, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_DEFAULT_RESULT_STORAGE_BLOCK, temporary_settings
from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket
from small_stage import WordInputs, counting_stage

from model_optimizer.artifacts.base import Stage
from model_optimizer.protocols import Quiet
from model_optimizer.store import Store, stage_key
from tasks._task import Workplace

BUCKET, FOLDER = "results", "prefect"
INPUTS = WordInputs(fingerprint="f", word="bucket")


@pytest.fixture(scope="module")
def bucket(prefect_server: None) -> Iterator[Any]:
    """An empty bucket that the server's block `s3-bucket/team` names, and that is the default for results."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s")
    s3.create_bucket(Bucket=BUCKET)
    credentials = AwsCredentials(
        aws_access_key_id="k",
        aws_secret_access_key="s",
        region_name="us-east-1",
        aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
    )
    S3Bucket(bucket_name=BUCKET, bucket_folder=FOLDER, credentials=credentials).save("team")
    with temporary_settings({PREFECT_DEFAULT_RESULT_STORAGE_BLOCK: "s3-bucket/team"}):
        yield s3
    server.stop()


def run(root: Path, made: list[str]) -> str:
    """Run a flow of one stage on a machine whose store lies in `root`; return the last state of its task run."""

    @flow(name="one-stage")
    def one_stage() -> None:
        counting_stage(made)(INPUTS, Workplace(root, Store(root / "store"), Quiet()))

    state: State[None] = one_stage(return_state=True)
    assert state.is_completed(), state.message
    run_id = state.state_details.flow_run_id
    assert run_id is not None
    with get_client(sync_client=True) as client:
        (task_run,) = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
    return str(task_run.state and task_run.state.name)


def test_receipts_lie_in_the_bucket_and_the_next_run_finds_them(bucket: Any, tmp_path: Path) -> None:
    made: list[str] = []
    assert [run(tmp_path, made), run(tmp_path, made)] == ["Completed", "Cached"]
    assert made == ["bucket"]
    key = f"{FOLDER}/{stage_key(INPUTS)}"
    receipt = json.loads(bucket.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    assert json.loads(receipt["result"]) == {"kind": "profile", "key": stage_key(INPUTS), "cached": False}


def test_receipt_of_a_machine_whose_store_is_not_shared_is_not_believed(bucket: Any, tmp_path: Path) -> None:
    made: list[str] = []
    assert [run(tmp_path / "one", made), run(tmp_path / "other", made)] == ["Completed", "Completed"]
    shutil.rmtree(tmp_path / "one" / "store" / Stage.PROFILE)
    assert run(tmp_path / "one", made) == "Completed"
    assert made == ["bucket"] * 3
