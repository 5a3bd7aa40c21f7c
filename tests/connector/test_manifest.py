"""manifest.json: true of this code, and every claim that is not is found."""

from __future__ import annotations

import copy
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from importlib.metadata import PackagePath
from pathlib import Path
from typing import Any, ClassVar

import pytest
from jsonschema import Draft202012Validator

from adapters import registry
from adapters.base import Capability
from connector import manifest as module
from connector.manifest import TIERS, ManifestError, check, load, package, source_root
from connector.schema_words import validator
from routing.model import Flag

ROOT = Path(__file__).parents[2]
Manifest = dict[str, Any]
FUB = "adapters.followupboss"


def test_the_manifest_is_true_of_this_code() -> None:
    assert [str(problem) for problem in check()] == []


def test_the_schema_is_a_schema() -> None:
    for name in ("manifest.schema.json", "config.schema.json"):
        Draft202012Validator.check_schema(validator(name).schema)


def test_what_the_plugin_says_of_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    manifest = load()
    assert (manifest["name"], manifest["version"]) == ("turnlock", project["version"])
    assert [flag["name"] for flag in manifest["flags"]] == [flag.value for flag in Flag]
    assert set(manifest["adapters"]) == set(registry.names())


# -- what is wrong is found -----------------------------------------------------------------------------------
def _fub(change: Callable[[Manifest], object]) -> Callable[[Manifest], object]:
    return lambda manifest: change(manifest["adapters"]["followupboss"])


def _generic(change: Callable[[Manifest], object]) -> Callable[[Manifest], object]:
    return lambda manifest: change(manifest["adapters"]["generic"])


def _parameter(name: str, **changes: object) -> Callable[[Manifest], object]:
    return lambda adapter: next(p for p in adapter["parameters"] if p["name"] == name).update(changes)


WRONG: list[tuple[Callable[[Manifest], object], str]] = [
    # shape
    (lambda m: m.update(extra=1), "extra: is not a known key"),
    (lambda m: m.pop("flags"), 'manifest.json: the key "flags" is missing'),
    (lambda m: m.update(version="1"), "version: does not have the right form"),
    (_fub(lambda a: a.update(tier="golden")), f'{FUB}.tier: "golden" is not a choice; did you mean "gold"?'),
    (_fub(lambda a: a.update(hosts=["https://api.example.com"])), f"{FUB}.hosts[0]: does not have the right form"),
    (_fub(lambda a: a["exemptions"].append({"claim": "sweep"})), f'{FUB}.exemptions[0]: the key "reason" is missing'),
    (_fub(lambda a: a["exemptions"].append({"claim": "sweep", "reason": "no"})), "reason: is shorter than 10"),
    (_fub(_parameter("system", help="")), f"{FUB}.parameters[2].help: is shorter than 10"),
    (lambda m: m["adapters"].update({"Big CRM": m["adapters"]["generic"]}), "right form; lower-case letters"),
    # against the package and the code
    (lambda m: m.update(version="9.9.9"), "version: is '9.9.9', the package says"),
    (lambda m: m.update(licence="MIT"), "licence: is 'MIT', the package says 'Apache-2.0'"),
    (lambda m: m.update(summary="Something else"), "summary: is 'Something else'"),
    (lambda m: m.update(entry_points={"turnlock": "other:main"}), "entry_points: is "),
    (
        lambda m: m["flags"].reverse(),
        "flags: are teams, settle, credits, capacity, households, skips, weights, rotation, rules, write_back",
    ),
    (
        lambda m: m["flags"].pop(),
        "flags: are write_back, rules, rotation, weights, skips, households, capacity, credits, settle; list",
    ),
    (lambda m: m["flags"][2].update(migration="0003_rotaton"), 'did you mean "0003_rotation"?'),
    (
        lambda m: m["flags"][1].update(migration="0006_skips_more"),
        "flags: do not stand in the order of their migrations",
    ),
    (lambda m: m["adapters"].pop("generic"), 'adapters: "generic" is in the registry but not here'),
    (lambda m: m["adapters"].update(other=m["adapters"]["generic"]), "adapters.other: is not in adapters/registry.py"),
    (_fub(lambda a: a["topics"].pop()), f'{FUB}.topics: "eventsCreated" of the code is missing'),
    (_fub(lambda a: a["topics"].append("dealsCreated")), f'{FUB}.topics: "dealsCreated" is not in the code'),
    (_fub(lambda a: a["capabilities"].remove("sweep")), f'{FUB}.capabilities: "sweep" of the code is missing'),
    (_fub(lambda a: a["capabilities"].append("signed_time")), f'{FUB}.capabilities: "signed_time" is not in the code'),
    (_fub(lambda a: a.update(hosts=["api.example.com"])), f"{FUB}.hosts: lacks the host of default_base_url"),
    (_fub(lambda a: a.update(hosts=["*", "api.followupboss.com"])), f'{FUB}.hosts: names hosts beside "*"'),
    (_generic(lambda a: a.update(hosts=["a.example.com"])), "generic.hosts: names hosts, but the adapter has no"),
    (_generic(_parameter("base_url", required=False)), 'generic.hosts: is "*" without a required parameter base_url'),
    (_fub(lambda a: a["verification"].update(secret="api_key")), 'the adapter\'s hook_secret is "system_key"'),
    (_fub(lambda a: a["verification"].update(signed_time=True)), "does not fit the capability signed_time"),
    (_fub(lambda a: a["verification"].update(headers=[])), "headers: is empty although webhooks are signed"),
    (_fub(lambda a: a["verification"].update(secret=None)), "secret: does not fit the capability signed_webhooks"),
    (_fub(lambda a: a["auth"][0].update(secret="system")), f'{FUB}.auth[0].secret: "system" is not a secure parameter'),
    (_fub(_parameter("api_key", secure=False)), f"{FUB}.parameters.api_key: is named like a secret and not secure"),
    (_fub(_parameter("api_key", default="x")), f"{FUB}.parameters.api_key: has a default although it is a secret"),
    (_fub(lambda a: a["parameters"].append(a["parameters"][2])), f'{FUB}.parameters: "system" stands twice'),
    # tiers
    (_fub(lambda a: a.update(tier="gold")), f'{FUB}.tier: "gold" claims live_run, which nothing bears out'),
    (
        _fub(lambda a: a["exemptions"].append({"claim": "replay_defence", "reason": "it is not needed"})),
        f'{FUB}.exemptions: "replay_defence" is borne out; remove the exemption',
    ),
    (
        _fub(lambda a: a["exemptions"].append({"claim": "swep", "reason": "a reason that is one"})),
        f'{FUB}.exemptions: "swep" is no claim of this tier',
    ),
]


