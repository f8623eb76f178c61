"""`penstock launch kubernetes`: manifests of the run, and of what joins it.

The run is a Job of one pod; rollouts are a Job of several, each of which ends with the run, or, where their number is
to follow what there is to do, a Deployment that KEDA scales. All of them see the run's folder on one claim, which must
be mountable by several nodes (ReadWriteMany).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from penstock.pipeline.config import Config, ConfigError, dump
from penstock.pipeline.config.passwords import HIDDEN, hide_password
from penstock.pipeline.launch.parts import PATIENCE_S, Part, head_arguments, member_arguments
from penstock.pipeline.resources.host import SHM, host_needs
from penstock.pipeline.run.resume import STORE
from penstock.services.runtime import registry

Manifest = dict[str, Any]

HOME = "/penstock"
BROKER_PORT, METRICS_PORT = 5555, 9400
USER = 10001
"""Of our images."""
HEAD_GRACE_S, GRACE_S = 660, 60
"""From SIGTERM to SIGKILL: the step in hand and a checkpoint of it; what is finished becomes durable."""
RESTARTS = 50
"""Of one pod in a run's whole life: each eviction or preemption is one, too."""
FAILED_S = 900
"""A run that has failed, and that its pod has not gone on with, is waited for so long by those that joined; then
their Jobs are complete."""
NODE_GONE_S = 30
"""A pod on a node that does not answer is given up after this."""
LEAST_SHM = "8g"
LONGEST_NAME = 40
LONGEST_OBJECT = 63
FULL = 0.8
"""Rollouts that hold this share of the groups that they could are enough."""


@dataclass(frozen=True)
class Options:
    """What the cluster is told beside the config."""

    name: str
    """Of the run; objects are called ``penstock-NAME``."""
    image: str
    namespace: str | None = None
    claim: str | None = None
    """A claim that is there; None: one is made."""
    storage_class: str | None = None
    storage: str = "200Gi"
    pull: str | None = None
    """`imagePullPolicy`; None: as `_is_pulled` says."""
    secret: str | None = None
    """A secret whose keys become environment variables, HF_TOKEN for instance; `STORE` is the head's alone."""
    prometheus: str | None = None
    """Where KEDA asks, e.g. ``http://prometheus.monitoring:9090``."""
    autoscale: tuple[int, int] | None = None
    """Least and most rollouts."""

    @property
    def object(self) -> str:
        """The name of the run's objects."""
        return f"penstock-{self.name}"

    @property
    def folder(self) -> str:
        """The run's, in every pod."""
        return str(PurePosixPath(HOME) / "runs" / self.name)


def manifests(config: Config, parts: list[Part], options: Options) -> str:
    """As YAML, for `kubectl apply -f -`. Raises `ConfigError`."""
    if options.autoscale and not options.prometheus:
        raise ConfigError("--autoscale: KEDA reads from a Prometheus; give --prometheus http://HOST:9090")
    if options.autoscale and options.autoscale[0]:
        raise ConfigError("--autoscale: the least must be 0, or rollouts would stay when the run is over; e.g. 0:8")
    if HIDDEN in hide_password(config.store.url or "") and not options.secret:
        raise ConfigError(
            f"store.url: its password does not go into a ConfigMap: put the whole address into a secret as {STORE}, "
            "and give that, e.g. --secret store; or leave store.url out: a run has a store of its own"
        )
    if options.autoscale and "rollout" not in [part.kind for part in parts]:
        raise ConfigError("--autoscale: there are no rollouts to scale: run.elsewhere does not name them")
    jobs = [_job_name(options, part.kind) for part in parts]
    for part, name in zip(parts, jobs, strict=True):
        if jobs.count(name) > 1 or len(name) > LONGEST_OBJECT:
            raise ConfigError(
                f"run.elsewhere: the Job of {part.kind} would be called {name}, which must be one Job's alone, and at "
                f"most {LONGEST_OBJECT} long; call the scorer otherwise, or give a shorter --name"
            )
    return yaml.safe_dump_all(_objects(config, parts, options), sort_keys=False, width=120)


def listening_at(address: str) -> list[str]:
    """Overrides that put the head's broker and its weights at a pod's ``address``, whatever the config says."""
    return [f"broker.bind=tcp://{address}:{BROKER_PORT}", f"weights.host={address}"]


