"""docker-compose.yml as it is written: what no service may lack, in either profile. Needs no engine."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from penstock.pipeline.cli import app
from penstock.pipeline.config import load
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.runtime.plugins import load_plugin
from penstock.services.runtime.registry import SPECS
from penstock.services.runtime.user_folders import listed

ROOT = Path(__file__).parents[2]
FILE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
ACTORS = tuple(load_plugin(name, "actors").kind for name in SPECS)
"""A new actor is a service too."""
OWN = {"critic": "critic", "gateway": "agents"}
"""Services with a profile of their own."""


def kind(service: str) -> str:
    return service.removesuffix("-gpu")


def test_both_profiles_have_every_service() -> None:
    for profile, suffix in (("cpu", ""), ("gpu", "-gpu")):
        found = {name for name, service in SERVICES.items() if service["profiles"] == [profile]}
        assert found == {f"{name}{suffix}" for name in ("prepare", "redis", *ACTORS) if name not in OWN}
        for name, own in OWN.items():  # where a config has one
            assert SERVICES[f"{name}{suffix}"]["profiles"] == [f"{own}{suffix}"]
        assert SERVICES[f"player{suffix}"]["profiles"] == [f"players{suffix}"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"] and service["logging"]["options"]["max-size"]
    assert not service.get("privileged") and "docker.sock" not in str(service.get("volumes"))
    ports = service.get("ports", [])
    assert all(port.startswith("127.0.0.1:") for port in ports) and bool(ports) == (kind(name) in ("broker", "gateway"))


@pytest.mark.parametrize("name", [name for name in SERVICES if kind(name) != "redis"])
def test_whoever_may_open_a_gated_model_or_data_has_the_token(name: str) -> None:
    assert SERVICES[name]["environment"]["HF_TOKEN"] == "${HF_TOKEN:-}"
    assert SERVICES[name]["env_file"] == [{"path": "${PENSTOCK_ENV:-penstock.env}", "required": False}]
    assert "env_file" not in SERVICES["redis"], "which needs no secret"


@pytest.mark.parametrize("name", SERVICES)
def test_networks_are_as_the_docs_say(name: str) -> None:
    expected = {"rollout": {"control", "weights"}, "trainer": {"control", "weights"}}
    expected |= {
        "broker": {"control"},
        "reward": {"control"},
        "reference": {"control"},
        "critic": {"control"},
        "gateway": {"control"},
        "player": {"control"},
        "prepare": {"control"},
    }
    service = SERVICES[name]
    assert set(service.get("networks", [])) == expected.get(kind(name), set())
    assert (service.get("network_mode") == "none") == (kind(name) == "redis")
    assert ("socket:/run/redis" in service["volumes"]) == (kind(name) in ("broker", "redis"))
    assert FILE["networks"]["weights"]["internal"]


@pytest.mark.parametrize("name", [name for name in SERVICES if kind(name) in ACTORS])
def test_every_actor_is_watched_and_given_time(name: str) -> None:
    service = SERVICES[name]
    assert "PENSTOCK_HEALTH_FILE" in service["healthcheck"]["test"][1] and service["restart"].startswith("on-failure")
    assert int(service["stop_grace_period"].removesuffix("s")) >= (630 if kind(name) in ("trainer", "critic") else 60)
    assert all(at["condition"] == "service_healthy" for at in service["depends_on"].values())
    suffix = name.removeprefix(kind(name))
    assert all(f"{kind(other)}{suffix}" == other for other in service["depends_on"]), "its own profile's"


@pytest.mark.parametrize("name", [name for name in SERVICES if kind(name) != "redis"])
def test_every_command_is_one_of_ours(name: str) -> None:
    command = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", SERVICES[name]["command"])
    sub, *arguments = shlex.split(command)
    group = typer.main.get_command(app)
    assert hasattr(group, "commands")
    context = group.commands[sub].make_context(sub, arguments, resilient_parsing=False)
    if sub == "play":
        assert context.params["run"] == "/penstock/runs/compose" and context.params["environment"] == "tools"
        return
    assert Path(str(context.params.get("file") or context.params["config"])).name in (
        "quickstart.yaml",
        "grpo-0.5b.yaml",
        "config.yaml",
    )


@pytest.mark.parametrize("name", [name for name in SERVICES if name.endswith("-gpu")])
def test_gpus_are_reserved_where_they_are_used(name: str) -> None:
    service = SERVICES[name]
    uses = kind(name) in ("rollout", "trainer", "critic", "reference")
    assert ("deploy" in service) == uses
    if uses:
        assert service["image"] == "penstock:gpu" and service["environment"]["PENSTOCK_CLAIM_GPUS"] == "/dev/shm"
        assert "shm:/dev/shm" in service["volumes"]


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda file: file.stem)
def test_an_image_has_what_a_config_needs(file: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(names: str) -> set[str]:
        found = {package for name in names.split(",") for package in extras[name]}
        own = {package for package in found if package.startswith("penstock[")}
        return (found - own).union(*(packages(package[9:-1]) for package in own))

    config = load(file)
    (needs,) = re.findall(r"^# Needs: pip install -e '.\[([^]]*)\]'", file.read_text(), re.MULTILINE) or ["quickstart"]
    assert (config.trainer.lora is not None) == (set(extras["lora"]) <= packages(needs))
    gpu = isinstance(config.rollout.engine, VllmEngineConfig)
    (held,) = re.findall(r"^[\w,-]+", FILE["x-gpu" if gpu else "x-cpu"]["build"]["args"]["EXTRAS"])
    told = re.search(
        rf"`{file.relative_to(ROOT)}` wants `PENSTOCK_EXTRAS=([\w,-]+)`", (ROOT / "docs/deploy.md").read_text()
    )
    assert not packages(needs) - packages(f"{held},{told[1]}" if told else held)


def test_what_is_mounted_over_the_code_is_a_folder_and_has_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose takes a bare name for a volume's; examples/ is in no image."""
    pages = {page: page.read_text() for page in (ROOT / "docs").glob("*.md")}
    folders = [folder for text in pages.values() for folder in re.findall(r"PENSTOCK_CODE=([^\s`]+)", text)]
    assert len(folders) >= 3 and all(folder.startswith(("./", "/")) for folder in folders)
    agents = pages[ROOT / "docs" / "agents.md"]
    (config, code), (overrides,) = (
        re.findall(r"PENSTOCK_CONFIG=(\S+) PENSTOCK_CODE=(\S+)", agents)[0],
        re.findall(r'PENSTOCK_OVERRIDES="([^"]*)"', agents),
    )
    (told,) = re.findall(r"PENSTOCK_FOLDERS=(\S+)", (ROOT / "Dockerfile").read_text())
    monkeypatch.setenv("PENSTOCK_FOLDERS", shlex.split(told)[0])
    assert listed("PENSTOCK_FOLDERS") == ["/penstock/code"], "where the run's files and functions are looked for"
    monkeypatch.syspath_prepend(ROOT / code)  # as the image's PYTHONPATH
    assert callable(load_plugin(load(ROOT / config, overrides.split()).gateway.tool_calls, "gateway.tool_calls"))


def test_every_key_and_variable_is_explained() -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / "docs" / "deploy.md").read_text(), flags=re.S | re.M)
    told = {word for code in re.findall(r"`([^`\n]+)`", prose) for word in re.findall(r"\w+", code)}
    keys = {key for service in SERVICES.values() for key in service}
    variables = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    variables |= {name for service in SERVICES.values() for name in service.get("environment", {})}
    assert (keys | variables) - told == set()
