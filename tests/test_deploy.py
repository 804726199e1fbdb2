"""What `deploy/` says agrees with what kvrag offers."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from typer.main import get_command

from kvrag.cli.main import app
from kvrag.errors import ParameterError
from kvrag.server.access import ApiKey, read_keys
from kvrag.server.app import ServerOptions
from kvrag.server.metrics import ServerMetrics
from kvrag.server.queue import AnswerQueue
from tests.support.api_server import serving
from tests.support.rag import make_index

DEPLOY = Path(__file__).parents[1] / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()


def test_each_figure_of_the_dashboard_is_one_that_the_server_counts(tmp_path: Path) -> None:
    with make_index(tmp_path) as index:
        metrics = ServerMetrics(index)
        metrics.watch(AnswerQueue(lambda: 0.0))
        text = metrics.text().decode()
    offered = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    offered |= {f"{name}_{end}" for name in offered for end in ("bucket", "sum", "count")}
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "kvrag.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"kvrag_\w+", target["expr"])
    }
    assert len(asked) > 8
    assert asked <= offered


def test_the_container_installs_extras_that_exist() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'\.\[(.*)\]'", CONTAINERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_the_services_agree_with_each_other() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": ["kvrag:8000"]}]
    assert "kvrag" in compose["services"]
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert scraped["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert compose["secrets"][secret] == {"environment": "KVRAG_SERVER_KEY"}
    for service in compose["services"].values():
        # Nothing listens beyond this machine.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists()
            else:
                assert source in compose["volumes"]


def test_the_container_is_well_made() -> None:
    beside = Path(sys.executable).parent / "hadolint"
    lint = shutil.which("hadolint") or shutil.which(beside)
    if lint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [lint, "-"], input=CONTAINERFILE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


CHART = DEPLOY / "helm"
INDEX = "s3://bucket/my-index?region=eu-west-1"
VALUES = {"image": "example/kvrag:1", "index": INDEX, "secret": "kvrag"}
NEEDS_HELM = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def helm(*arguments: str, **values: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["helm", *arguments, "--values", "-"],
        input=yaml.safe_dump(values),
        capture_output=True,
        text=True,
        check=False,
    )


def rendered(**values: Any) -> dict[tuple[str, str], Any]:
    """Return the chart's objects by their kind and name."""
    done = helm("template", "kvrag", str(CHART), **VALUES, **values)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.safe_load_all(done.stdout) if one]
    named = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(named) == len(objects)
    return named


def pods(objects: dict[tuple[str, str], Any]) -> tuple[Any, Any]:
    """Return the pod of a server, and that of the proxy."""
    found = (objects["StatefulSet", "kvrag"], objects["Deployment", "kvrag-proxy"])
    return found[0]["spec"]["template"], found[1]["spec"]["template"]


def variables(container: Any) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container.get("env", ())}


@NEEDS_HELM
def test_helm_finds_no_fault_in_the_chart() -> None:
    more = {"serviceMonitor": {"enabled": True}, "keys": "kvrag-keys"}
    for values in ({}, VALUES, {**VALUES, **more}):
        done = helm("lint", "--strict", str(CHART), **values)
        assert done.returncode == 0, done.stdout


@NEEDS_HELM
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"index": ""}, "index"),
        ({"index": "/data/index"}, "index"),
        ({"secret": ""}, "secret"),
        ({"replicas": 1}, "replicas"),
        ({"replica": 3}, "replica"),
    ],
)
def test_the_chart_refuses_values_that_would_do_harm(wrong: dict[str, Any], named: str) -> None:
    done = helm("template", "kvrag", str(CHART), **{**VALUES, **wrong})
    assert done.returncode
    assert named in done.stderr


@NEEDS_HELM
@pytest.mark.parametrize("replicas", [2, 4])
def test_the_proxy_of_the_chart_routes_to_each_replica_as_haproxy_cfg_says(replicas: int) -> None:
    objects = rendered(replicas=replicas)
    server, proxy = pods(objects)
    (container,) = proxy["spec"]["containers"]
    config = objects["ConfigMap", "kvrag-proxy"]["data"]["haproxy.cfg"]
    shared = (DEPLOY / "haproxy.cfg").read_text()
    assert config.startswith(shared)
    assert len(config[len(shared) :].splitlines()) == replicas - 2
    addresses = variables(container)
    assert set(re.findall(r'"\$\{(\w+)\}"', config)) == set(addresses)
    assert addresses.pop("LISTEN") == f":{container['ports'][0]['containerPort']}"
    assert objects["StatefulSet", "kvrag"]["spec"]["replicas"] == len(addresses) == replicas
    for number, address in enumerate(sorted(addresses.values())):
        name, _, port = address.partition(":")
        service = objects["Service", name]["spec"]
        assert [one["port"] for one in service["ports"]] == [int(port)]
        # The label of one pod of the set, which Kubernetes gives it.
        pod = {"statefulset.kubernetes.io/pod-name": f"kvrag-{number}"}
        assert service["selector"] == {**server["metadata"]["labels"], **pod}
    assert objects["Service", "kvrag"]["spec"]["selector"] == proxy["metadata"]["labels"]


