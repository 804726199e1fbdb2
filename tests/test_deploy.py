"""What `deploy/` says agrees with what kvrag offers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kvrag.server.metrics import ServerMetrics
from kvrag.server.queue import AnswerQueue
from tests.support.rag import make_index

DEPLOY = Path(__file__).parents[1] / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()


def test_each_figure_of_the_dashboard_is_one_that_the_server_counts(tmp_path: Path) -> None:
    with make_index(tmp_path) as index:
        text = ServerMetrics(index, AnswerQueue(lambda: 0.0)).text().decode()
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
