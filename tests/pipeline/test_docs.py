"""What the docs say is there."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.pipeline.config import Config, parse
from penstock.services.reward.config import REGISTRY
from penstock.services.runtime.custom_scorer import BUILT_IN
from tests.e2e.documented import documented
from tests.pipeline.command_page import command_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]


def test_every_metric_that_is_documented_is_one_of_the_code() -> None:
    code = "\n".join(
        path.read_text() for folder in ("services", "pipeline", "protocols") for path in (ROOT / folder).rglob("*.py")
    )
    names = {re.split("[A-Z]", name)[0].rstrip("/_") for found in documented().values() for name in found}
    assert len(names) > 100
    written = {name for name in names if not re.search(rf"\b{re.escape(name)}\b", code)}
    built = {f"mismatch_{name}" for name in re.findall(r'"(\w+)"', code)} | {"is_weight"}
    assert not written - built


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_docs_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page.name}: {target}"


def test_where_others_keys_go_there_is_one() -> None:
    keys = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE))
    known = {key.rsplit(".", parts)[0] for key in keys for parts in range(key.count(".") + 1)}
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("moving", "moving-others"))
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", pages, re.MULTILINE)
    named = {key for row in rows for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]*)?`", row)}
    assert len(named) > 50 and not named - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_docs_show_of_a_config_is_one(page: Path) -> None:
    base = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    base["rollout"]["engine"]["max_length"] = 16384  # for answers as long as the docs'
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if set(re.findall(r"^(\w+):", block, re.MULTILINE)) <= Config.model_fields.keys():
            shown = yaml.safe_load(block)
            prompts = base["prompts"] | shown.get("prompts", {})
            asked = "function: environment" in block and "rollout" not in shown
            agents = {"gateway": {"count": 1}} if asked else {}  # who may give it
            parse(base | agents | shown | {"prompts": prompts})


def test_options_of_what_scores_are_those_that_it_takes() -> None:
    takes, told, of = {}, {}, ""
    for name, path in {**REGISTRY, **BUILT_IN}.items():
        module, _, called = path.removeprefix("penstock.").partition(":")
        for option, default in _signature(ROOT / f"{module.replace('.', '/')}.py", called):
            if option not in ("self", "response", "response_tokens", "prompt", "truth"):
                takes[name, option] = default
    for first, option, default in re.findall(
        r"^\|(.*)\| `(\w+)` \| (.+) \| .+ \|$", (ROOT / "docs" / "scoring.md").read_text(), re.MULTILINE
    ):
        of = first.strip("` ") or of
        told[of, option] = default.strip("`")
    assert told.keys() == takes.keys()
    assert all(default in (None, told[key]) for key, default in takes.items())


def _signature(file: Path, called: str) -> list[tuple[str, str | None]]:
    """Names and defaults, as YAML has them; None: one that is made elsewhere. Nothing is imported."""
    (found,) = (node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == called)
    if isinstance(found, ast.ClassDef):
        (found,) = (node for node in found.body if getattr(node, "name", "") == "__init__")
    assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
    names = [argument.arg for argument in found.args.args]
    given = [_shown(default) for default in found.args.defaults]
    return list(zip(names, ["*required*"] * (len(names) - len(given)) + given, strict=True))


def _shown(default: ast.expr) -> str | None:
    if not isinstance(default, ast.Constant):
        return None
    return default.value if isinstance(default.value, str) else json.dumps(default.value)


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    code = [path for folder in ("services", "pipeline") for path in (ROOT / folder).rglob("*.py")]
    told = [*PAGES, *(ROOT / "configs").glob("*.yaml"), *(path for path in code if path.name != "install.py")]
    assert not [str(path) for path in told if re.search(r"pip install \S*penstock", path.read_text())]


def test_the_readme_names_no_run_that_it_does_not_make() -> None:
    text = (ROOT / "README.md").read_text()
    made = {"NAME", *re.findall(r"run\.name=([\w-]+)", text)}
    assert set(re.findall(r"\bruns/([\w-]+)", text)) <= made


def test_the_page_of_commands_is_what_they_say_of_themselves() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == command_page(), "make commands-page"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "commands.md"], ids=lambda page: page.name)
def test_docs_are_wrapped(page: Path) -> None:
    code = False
    for line in page.read_text().splitlines():
        code ^= line.lstrip().startswith("```")
        assert code or line.startswith("|") or len(line) <= 120, f"{page.name}: {line}"