@NEEDS_HELM
def test_the_server_takes_what_the_chart_says(tmp_path: Path) -> None:
    key = "k" * 20
    objects = rendered(
        model="smollm2-135m", args=["--audit=0.05"], serviceMonitor={"enabled": True}
    )
    server, _ = pods(objects)
    (container,) = server["spec"]["containers"]
    (first,) = server["spec"]["initContainers"]
    given = [_parsed(one["args"]) for one in (first, container)]
    assert given[0]["name"] == "smollm2-135m"
    assert given[1]["audit"] == 0.05
    opening = given[1]
    assert opening["index"] == INDEX
    assert opening["store"].endswith("|s3://bucket/my-index/kv?region=eu-west-1")
    assert server["spec"]["terminationGracePeriodSeconds"] > opening["grace"] + 10
    monitor = objects["ServiceMonitor", "kvrag"]["spec"]
    scraped = [
        one["metadata"]["name"]
        for one in objects.values()
        if one["kind"] == "Service"
        and monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    ]
    assert scraped == ["kvrag-replicas"]
    (metrics,) = monitor["endpoints"]
    assert metrics["authorization"]["credentials"] == {"name": "kvrag", "key": "KVRAG_SERVER_KEY"}
    assert container["envFrom"] == [{"secretRef": {"name": "kvrag"}}]
    options = ServerOptions(keys=(ApiKey(name="ada", key=key),), is_local=False)
    with make_index(tmp_path) as index, serving(index, options) as running:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = container[probe]["httpGet"]["path"]
            urlopen(f"{running.server.url}{path}", timeout=60).close()
        headers = {"Authorization": f"Bearer {key}"}
        urlopen(Request(running.server.url + metrics["path"], headers=headers), timeout=60).close()


@NEEDS_HELM
def test_keys_reach_the_server_as_a_file_of_its_user(tmp_path: Path) -> None:
    server, _ = pods(rendered(keys="kvrag-keys"))
    (container,) = server["spec"]["containers"]
    (copying,) = server["spec"]["initContainers"]
    volumes = {one["name"]: one for one in server["spec"]["volumes"]}
    assert volumes["secret"]["secret"] == {"secretName": "kvrag-keys"}
    mounted = {one["mountPath"]: one["name"] for one in copying["volumeMounts"]}
    *command, source, target = copying["command"]
    assert (mounted["/secret"], mounted["/keys"]) == ("secret", "keys")
    assert {"name": "keys", "mountPath": "/keys", "readOnly": True} in container["volumeMounts"]
    assert _parsed(container["args"])["keys"] == Path(target)
    for path in (source, target):
        (tmp_path / path[1:]).parent.mkdir()
    held = tmp_path / "keys.toml"
    held.write_text('[[keys]]\nname = "ada"\nkey = "key-of-ada-0123456789"\n')
    held.chmod(0o440)
    (tmp_path / source[1:]).symlink_to(held)  # as in a pod
    with pytest.raises(ParameterError, match="other users"):
        read_keys(held)
    subprocess.run([*command, tmp_path / source[1:], tmp_path / target[1:]], check=True)
    assert [one.name for one in read_keys(tmp_path / target[1:])] == ["ada"]


def _parsed(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters of a command line of kvrag, which has no others."""
    command: Any = get_command(app)
    context = None
    while hasattr(command, "get_command"):
        context = command.make_context(command.name, arguments[:1], parent=context)
        name, *arguments = arguments
        command = command.get_command(context, name)
    with command.make_context(name, arguments, parent=context) as parsed:
        assert parsed.args == []
        return dict(parsed.params)


@NEEDS_HELM
def test_the_containers_of_the_chart_write_to_volumes_alone() -> None:
    for values in ({"model": "smollm2-135m"}, {"volume": {"persistent": True}, "keys": "a"}):
        objects = rendered(**values)
        assert not any(kind in ("Secret", "ServiceMonitor") for kind, _ in objects)
        claims = objects["StatefulSet", "kvrag"]["spec"].get("volumeClaimTemplates", [])
        for pod in pods(objects):
            spec = pod["spec"]
            assert spec["securityContext"]["runAsNonRoot"]
            assert spec["securityContext"]["runAsUser"] > 0
            # Else a service called kvrag would set variables that are kvrag's.
            assert spec["enableServiceLinks"] is False
            volumes = {one["name"] for one in spec["volumes"]}
            volumes |= {one["metadata"]["name"] for one in claims}
            for container in spec["containers"] + spec.get("initContainers", []):
                assert container["securityContext"]["readOnlyRootFilesystem"]
                assert not container["securityContext"]["allowPrivilegeEscalation"]
                assert set(container["resources"]) == {"requests", "limits"}
                mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
                assert set(mounts.values()) <= volumes
                for value in variables(container).values():
                    assert not value.startswith("/") or f"/{value.split('/')[1]}" in mounts
    user = re.search(r"--uid (\d+)", CONTAINERFILE)
    assert user
    assert pods(rendered())[0]["spec"]["securityContext"]["runAsUser"] == int(user[1])