@pytest.mark.parametrize(("change", "told"), WRONG, ids=[told for _, told in WRONG])
def test_a_false_claim_is_told(change: Callable[[Manifest], object], told: str) -> None:
    manifest = copy.deepcopy(load())
    change(manifest)
    problems = [str(problem) for problem in check(manifest)]
    assert any(told in problem for problem in problems), problems
    assert all(re.fullmatch(r".+: .+; .+", problem) for problem in problems)


def test_all_problems_are_told_at_once() -> None:
    manifest = copy.deepcopy(load())
    manifest["version"] = "9.9.9"
    manifest["flags"].reverse()
    manifest["adapters"]["followupboss"]["topics"] = []
    manifest["adapters"]["generic"]["capabilities"] = []
    assert len(check(manifest)) >= 1 + 1 + 4 + 15


# -- tiers are borne out by what is there ---------------------------------------------------------------------
class Unsigned(type(registry.adapter("followupboss"))):  # type: ignore[misc]
    capabilities: ClassVar = frozenset({Capability.EVENT_ID})
    hook_secret: ClassVar = None


def test_a_crm_that_cannot_sign_needs_an_exemption() -> None:
    manifest = copy.deepcopy(load())
    claims = manifest["adapters"]["followupboss"]
    claims["capabilities"] = ["event_id"]
    claims["verification"]["secret"] = None
    code = {name: registry.adapter(name) for name in registry.names()} | {"followupboss": Unsigned()}
    (problem,) = check(manifest, code)
    assert "claims signed_webhooks" in problem.what
    claims["exemptions"] = [{"claim": "signed_webhooks", "reason": "every lead is read again before anything is done"}]
    assert check(manifest, code) == []


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without any fixtures."""
    for name in ("pyproject.toml", "manifest.json"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    return tmp_path


def _silver(tier: str = "silver", page: str | None = None) -> Manifest:
    manifest = copy.deepcopy(load())
    manifest["adapters"] = {"followupboss": manifest["adapters"]["followupboss"]}
    manifest["adapters"]["followupboss"]["tier"] = tier
    if page:
        manifest["adapters"]["followupboss"]["docs"]["page"] = page
    return manifest


def _open_claims(manifest: Manifest) -> list[str]:
    problems = check(manifest, {"followupboss": registry.adapter("followupboss")})
    return [re.sub(r".* claims (\w+),.*", r"\1", problem.what) for problem in problems]


def test_silver_and_gold_want_what_was_captured(checkout: Path) -> None:
    folder = checkout / "tests" / "fixtures" / "followupboss"
    folder.mkdir(parents=True)
    topics = registry.adapter("followupboss").topics

    def fixtures(source: str, *names: str) -> None:
        for name in names:
            (folder / f"{name}.body").write_bytes(b"{}")
            (folder / f"{name}.json").write_text(json.dumps({"from": source, "topic": name, "events": []}))

    assert _open_claims(_silver()) == ["fixtures", "captured_fixtures"]
    fixtures("made from docs (https://docs.example.com), not captured", *topics)
    assert _open_claims(_silver()) == ["captured_fixtures"]
    fixtures("captured from a trial account", *topics)
    assert _open_claims(_silver()) == []
    (folder / "peopleCreated.body").unlink()
    assert _open_claims(_silver()) == ["fixtures", "captured_fixtures"]
    fixtures("captured from a trial account", *topics)
    page = "docs/followupboss.md"
    assert _open_claims(_silver("gold", page)) == ["guide", "live_run"]
    (checkout / "docs").mkdir()
    (checkout / page).write_text("# Follow Up Boss\n## Set-up\n## Removal\n")
    fixtures("captured from a trial account", "live_run")
    assert _open_claims(_silver("gold", page)) == []


def test_auth_that_expires_is_not_silver() -> None:
    manifest = _silver()
    manifest["adapters"]["followupboss"]["auth"][0]["expires"] = True
    assert "renewal" in _open_claims(manifest)


def test_every_claim_is_judged_in_a_checkout() -> None:
    adapter = registry.adapter("generic")
    judged = module._proven("generic", load()["adapters"]["generic"], adapter, ROOT)
    assert set(judged) == {claim for claims in TIERS.values() for claim in claims}


# -- where it is found ----------------------------------------------------------------------------------------
class Installed:
    """An installation as importlib.metadata shows it."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.files = [PackagePath(name) for name in names]
        for file in self.files:
            file.dist = self  # type: ignore[assignment]
        self.folder = folder

    def locate_file(self, path: PackagePath) -> Path:
        return self.folder / path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code that was installed from a wheel: no checkout around it."""
    monkeypatch.setattr(module, "_ROOT", tmp_path / "lib" / "site-packages")
    return tmp_path


def test_an_installed_manifest_is_found_by_the_record_of_its_wheel(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("connector/manifest.json", "../../share/turnlock/manifest.json")
    installed = Installed(wheel / "lib" / "site-packages", *names)
    monkeypatch.setattr(module, "distribution", lambda name: installed)
    (wheel / "lib" / "site-packages").mkdir(parents=True)
    (wheel / "share" / "turnlock").mkdir(parents=True)
    shutil.copy(ROOT / "manifest.json", wheel / "share" / "turnlock")
    assert source_root() is None
    assert load() == json.loads((ROOT / "manifest.json").read_text("utf-8"))


def test_a_manifest_that_was_not_installed_is_told(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "distribution", lambda name: Installed(wheel, "connector/__init__.py"))
    with pytest.raises(ManifestError, match="install turnlock again"):
        load()


def test_outside_a_checkout_the_installation_speaks_and_fixtures_are_not_asked_for(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source_root() is None
    assert package().scripts["turnlock"] == "connector.cli:main"
    manifest = json.loads((ROOT / "manifest.json").read_text("utf-8"))
    assert [p for p in check(manifest) if "adapters" in p.where] == []


def test_the_wheel_takes_the_manifest_along() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert tools["data-files"] == {"share/turnlock": ["manifest.json"]}
    assert "*.json" in tools["package-data"]["connector"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1, "name": 2}', "\xff"])
def test_a_manifest_that_cannot_be_read_is_told(checkout: Path, text: str) -> None:
    (checkout / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ManifestError, match="restore the file"):
        load()
