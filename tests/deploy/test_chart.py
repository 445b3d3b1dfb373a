"""The chart, rendered by Helm's own code and held against Kubernetes' schemas and against tierfs itself."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mount.cli.main import build_parser
from tests.conftest import repository
from tests.deploy.pods import POD_FLAGS
from tierfs.settings_sources import load_settings
from tierfs.units import parse_size

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this machine")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = repository() / "deploy/kubernetes/tierfs"
EXAMPLES = repository() / "deploy/kubernetes/examples"
OLDEST = "1.25"

ALL = {
    "imagePullSecrets": [{"name": "registry"}],
    "cluster": {"domainLabel": "topology.kubernetes.io/zone"},
    "settings": {
        "object": "s3://bucket/ckpt",
        "persist": {"policy": "every", "every_steps": 5},
        "namespaces": {"scratch/*": {"persist": {"policy": "none"}}},
    },
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::111122223333:role/tierfs"}},
    "extraEnv": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    "nodeSelector": {"node.kubernetes.io/instance-type": "p5.48xlarge"},
    "priorityQuota": True,
    "metrics": {"enabled": True, "annotations": {"prometheus.io/scrape": "true"}},
    "networkPolicy": {
        "enabled": True,
        "nodeCIDRs": ["10.0.0.0/16"],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
    "podDisruptionBudget": {"minAvailable": 3},
    "etcd": {"tlsSecret": "etcd-tls", "storage": {"className": "gp3"}},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": ALL,
    "certificates": {"cluster": {"tlsSecret": "node-tls"}, "update": {"maxSurge": "10%"}},
    "pods' network": {**ALL, "hostNetwork": False, "reservation": {"enabled": False}, "watchdogSeconds": 0},
    "external etcd": {
        "etcd": {"enabled": False},
        "externalEtcd": {
            "endpoints": ["a.example:2379", "b.example:2379"],
            "user": "tierfs",
            "passwordSecret": "etcd-password",
            "tlsSecret": "etcd-client",
        },
        "cluster": {"existingSecret": "ours"},
    },
    "each node alone": {"etcd": {"enabled": False}},
    "one etcd in memory": {"etcd": {"replicas": 1, "storage": {"size": ""}}},
}
GIVEN_SECRETS = {"etcd-tls", "node-tls", "etcd-password", "etcd-client", "ours"}

Manifest = dict[str, Any]


def rendered(values: dict[str, Any], release: str = "tierfs") -> list[Manifest]:
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=release, namespace="ml")
    found = [yaml.safe_load_all(text) for path, text in files.items() if path.endswith(".yaml")]
    return [document for documents in found for document in documents if document]


@pytest.fixture(params=CASES, name="case")
def each_case(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def the(manifests: list[Manifest], kind: str, component: str = "daemon") -> Manifest:
    found = [
        one
        for one in manifests
        if one["kind"] == kind and one["metadata"]["labels"].get("app.kubernetes.io/component", "daemon") == component
    ]
    assert len(found) == 1, f"{kind} of {component}: {len(found)}"
    return found[0]


def pod_of(manifest: Manifest) -> Manifest:
    pod: Manifest = manifest["spec"]["template"]["spec"]
    return pod


def container(manifests: list[Manifest]) -> Manifest:
    (found,) = pod_of(the(manifests, "DaemonSet"))["containers"]
    assert isinstance(found, dict)
    return found


def validate(manifest: Manifest) -> None:
    for version in (OLDEST, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_lint_finds_nothing() -> None:
    said = helm.lint(str(CHART))
    assert [one for one in said["messages"] if one["severity"] > 1] == [], said


def test_manifests_are_what_kubernetes_takes(case: str) -> None:
    manifests = rendered(CASES[case])
    assert len(manifests) >= 3
    for manifest in manifests:
        validate(manifest)
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)


def test_what_is_referred_to_is_there(case: str) -> None:
    manifests = rendered(CASES[case])
    made = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    for manifest in manifests:
        if "template" not in manifest.get("spec", {}):
            continue
        template, pod = manifest["spec"]["template"], pod_of(manifest)
        labels = template["metadata"]["labels"]
        assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys(), "each release would restart the pods"
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", [])}
        assert mounted == volumes
        for volume in pod.get("volumes", []):
            if secret := volume.get("secret"):
                name = secret["secretName"]
                assert ("Secret", name) in made or name in GIVEN_SECRETS, name
            if configuration := volume.get("configMap"):
                assert ("ConfigMap", configuration["name"]) in made
        account = pod.get("serviceAccountName")
        assert account is None or ("ServiceAccount", account) in made
        if service := manifest["spec"].get("serviceName"):
            assert ("Service", service) in made
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in manifests if "template" in one.get("spec", {})]
    for manifest in manifests:
        if manifest["kind"] == "Service":
            selector = manifest["spec"]["selector"]
        elif manifest["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            selector = (manifest["spec"].get("podSelector") or manifest["spec"]["selector"])["matchLabels"]
        else:
            continue
        assert sum(selector.items() <= labels.items() for labels in pods) == 1, manifest["metadata"]["name"]


def test_the_settings_are_what_tierfs_takes(case: str, tmp_path: Path) -> None:
    manifests = rendered(CASES[case])
    one = container(manifests)
    file = tmp_path / "tierfs.toml"
    file.write_text(the(manifests, "ConfigMap")["data"]["tierfs.toml"])
    environment = {each["name"]: each.get("value", "from-a-field") for each in one["env"]}
    assert environment.pop("TIERFS_CONFIG") == "/etc/tierfs/tierfs.toml"
    settings = load_settings(file, environment, [], {})
    assert settings.warnings == []
    assert settings.size == 64 << 30 and settings.name == "ckpt" and settings.node == "from-a-field"
    given = CASES[case]
    assert bool(settings.catalog) == ("alone" not in case)
    if "persist" in given.get("settings", {}):
        assert settings.persist.every_steps == 5 and settings.for_namespace("scratch/a").persist.policy == "none"
    assert settings.object == given.get("settings", {}).get("object", "")
    assert settings.metrics.listen == (":7118" if given.get("metrics") else "")
    mounts = {mount["mountPath"] for mount in one["volumeMounts"]}
    cluster, etcd = settings.cluster, settings.etcd
    files = [cluster.secret_file, cluster.tls_cert, cluster.tls_key, cluster.tls_ca]
    for path in filter(None, [*files, etcd.password_file, etcd.ca, etcd.cert, etcd.key]):
        assert str(path.parent) in mounts, path
    assert bool(cluster.secret_file or cluster.tls_cert) == bool(settings.catalog), "nodes let each other in"


def test_the_command_is_one_of_tierfs(case: str) -> None:
    one = container(rendered(CASES[case]))
    program, *arguments = [*one["command"], *one["args"]]
    given = build_parser().parse_args(arguments)
    assert program == "tierfs" and str(given.mountpoint) == "/var/lib/tierfs/mnt/ckpt"
    assert given.foreground and given.replace
    assert given.watchdog == (60 if "network" not in case else None)
    assert {flag.split("=")[0] for flag in one["args"]} >= set(POD_FLAGS), "test_pods runs pods with the same"
    pod_directory = str(given.ready_file.parent)
    assert one["readinessProbe"]["exec"]["command"] == ["test", "-e", str(given.ready_file)]
    (volume,) = [mount["name"] for mount in one["volumeMounts"] if mount["mountPath"] == pod_directory]
    volumes = {each["name"]: each for each in pod_of(the(rendered(CASES[case]), "DaemonSet"))["volumes"]}
    assert "emptyDir" in volumes[volume], "each pod has its own"


def test_an_update_finds_room_and_takes_the_mount(case: str) -> None:
    """What a rolling update without a break stands on; test_pods has seen it go wrong and right."""
    manifests = rendered(CASES[case])
    daemons = the(manifests, "DaemonSet")
    pod, one = pod_of(daemons), container(manifests)
    rolling = daemons["spec"]["updateStrategy"]
    assert rolling["type"] == "RollingUpdate" and rolling["rollingUpdate"]["maxUnavailable"] == 0
    assert rolling["rollingUpdate"]["maxSurge"]
    assert pod["hostPID"] is True and one["securityContext"]["privileged"] is True
    assert "ports" not in one, "with the host's network two pods with the same port fit on no node"
    assert "livenessProbe" not in one and "startupProbe" not in one, "a restarted container ends the mount"
    assert "memory" not in one["resources"].get("limits", {}), "it would limit the tier"
    assert parse_size(one["resources"]["requests"]["memory"] + "B") <= 64 << 20, "two of them are there at a time"
    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
    shared = {mount["mountPath"]: mount.get("mountPropagation") for mount in one["volumeMounts"]}
    assert shared["/var/lib/tierfs/mnt"] == shared["/run/tierfs"] == "Bidirectional"
    assert pod["terminationGracePeriodSeconds"] >= 600 + 60 + 2 * 90, "as long as a daemon may send and hand over"


def test_the_ram_tier_is_asked_for_once_a_node() -> None:
    manifests = rendered({"ramTier": {"size": "200Gi", "overhead": "6Gi"}, "nodeSelector": {"gpu": "yes"}})
    memory, daemons = pod_of(the(manifests, "DaemonSet", "memory")), pod_of(the(manifests, "DaemonSet"))
    asked = [parse_size(each["resources"]["requests"]["memory"] + "B") for each in memory["containers"]]
    assert sum(asked) == 206 << 30
    for key in ("nodeSelector", "tolerations", "priorityClassName"):
        assert memory[key] == daemons[key], key
    assert not [one for one in rendered(CASES["pods' network"]) if one["metadata"]["name"].endswith("-memory")]


def test_changed_settings_are_rolled_out_and_others_are_not() -> None:
    def mark(values: dict[str, Any]) -> str:
        annotations = the(rendered(values), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/settings"])

    assert mark({}) == mark({"metrics": {"annotations": {"a": "b"}}})
    assert mark({}) != mark({"settings": {"retention": {"ram_steps": 3}}})


def test_a_generated_secret_is_one() -> None:
    secrets = [base64.b64decode(the(rendered({}), "Secret")["data"]["secret"]) for _ in range(2)]
    assert all(16 <= len(secret) <= 4096 for secret in secrets) and secrets[0] != secrets[1]
    assert not [one for one in rendered(CASES["external etcd"]) if one["kind"] == "Secret"]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"ramtier": {"size": "1Gi"}}, "ramtier"),
        ({"ramTier": {"size": "50%"}}, "size"),
        ({"settings": {"size": "1Gi"}}, "settings"),
        ({"settings": {"catalog": "etcd://x:1"}}, "settings"),
        ({"resources": {"limits": {"memory": "1Gi"}}}, "limits"),
        ({"etcd": {"replicas": 2}}, "replicas"),
        ({"update": {"maxSurge": 0}}, "maxSurge"),
        ({"instance": {"directory": "/"}}, "directory"),
    ],
)
def test_values_that_can_not_work_are_refused(values: dict[str, Any], word: str) -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError, match=word):
        chart.validate_schema(chart.merge_values(values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"etcd": {"storage": {"size": ""}}}, "can't join again"),
        ({"externalEtcd": {"endpoints": ["a:2379"]}}, "keep one"),
        ({"networkPolicy": {"enabled": True}}, "nodeCIDRs"),
        ({"etcd": {"enabled": False}, "externalEtcd": {"endpoints": ["a:1"], "user": "u"}}, "passwordSecret"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError, match=words):
        rendered(values)


def test_etcd_knows_its_flags() -> None:
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd: apt-get install etcd-server")
    said = subprocess.run(["etcd", "--help"], capture_output=True, text=True, timeout=20)
    known = set(re.findall(r"--([a-z0-9-]+)", said.stdout + said.stderr))
    (one,) = pod_of(the(rendered(ALL), "StatefulSet", "etcd"))["containers"]
    flags = {argument.removeprefix("--").split("=")[0] for argument in one["args"]}
    assert len(flags) > 15 and flags <= known, flags - known


def test_etcd_is_reached_by_its_members_names() -> None:
    """As the certificate in values.yaml must name them, and the settings do."""
    manifests = rendered({}, release="blue")
    etcd = the(manifests, "StatefulSet", "etcd")
    name, members = etcd["metadata"]["name"], range(etcd["spec"]["replicas"])
    assert name == "blue-tierfs-etcd"
    hosts = [f"{name}-{number}.{etcd['spec']['serviceName']}.ml.svc" for number in members]
    toml = the(manifests, "ConfigMap")["data"]["tierfs.toml"]
    assert f'"etcd://{",".join(host + ":2379" for host in hosts)}"' in toml
    (initial,) = [each for each in pod_of(etcd)["containers"][0]["args"] if each.startswith("--initial-cluster=")]
    expected = ",".join(f"{name}-{number}=http://{host}:2380" for number, host in zip(members, hosts, strict=True))
    assert initial == f"--initial-cluster={expected}"


def test_the_example_job_takes_what_the_chart_mounts() -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "training-job.yaml").read_text())
    for manifest in (service, job):
        validate(manifest)
    pod = pod_of(job)
    (host_path,) = [volume["hostPath"] for volume in pod["volumes"] if "hostPath" in volume]
    one = container(rendered({}))
    assert host_path == {"path": one["command"][-1], "type": "Directory"}, "it waits until tierfs is there"
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["/ckpt"]["mountPropagation"] == "HostToContainer"
    notes = (CHART / "templates/NOTES.txt").read_text()
    assert "type: Directory" in notes and "mountPropagation: HostToContainer" in notes
