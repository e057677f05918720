"""Manifests for Kubernetes: `base/` is plain YAML that applies by itself, `overlay/` a kustomization for one cluster.

Image and bundle are named by digest. An init container compares the bundle on the volume with the digest in the pod's
annotation before anything is loaded, so `kubectl rollout undo --to-revision` returns to exactly the bundle that it names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from model_optimizer.errors import UnsupportedError
from model_optimizer.release.endpoints import OURS, SERVERS, Server, server_of
from model_optimizer.release.export.source import FORMS, Source, read_settings
from model_optimizer.spec import Spec

Json = dict[str, object]
BUNDLES = "/bundles"
CONFIG = "/etc/model-optimizer"
SERVE = "serve.yaml"
PUBLIC_KEY = "key.pem.pub"
ANNOTATION = "model-optimizer/bundle"
DIGEST_ANNOTATION = "model-optimizer/bundle-manifest-sha256"
CHANGE_CAUSE = "kubernetes.io/change-cause"
NUM_REVISIONS = 25
"""Releases that `rollout undo` can return to; Kubernetes itself keeps 10."""
USER = 65532
_MIB = 1 << 20
_GIB = 1 << 30
_ROOM_RATIO = 0.1
"""Above the largest resident size that was seen, before the kernel ends the process."""
_START_S = 900
"""As `engine.start_timeout_s` of the server."""
_PROBE_S = 10
_GRACE_S = 75
"""The server drains for 60 s; see limits.drain_timeout_s."""
_IMAGE = r"^[a-z0-9][a-z0-9._/:-]*@sha256:[0-9a-f]{64}$"


class KubernetesSettings(Spec):
    image: str = Field(pattern=_IMAGE, description="the server's image by digest, NAME@sha256:<64 hex digits>")
    claim: str = Field(
        default="bundles", pattern="^[a-z0-9.-]+$", description="volume claim that holds bundles and their records"
    )
    namespace: str = Field(default="default", pattern="^[a-z0-9-]{1,63}$", description="of the overlay")
    replicas: int = Field(default=2, ge=1, le=100)
    memory_gib: float | None = Field(default=None, gt=0, description="of a container; left out: what was measured, and a tenth")
    client_label: str = Field(
        default="model-client", pattern="^[a-z0-9-]+$", description="pods with the label <this>=true may send requests"
    )
    server: Literal["model-optimizer", "vllm", "llamacpp"] | None = Field(
        default=None, description="whose image it is; left out: by the bundle's runtime"
    )


class KubernetesForm:
    """Write base and overlay of one bundle."""

    def write(self, source: Source, target: Path, settings: Mapping[str, str]) -> tuple[str, ...]:
        """Write one file for each object, a kustomization over them, and an overlay that sets namespace and replicas.

        Raises:
            ConfigError: a setting is missing or wrong; the image must be named by digest.
            UnsupportedError: the server that was asked for does not load what the bundle holds.
        """
        stated = read_settings(KubernetesSettings, settings)
        server = _server(source, stated)
        objects = {
            "deployment": _deployment(source, stated, server),
            "service": _service(source, server),
            "disruption-budget": _disruption_budget(source),
            "network-policy": _network_policy(source, stated, server),
            "server-config": _server_config(source),
        }
        for folder in (target / "base", target / "overlay"):
            folder.mkdir()
        for name, document in objects.items():
            _write(target / "base" / f"{name}.yaml", document)
        _write(target / "base" / "kustomization.yaml", _kustomization([f"{name}.yaml" for name in objects]))
        overlay = _kustomization(["../base"]) | {
            "namespace": stated.namespace,
            "replicas": [{"name": source.family, "count": stated.replicas}],
        }
        _write(target / "overlay" / "kustomization.yaml", overlay)
        return (
            f"the claim {stated.claim!r} must hold {source.name}/ and its two sign-off files",
            "apply: kubectl apply -k overlay   (or: kubectl apply -f base)",
            f"go back: kubectl rollout history deployment/{source.family}; kubectl rollout undo deployment/{source.family} "
            "--to-revision N",
        )


FORMS.register("kubernetes")(KubernetesForm())


def _server(source: Source, stated: KubernetesSettings) -> Server:
    name = stated.server or server_of(source.metadata.runtime).name
    if name == "llamacpp" and _gguf(source) is None:
        raise UnsupportedError(
            f"{source.name} holds no GGUF file, which is what llamacpp loads; take --set server=model-optimizer"
        )
    return SERVERS[name]


def _labels(source: Source) -> Json:
    return {"app.kubernetes.io/name": source.family, "app.kubernetes.io/managed-by": "model-optimizer"}


def _object(kind: str, version: str, source: Source, spec: Json) -> Json:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": source.family, "labels": _labels(source)}, "spec": spec}


def _deployment(source: Source, stated: KubernetesSettings, server: Server) -> Json:
    """Return the Deployment; what changes between two bundles is in the template, so that every bundle is a revision."""
    cause = f"{source.name} (manifest sha256:{source.manifest_sha256})"
    identity: Json = {ANNOTATION: source.name, DIGEST_ANNOTATION: source.manifest_sha256}
    template: Json = {"metadata": {"labels": _labels(source), "annotations": identity}, "spec": _pod(source, stated, server)}
    spec: Json = {
        "replicas": stated.replicas,
        "revisionHistoryLimit": NUM_REVISIONS,
        "progressDeadlineSeconds": _START_S + 60,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": {"app.kubernetes.io/name": source.family}},
        "template": template,
    }
    document = _object("Deployment", "apps/v1", source, spec)
    document["metadata"] = {"name": source.family, "labels": _labels(source), "annotations": {CHANGE_CAUSE: cause, **identity}}
    return document


def _pod(source: Source, stated: KubernetesSettings, server: Server) -> Json:
    mounts = [
        {"name": "bundles", "mountPath": BUNDLES, "readOnly": True},
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    shared: Json = {
        "image": stated.image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": _confined(),
        "volumeMounts": mounts,
    }
    resources = _resources(source, stated)
    compare: Json = {"name": "compare-digest", **shared, "command": ["sh", "-c", _check(source, server)], "resources": _SMALL}
    serve: Json = {
        "name": "server",
        **shared,
        "command": _command(source, server),
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "HF_HUB_OFFLINE", "value": "1"}],
        "ports": [{"name": "http", "containerPort": server.port}],
        "resources": resources,
        **_probes(server),
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [compare],
        "containers": [serve],
        "volumes": [
            {"name": "bundles", "persistentVolumeClaim": {"claimName": stated.claim, "readOnly": True}},
            {"name": "config", "configMap": {"name": f"{source.name}-server"}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }


def _check(source: Source, server: Server) -> str:
    """Return what the init container runs: the manifest against the digest of the annotation.

    Our own server then verifies every file and the signature by itself; for the others it is done here, file by file, with what
    any image has. An entry of the manifest that this does not read fails the check.
    """
    steps = [f"cd {BUNDLES}/{source.name}", f'echo "{source.manifest_sha256}  manifest.json" | sha256sum -c -']
    if server is not OURS:
        steps += [
            f"tr '{{' '\\n' < manifest.json | awk -F'\"' '{_ENTRIES}' > /tmp/files",
            "sha256sum -c /tmp/files > /dev/null",
            '[ "$(find . -type f | wc -l)" -eq "$(($(wc -l < /tmp/files) + 2))" ]',  # with manifest.json and model.sig
        ]
    return " && ".join(["set -e; " + steps[0], *steps[1:]])


_ENTRIES = r"""NR > 2 { if ($4 != "path" || $8 != "sha256" || $6 ~ /\\/) { bad = 1; exit } print $10 "  " $6 } END { exit bad }"""
"""Between the quotes of one entry: its path is the sixth part and its digest the tenth."""
_SMALL: Json = {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}}
"""For reading one manifest and hashing files, a piece at a time."""


def _command(source: Source, server: Server) -> list[str]:
    bundle = f"{BUNDLES}/{source.name}"
    listen = ["--host", "0.0.0.0", "--port", str(server.port)]  # a pod's address; the network policy says who reaches it
    plan = source.plan
    if server.name == "vllm":
        limits = ["--max-model-len", str(plan.max_model_len), "--max-num-seqs", str(plan.max_batch)]
        return ["vllm", "serve", f"{bundle}/model", "--served-model-name", source.name, *listen, *limits]
    if server.name == "llamacpp":
        size = ["--ctx-size", str(plan.max_model_len * plan.max_batch), "--parallel", str(plan.max_batch)]
        return ["/app/llama-server", "--model", f"{bundle}/{_gguf(source)}", "--alias", source.name, *listen, *size]
    return ["model-optimizer", "serve", "--model-path", bundle, "--config", f"{CONFIG}/{SERVE}", *listen]


def _gguf(source: Source) -> str | None:
    """Return the bundle's GGUF file, relative to it."""
    found = sorted(source.engine.glob("*.gguf"))
    return found[0].relative_to(source.bundle).as_posix() if found else None