def object_name(text: str) -> str:
    """``text`` as objects may be called. Raises `ConfigError` where it cannot be."""
    made = _dashed(text)
    if not made or len(made) > LONGEST_NAME:
        raise ConfigError(f"--name: {text!r} cannot name an object: letters, digits and -, at most {LONGEST_NAME}")
    return made


def _dashed(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _job_name(options: Options, kind: str) -> str:
    return f"{options.object}-{_dashed(kind)}"


def bounds(text: str | None) -> tuple[int, int] | None:
    """``0:8`` as two numbers. Raises `ConfigError`."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text)
    least, most = (int(found[1]), int(found[2])) if found else (1, 0)
    if least > most or not most:
        raise ConfigError(f"--autoscale: {text!r} are not least and most rollouts; e.g. 0:8")
    return least, most


def _objects(config: Config, parts: list[Part], options: Options) -> Iterator[Manifest]:
    needs = host_needs(config)
    shm = needs.compose(config)[SHM] if needs else LEAST_SHM
    data = {"config.yaml": dump(config)}
    yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(options, options.object), "data": data}
    if not options.claim:
        yield _claim(options)
    yield _policy(options)
    if options.autoscale:
        yield _metrics(options)
    for part in parts:
        if part.kind == "head":
            yield _job(options, part.kind, _head(options, part, shm), HEAD_GRACE_S, backoffLimit=RESTARTS)
        elif part.kind == "rollout" and options.autoscale:
            pod = [_waiting(options, part, shm), _member(options, part, shm)]
            yield _deployment(options, _pod(options, part.kind, pod, GRACE_S, "Always"))
            yield _scaled(config, options, part)
        else:
            grace_s = max(GRACE_S, round(registry.actors(config)[part.kind].grace_s) + 30)
            pod, restarts = [_waiting(options, part, shm), _member(options, part, shm)], RESTARTS * part.tasks
            yield _job(options, part.kind, pod, grace_s, parallelism=part.tasks, backoffLimit=restarts)


def _labels(options: Options, kind: str | None = None) -> dict[str, str]:
    own = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": options.name}
    return own | ({"app.kubernetes.io/component": kind} if kind else {})


def _metadata(options: Options, name: str, kind: str | None = None) -> Manifest:
    where = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **where, "labels": _labels(options, kind)}


def _claim(options: Options) -> Manifest:
    spec: Manifest = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": options.storage}},
    }
    if options.storage_class:
        spec["storageClassName"] = options.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(options, options.object),
        "spec": spec,
    }


def _policy(options: Options) -> Manifest:
    """The run's pods hear each other alone, and who scrapes: gloo and NCCL know no keys."""
    own = {"podSelector": {"matchLabels": _labels(options)}}
    rules: list[Manifest] = [{"from": [own]}]
    if options.autoscale:
        rules.append({"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]})
    spec = {**own, "policyTypes": ["Ingress"], "ingress": rules}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(options, options.object),
        "spec": spec,
    }


def _metrics(options: Options) -> Manifest:
    """What a Prometheus scrapes that looks for this annotation."""
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
    port = {"name": "metrics", "port": METRICS_PORT, "targetPort": METRICS_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(options, options.object) | {"annotations": scraped},
        "spec": {"selector": _labels(options, "head"), "ports": [port]},
    }


def _job(options: Options, kind: str, containers: list[Manifest], grace_s: int, **spec: Any) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(options, _job_name(options, kind), kind),
        "spec": {**spec, "template": _pod(options, kind, containers, grace_s, "OnFailure")},
    }


def _deployment(options: Options, pod: Manifest) -> Manifest:
    """Without a number: that is KEDA's to say."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(options, f"{options.object}-rollout", "rollout"),
        "spec": {"selector": {"matchLabels": _labels(options, "rollout")}, "template": pod},
    }


def _scaled(config: Config, options: Options, part: Part) -> Manifest:
    """As many rollouts as the groups that are leased fill; one while there are none, and none once the run is over."""
    assert options.autoscale
    least, most = options.autoscale
    held = max(1, getattr(config.rollout.engine, "max_sequences", 1) // config.rollout.sampling.n) * part.each
    this = f'penstock_run_info{{run="{options.name}"}}'
    query = f'sum(penstock_groups{{state="leased"}} and on(instance) {this}) + count({this})'
    trigger = {
        "type": "prometheus",
        "metadata": {
            "serverAddress": options.prometheus,
            "query": query,
            "threshold": f"{max(1.0, FULL * held):g}",
            "ignoreNullValues": "true",
        },
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": _metadata(options, f"{options.object}-rollout", "rollout"),
        "spec": {
            "scaleTargetRef": {"name": f"{options.object}-rollout"},
            "minReplicaCount": least,
            "maxReplicaCount": most,
            "cooldownPeriod": 300,
            "triggers": [trigger],
        },
    }


def _pod(options: Options, kind: str, containers: list[Manifest], grace_s: int, restart: str) -> Manifest:
    first = [container for container in containers if container["name"] in ("prepare", "wait")]
    gone = [f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable")]
    claim = {"claimName": options.claim or options.object}
    (shm,) = {entry["value"] for c in containers for entry in c["env"] if entry["name"] == SHM}
    spec: Manifest = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would set VLLM_PORT
        "shareProcessNamespace": True,  # the pause process buries the dead, of whom vLLM and rewards leave some
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_GONE_S} for key in gone
        ]
        + [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        **({"initContainers": first} if first else {}),
        "containers": [container for container in containers if container not in first],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": claim},
            {"name": "config", "configMap": {"name": options.object}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm.replace("g", "Gi")}},
        ],
    }
    return {"metadata": {"labels": _labels(options, kind)}, "spec": spec}


def _head(options: Options, part: Part, shm: str) -> list[Manifest]:
    arguments = ["prepare", "/config/config.yaml", *listening_at("$(POD_IP)"), "--folder", options.folder, "--tell"]
    prepare = _container(options, "prepare", arguments, shm)
    command = [*head_arguments(options.folder), *listening_at("$(POD_IP)")]
    if options.autoscale:
        command.append(f"run.prometheus=0.0.0.0:{METRICS_PORT}")
    needs = {"resources": _resources(part)}
    return [prepare | needs, _container(options, "run", command, shm) | needs]


def _waiting(options: Options, part: Part, shm: str) -> Manifest:
    """Until the head's pod has made the run's folder, or has said there that it refuses to, as who joins then sees."""
    file, refused = f"{options.folder}/config.yaml", f"{options.folder}/summary.json"
    there = f"[ -f {file} ] || [ -f {refused} ]"
    look = f"for i in $(seq {PATIENCE_S // 2}); do {there} && exit 0; sleep 2; done"
    script = f"trap exit TERM; {look}; echo no {file}; exit 1"
    own = {"command": ["sh", "-c", script], "resources": _resources(part)}  # a quota may refuse a pod without
    return _container(options, "wait", [], shm) | own


def _member(options: Options, part: Part, shm: str) -> Manifest:
    command = [*member_arguments(options.folder, part, "$(POD_NAME)"), "--failed-patience", str(FAILED_S)]
    command.append("weights.host=$(POD_IP)")
    container = _container(options, _dashed(part.kind), command, shm) | {"resources": _resources(part)}
    if options.secret:  # the store is the head's alone
        container["env"].append({"name": STORE, "value": ""})
    return container


def _container(options: Options, name: str, arguments: list[str], shm: str) -> Manifest:
    from_pod = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
    pull = options.pull or ("Always" if _is_pulled(options.image) else None)
    secret = {"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}
    return {
        "name": name,
        "image": options.image,
        **({"imagePullPolicy": pull} if pull else {}),
        "args": arguments,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # for `kubectl describe pod`: why it was refused
        "env": [
            *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in from_pod.items()),
            {"name": SHM, "value": shm},
            {"name": "HF_HOME", "value": f"{HOME}/runs/models"},
            {"name": "VLLM_CACHE_ROOT", "value": f"{HOME}/runs/models/vllm"},
        ],
        **secret,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": f"{HOME}/runs"},
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _is_pulled(image: str) -> bool:
    """It comes from a registry, by a tag, which may be another image's by now: nodes would keep the one that they had.
    One without a registry was loaded into the nodes."""
    return "/" in image and "@" not in image and not image.startswith("localhost/")


def _resources(part: Part) -> Manifest:
    """CPUs and memory are asked for, GPUs are given whole."""
    memory = {"memory": f"{part.memory_gib}Gi"} if part.memory_gib else {}
    requests = {"cpu": str(part.cpus), **memory}
    gpus = {"limits": {"nvidia.com/gpu": part.gpus}} if part.gpus else {}
    return {"requests": requests, **gpus}
