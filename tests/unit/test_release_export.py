"""Bundles of the tiny model in the forms of other servers, held against those servers' own schemas."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kubernetes_validate
import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from export_fixtures import Made, make_onnx_bundles, make_torch_bundles
from google.protobuf import text_format
from serving_fixtures import onnx_greedy
from tritonclient.grpc import model_config_pb2

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.compilation.fusion import fuse, fusions_of
from model_optimizer.errors import ConfigError, IntegrityError, UnsupportedError
from model_optimizer.release.export.forms.kubernetes import NUM_REVISIONS, memory_bytes
from model_optimizer.release.export.source import FORMS, read_source
from model_optimizer.release.export.write import export

IMAGE = "registry.example/model-optimizer@sha256:" + "a" * 64
KUBERNETES_VERSIONS = ("1.30", "1.37")
"""The oldest and the newest that the manifests are held against."""


@pytest.fixture(scope="module")
def onnx_made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Made:
    return make_onnx_bundles(tmp_path_factory.mktemp("export-onnx"), tiny_llama)


@pytest.fixture(scope="module")
def torch_made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Made:
    return make_torch_bundles(tmp_path_factory.mktemp("export-torch"), tiny_llama)


@pytest.fixture(scope="module")
def repository(onnx_made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("triton") / "models"
    export(onnx_made.bundles / "chat-v1", target, "triton", {}, public_key=onnx_made.key)
    return target


@pytest.fixture(scope="module")
def manifests(onnx_made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kubernetes") / "chat"
    settings = {"image": IMAGE, "namespace": "models", "replicas": "3"}
    export(onnx_made.bundles / "chat-v1", target, "kubernetes", settings, public_key=onnx_made.key)
    return target


def read_config(path: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def manifest(manifests: Path, name: str) -> dict:  # type: ignore[type-arg]
    return yaml.safe_load((manifests / "base" / f"{name}.yaml").read_bytes())


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_triton_repository_of_an_onnx_engine_holds_graph_and_data(repository: Path, onnx_made: Made) -> None:
    assert files(repository) == ["chat/1/model.onnx", "chat/1/model.onnx.data", "chat/config.pbtxt"]
    engine = onnx_made.bundles / "chat-v1" / "model" / "engines" / "onnxruntime"
    for name in ("model.onnx", "model.onnx.data"):
        assert file_sha256(repository / "chat" / "1" / name) == file_sha256(engine / name)


def test_triton_config_is_the_graphs_own_signature(repository: Path, onnx_made: Made) -> None:
    config = read_config(repository / "chat" / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("chat", "onnxruntime", 0)
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, model_config_pb2.ModelInstanceGroup.KIND_CPU)]
    manifest_sha256 = file_sha256(onnx_made.bundles / "chat-v1" / "manifest.json")
    stated = {key: value.string_value for key, value in config.parameters.items()}
    assert stated == {"bundle": "chat-v1", "manifest_sha256": manifest_sha256}
    session = onnxruntime.InferenceSession(repository / "chat" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    types = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64"}
    for tensors, described in ((session.get_inputs(), config.input), (session.get_outputs(), config.output)):
        expected = [(it.name, types[it.type], [size if isinstance(size, int) else -1 for size in it.shape]) for it in tensors]
        assert [(it.name, model_config_pb2.DataType.Name(it.data_type), list(it.dims)) for it in described] == expected
    assert [list(it.dims) for it in config.input[:1]] == [[-1, -1]]
    assert len(config.input) == 3 + 2 * 2 and len(config.output) == 1 + 2 * 2, "two layers, each with keys and values"


@pytest.mark.parametrize("level", [1, 2])
def test_a_client_that_knows_only_the_config_gets_the_engines_tokens(
    repository: Path, onnx_made: Made, tmp_path: Path, level: int
) -> None:
    """Level 2 keeps its cache in place where a runtime binds it; the server binds nothing, and the tokens are the same."""
    folder = repository / "chat" / "1"
    expected = onnx_greedy(folder, (5, 6, 7), 6)
    if level == 2:
        graph = onnx.load(folder / "model.onnx", load_external_data=False)
        fused, counts = fuse(graph, folder, fusions_of(2, quantized=False), tmp_path)
        assert counts["group_query_attention"] == 2
        onnx.save(fused, tmp_path / "model.onnx")
        engine = onnx_made.bundles / "chat-v1" / "model" / "engines" / "onnxruntime"
        with exchanged(engine, tmp_path):
            source = read_source(onnx_made.bundles / "chat-v1", "0" * 64, onnx_made.key)
            FORMS.get("triton").write(source, tmp_path / "repository", {})
        folder = tmp_path / "repository" / "chat" / "1"
    config = read_config(folder.parent / "config.pbtxt")
    assert ("logits_from" in [it.name for it in config.input]) == (level == 2)
    assert triton_greedy(config, folder, [5, 6, 7], 6) == expected


@contextmanager
def exchanged(engine: Path, other: Path) -> Iterator[None]:
    """Let a bundle hold another engine for a moment."""
    aside = engine.with_name("aside")
    engine.rename(aside)
    shutil.copytree(other, engine)
    try:
        yield
    finally:
        shutil.rmtree(engine)
        aside.rename(engine)


def triton_greedy(config: model_config_pb2.ModelConfig, folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Generate as a client of the server would: all it knows is the configuration; each step is one request."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    outputs = [it.name for it in config.output]
    empty = {it.name: np.zeros([1, it.dims[1], 0, it.dims[3]], np.float32) for it in config.input if it.name.startswith("past")}
    tokens, new, cache, seen = [], prompt, empty, 0
    for _ in range(num_tokens):
        seen += len(new)
        feeds = {
            "input_ids": np.array([new], np.int64),
            "attention_mask": np.ones((1, seen), np.int64),
            "position_ids": np.arange(seen - len(new), seen, dtype=np.int64)[None],
            "logits_from": np.array([0], np.int64),
            **cache,
        }
        answer = dict(zip(outputs, session.run(outputs, {it.name: feeds[it.name] for it in config.input}), strict=True))
        cache = {name: answer[name.replace("past_key_values", "present")] for name in empty}
        new = [int(answer["logits"][0, -1].argmax())]
        tokens += new
    return tokens


def test_triton_repository_of_a_checkpoint_tells_vllm_the_plan(torch_made: Made, tmp_path: Path) -> None:
    notes = export(
        torch_made.bundles / "chat-v0", tmp_path / "models", "triton", {"repository": "/srv/triton/"}, public_key=torch_made.key
    )
    config = read_config(tmp_path / "models" / "chat" / "config.pbtxt")
    assert (config.name, config.backend, len(config.input)) == ("chat", "vllm", 0)
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_MODEL
    arguments = json.loads((tmp_path / "models" / "chat" / "1" / "model.json").read_bytes())
    assert arguments == {
        "model": "/srv/triton/chat/1/checkpoint",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "kv_cache_dtype": "auto",
        "dtype": "auto",
        "generation_config": "vllm",
        "kv_cache_memory_bytes": 3 * 128 * 512,
    }
    held = files(tmp_path / "models" / "chat" / "1" / "checkpoint")
    assert {"config.json", "model.safetensors"} <= set(held)
    assert not {"layout.json", "kv_cache_config.json", "metadata.json"} & set(held)
    assert any("in place of the torch engine that was verified" in note for note in notes)


def test_triton_refuses_weights_that_vllm_does_not_execute_there(torch_made: Made, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"vllm on cpu does not run int8-channel.*take w8a8-int8") as caught:
        export(torch_made.bundles / "chat-v1", tmp_path / "models", "triton", {}, public_key=torch_made.key)
    assert caught.value.exit_code == 4
    assert list(tmp_path.iterdir()) == [], "nothing half written stays"


@pytest.mark.parametrize("runtime", ["llamacpp", "openvino", "tensorrt"])
def test_triton_refuses_other_runtimes_by_name(onnx_made: Made, tmp_path: Path, runtime: str) -> None:
    bundle = onnx_made.bundles / "chat-v1"
    source = read_source(bundle, "0" * 64, onnx_made.key)
    changed = source.metadata.model_copy(update={"runtime": runtime})
    other = type(source)(**{**{name: getattr(source, name) for name in source.__slots__}, "metadata": changed})
    with pytest.raises(
        UnsupportedError, match=f"chat-v1 holds an engine of {runtime}; exported to Triton are onnxruntime, vllm, torch"
    ):
        FORMS.get("triton").write(other, tmp_path, {})


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_base_satisfies_the_schemas_strictly(manifests: Path, version: str) -> None:
    documents = [path for path in sorted((manifests / "base").glob("*.yaml")) if path.name != "kustomization.yaml"]
    assert [path.stem for path in documents] == ["deployment", "disruption-budget", "network-policy", "server-config", "service"]
    for path in documents:
        assert "&id" not in path.read_text(), "no anchors"
        kubernetes_validate.validate(yaml.safe_load(path.read_bytes()), version, strict=True)


def test_the_schemas_would_have_found_a_fault(manifests: Path) -> None:
    document = manifest(manifests, "deployment")
    document["spec"]["template"]["spec"]["automountServiceAccountTokens"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES_VERSIONS[-1], strict=True)


def test_kubernetes_names_image_and_bundle_by_digest(manifests: Path, onnx_made: Made) -> None:
    digest = file_sha256(onnx_made.bundles / "chat-v1" / "manifest.json")
    deployment = manifest(manifests, "deployment")
    assert deployment["metadata"]["annotations"]["kubernetes.io/change-cause"] == f"chat-v1 (manifest sha256:{digest})"
    assert deployment["spec"]["revisionHistoryLimit"] == NUM_REVISIONS == 25
    template = deployment["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "model-optimizer/bundle": "chat-v1",
        "model-optimizer/bundle-manifest-sha256": digest,
    }
    containers = template["spec"]["initContainers"] + template["spec"]["containers"]
    assert {container["image"] for container in containers} == {IMAGE}


def run_init_container(manifests: Path, bundles: Path) -> int:
    """Run what the init container runs, on a copy of the bundles; return its exit status."""
    _, _, check = manifest(manifests, "deployment")["spec"]["template"]["spec"]["initContainers"][0]["command"]
    here = check.replace("/bundles/", f"{bundles}/").replace("/tmp/files", f"{bundles}.files")
    return subprocess.run(["sh", "-c", here], capture_output=True, check=False, timeout=60).returncode


def test_kubernetes_init_container_really_compares_the_digest(manifests: Path, onnx_made: Made, tmp_path: Path) -> None:
    shutil.copytree(onnx_made.bundles, tmp_path / "copies")
    assert run_init_container(manifests, tmp_path / "copies") == 0
    (tmp_path / "copies" / "chat-v1" / "manifest.json").write_bytes(b"{}")
    assert run_init_container(manifests, tmp_path / "copies") != 0


def test_kubernetes_init_container_checks_every_file_for_servers_that_do_not(torch_made: Made, tmp_path: Path) -> None:
    settings = {"image": IMAGE, "server": "vllm"}
    export(torch_made.bundles / "chat-v0", tmp_path / "out", "kubernetes", settings, public_key=torch_made.key)
    (server,) = manifest(tmp_path / "out", "deployment")["spec"]["template"]["spec"]["containers"]
    assert server["command"][:3] == ["vllm", "serve", "/bundles/chat-v0/model"]
    assert {server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")} == {"/health"}
    copies = tmp_path / "copies"
    shutil.copytree(torch_made.bundles, copies)
    assert run_init_container(tmp_path / "out", copies) == 0
    weights = copies / "chat-v0" / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run_init_container(tmp_path / "out", copies) != 0, "one bit"
    weights.write_bytes(content)
    (copies / "chat-v0" / "model" / "model-2.safetensors").write_bytes(b"")
    assert run_init_container(tmp_path / "out", copies) != 0, "one file more"
    (copies / "chat-v0" / "model" / "model-2.safetensors").unlink()
    assert run_init_container(tmp_path / "out", copies) == 0
    with pytest.raises(UnsupportedError, match="chat-v0 holds no GGUF file, which is what llamacpp loads"):
        FORMS.get("kubernetes").write(
            read_source(torch_made.bundles / "chat-v0", "0" * 64, torch_made.key), tmp_path, settings | {"server": "llamacpp"}
        )


def test_kubernetes_pod_is_confined(manifests: Path) -> None:
    pod = manifest(manifests, "deployment")["spec"]["template"]["spec"]
    assert (pod["automountServiceAccountToken"], pod["securityContext"]["runAsNonRoot"]) == (False, True)
    for container in pod["initContainers"] + pod["containers"]:
        context = container["securityContext"]
        assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert all(mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] != "scratch")


def test_kubernetes_probes_ask_the_servers_own_endpoints(manifests: Path) -> None:
    (server,) = manifest(manifests, "deployment")["spec"]["template"]["spec"]["containers"]
    probes = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/health", "readiness": "/health", "liveness": "/v2/health/live"}
    assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] == 900
    assert server["command"][:4] == ["model-optimizer", "serve", "--model-path", "/bundles/chat-v1"]


def test_kubernetes_memory_is_what_was_measured_and_a_tenth(onnx_made: Made) -> None:
    source = read_source(onnx_made.bundles / "chat-v1", "0" * 64, onnx_made.key)
    planned = source.metadata.engine_bytes + source.plan.pool_bytes
    assert memory_bytes(source, None) == round(1.1 * (planned + (1 << 30)))
    assert memory_bytes(source, 2.5) == 2.5 * (1 << 30)
    source.measured_bytes["soak_peak"] = 4e9  # type: ignore[index]
    assert memory_bytes(source, None) == 4_400_000_000


def test_kubernetes_service_budget_and_policy_point_at_the_pods(manifests: Path) -> None:
    labels = manifest(manifests, "deployment")["spec"]["template"]["metadata"]["labels"]
    service, budget, policy = (manifest(manifests, name)["spec"] for name in ("service", "disruption-budget", "network-policy"))
    for selector in (service["selector"], budget["selector"]["matchLabels"], policy["podSelector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    assert (service["ports"][0]["port"], policy["ingress"][0]["ports"][0]["port"], policy["egress"]) == (8000, 8000, [])


def test_kubernetes_key_and_config_reach_the_server(manifests: Path, onnx_made: Made) -> None:
    config = manifest(manifests, "server-config")
    assert config["data"]["key.pem.pub"] == onnx_made.key.read_text()
    assert yaml.safe_load(config["data"]["serve.yaml"]) == {"public_key": "/etc/model-optimizer/key.pem.pub"}
    volumes = manifest(manifests, "deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "config", "configMap": {"name": config["metadata"]["name"]}} in volumes


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed (`kubectl kustomize` builds the overlay)")
def test_kubernetes_overlay_builds_with_kustomize(manifests: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", manifests / "overlay"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    built = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert built["Deployment"]["spec"]["replicas"] == 3
    assert {document["metadata"]["namespace"] for document in built.values()} == {"models"}
    for document in built.values():
        kubernetes_validate.validate(document, KUBERNETES_VERSIONS[-1], strict=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, r"--set image=VALUE is needed: the server's image by digest"),
        ({"image": "server:latest"}, r"--set image: .*; seen: 'server:latest'"),
        ({"image": IMAGE, "replicas": "0"}, "--set replicas: .*greater than or equal to 1"),
        ({"image": IMAGE, "size": "1"}, "--set size: this form has no such setting; known: image, claim"),
        ({"image": IMAGE, "server": "triton"}, "--set server: "),
    ],
)
def test_export_names_a_wrong_setting(onnx_made: Made, tmp_path: Path, settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        export(onnx_made.bundles / "chat-v1", tmp_path / "out", "kubernetes", settings, public_key=onnx_made.key)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", FORMS.names())
def test_every_form_refuses_a_setting_that_it_does_not_have(onnx_made: Made, tmp_path: Path, form: str) -> None:
    with pytest.raises(ConfigError, match="--set colour: this form has no such setting; known: "):
        export(
            onnx_made.bundles / "chat-v1", tmp_path / "out", form, {"colour": "blue", "image": IMAGE}, public_key=onnx_made.key
        )
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_what_is_not_signed_off_or_does_not_verify(onnx_made: Made, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat-v2 is not signed off [^-]*take a signed-off version$"):
        export(onnx_made.bundles / "chat-v2", tmp_path / "out", "triton", {}, public_key=onnx_made.key)
    shutil.copytree(onnx_made.bundles, tmp_path / "bundles")
    with (tmp_path / "bundles" / "chat-v1" / "config.yaml").open("ab") as stream:
        stream.write(b"#")
    with pytest.raises(IntegrityError, match=r"config\.yaml"):
        export(tmp_path / "bundles" / "chat-v1", tmp_path / "out", "triton", {}, public_key=onnx_made.key)
    with pytest.raises(ConfigError, match="unknown export form 'helm'; known: kubernetes, triton"):
        export(onnx_made.bundles / "chat-v1", tmp_path / "out", "helm", {}, public_key=onnx_made.key)


def test_export_never_writes_over_something(onnx_made: Made, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match="a new or an empty folder"):
        export(onnx_made.bundles / "chat-v1", tmp_path, "triton", {}, public_key=onnx_made.key)
    (tmp_path / "empty").mkdir()
    export(onnx_made.bundles / "chat-v1", tmp_path / "empty", "triton", {}, public_key=onnx_made.key)
    assert files(tmp_path) == ["empty/chat/1/model.onnx", "empty/chat/1/model.onnx.data", "empty/chat/config.pbtxt", "note"]


def test_export_gives_the_same_bytes_twice(onnx_made: Made, manifests: Path, tmp_path: Path) -> None:
    settings = {"image": IMAGE, "namespace": "models", "replicas": "3"}
    export(onnx_made.bundles / "chat-v1", tmp_path / "again", "kubernetes", settings, public_key=onnx_made.key)
    for name in files(manifests):
        assert (tmp_path / "again" / name).read_bytes() == (manifests / name).read_bytes()
    assert not re.search(r"\d{4}-\d\d-\d\d", (manifests / "base" / "deployment.yaml").read_text()), "no dates"