def _confined() -> Json:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _probes(server: Server) -> Json:
    """Return the probes: loading may take as long as the server's own limit, and a full queue is no reason to kill it."""

    def get(path: str, failures: int, period_s: int = _PROBE_S) -> Json:
        answer = {"path": path, "port": "http"}
        return {"httpGet": answer, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}

    return {
        "startupProbe": get(server.ready, _START_S // _PROBE_S),
        "readinessProbe": get(server.ready, 2),
        "livenessProbe": get(server.live, 6),
    }


def memory_bytes(source: Source, stated_gib: float | None) -> int:
    """Return what a container may hold.

    What is stated wins, then what the profile allows; else a tenth above the largest resident size that was measured, or above
    engine, cache and 1 GiB of framework where nothing was (as in a baseline's bundle).
    """
    if limit_gib := stated_gib or source.memory_gib:
        return round(limit_gib * _GIB)
    planned = source.metadata.engine_bytes + source.plan.pool_bytes
    seen = source.measured_bytes.get("soak_peak", planned + _GIB)
    return round(max(seen, planned) * (1 + _ROOM_RATIO))


def _resources(source: Source, stated: KubernetesSettings) -> Json:
    """Return requests and limits: memory never shared, processors as many as it was measured with."""
    memory = f"{-(-memory_bytes(source, stated.memory_gib) // _MIB)}Mi"
    limits: Json = {"memory": memory}
    requests: Json = {"cpu": str(source.num_cores), "memory": memory}
    if source.metadata.device.kind == "cuda":
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = "1"
    return {"requests": requests, "limits": limits}


def _service(source: Source, server: Server) -> Json:
    spec: Json = {
        "type": "ClusterIP",
        "selector": {"app.kubernetes.io/name": source.family},
        "ports": [{"name": "http", "port": server.port, "targetPort": "http"}],
    }
    return _object("Service", "v1", source, spec)


def _disruption_budget(source: Source) -> Json:
    """Return the budget: one pod at a time may be moved, also where there is only one."""
    spec: Json = {"maxUnavailable": 1, "selector": {"matchLabels": {"app.kubernetes.io/name": source.family}}}
    return _object("PodDisruptionBudget", "policy/v1", source, spec)


def _network_policy(source: Source, stated: KubernetesSettings, server: Server) -> Json:
    """Return the policy: labelled pods may ask, nothing may be asked by the server; kubelets' probes pass policies."""
    allowed = [{"podSelector": {"matchLabels": {stated.client_label: "true"}}}]
    spec: Json = {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": source.family}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": allowed, "ports": [{"port": server.port, "protocol": "TCP"}]}],
        "egress": [],
    }
    return _object("NetworkPolicy", "networking.k8s.io/v1", source, spec)


def _server_config(source: Source) -> Json:
    """Return what our server reads; its name holds the bundle's, so that an earlier revision finds its own."""
    serve = {"public_key": f"{CONFIG}/{PUBLIC_KEY}"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{source.name}-server", "labels": _labels(source)},
        "immutable": True,
        "data": {PUBLIC_KEY: source.public_key.decode(), SERVE: yaml.safe_dump(serve)},
    }


def _kustomization(resources: list[str]) -> Json:
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources}


def _write(path: Path, document: Json) -> None:
    path.write_text(yaml.dump(document, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")


class _Plain(yaml.SafeDumper):
    """YAML without anchors, which not every reader of manifests takes."""

    def ignore_aliases(self, data: object) -> bool:
        return True
