"""``manifest.json``: what the plugin is, read and held against the code.

The file stands at the root of the source, and in an installed wheel under ``share/turnlock`` of the environment.
:func:`check` proves what it claims as far as code can: what remains is written down there as an exemption.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast
from urllib.parse import urlsplit

from adapters import registry
from adapters.base import Adapter, Capability
from connector.schema_words import did_you_mean, faults, show
from migrations import versions
from routing.fields import Problem
from routing.model import Flag

_ROOT = Path(__file__).resolve().parent.parent
_SECRET_NAME = re.compile(r"key|secret|token|password")

#: What each tier claims beyond the one below it. An exemption names one of these words and says why it may be open.
TIERS: Mapping[str, Mapping[str, str]] = {
    "bronze": {
        "signed_webhooks": "the capability signed_webhooks",
        "replay_defence": "the capability signed_time or event_id",
        "fixtures": "a fixture for each topic in tests/fixtures",
    },
    "silver": {
        "captured_fixtures": "for each topic a fixture that says from: captured",
        "sweep": "the capability sweep",
        "renewal": "no auth that expires, or an adapter with oauth, whose tokens are renewed",
    },
    "gold": {
        "guide": "a docs.page with the headings Set-up and Removal",
        "live_run": "a captured fixture live_run of a run against the real server",
    },
}


class ManifestError(Exception):
    """The manifest is missing or is not JSON; the text says where it was looked for and what to do."""


@dataclass(frozen=True, slots=True)
class Package:
    """What the package's own metadata says: from pyproject.toml in a checkout, else from the installation."""

    version: str
    summary: str
    licence: str
    scripts: Mapping[str, str]


def source_root() -> Path | None:
    """The root of the checkout that this code runs from, or None when it was installed from a wheel."""
    return _ROOT if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "manifest.json").is_file() else None


def _path() -> Path:
    root = source_root()
    if root is not None:
        return root / "manifest.json"
    try:
        installed = distribution("turnlock").files or []
    except PackageNotFoundError:
        installed = []
    for file in installed:
        if file.parts[-3:] == ("share", "turnlock", "manifest.json"):
            return Path(str(file.locate()))
    raise ManifestError(f"manifest.json is neither in {_ROOT} nor in the installed package; install turnlock again")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twins = sorted({key for key in keys if keys.count(key) > 1})
    if twins:
        raise ValueError(f"the key {twins[0]!r} is written twice")
    return dict(pairs)


def load() -> dict[str, Any]:
    """The manifest as it is written, not checked.

    Raises:
        ManifestError: there is no manifest.json, or it is not a JSON object with each key once.
    """
    path = _path()
    try:
        manifest = json.loads(path.read_text("utf-8"), object_pairs_hook=_no_twins)
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} cannot be read: {error}; restore the file") from error
    if not isinstance(manifest, dict):
        raise ManifestError(f"{path} is not a JSON object; restore the file")
    return manifest


def package() -> Package:
    """What the package's metadata says of itself."""
    root = source_root()
    if root is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
        return Package(project["version"], project["description"], project["license"], project["scripts"])
    installed = distribution("turnlock")
    scripts = {e.name: e.value for e in installed.entry_points if e.group == "console_scripts"}
    # Typed as an email message, whose get() the stubs of importlib.metadata leave out.
    about = cast("Mapping[str, str]", installed.metadata)
    return Package(installed.version, about["Summary"], about["License-Expression"], scripts)


def check(manifest: Mapping[str, Any] | None = None, adapters: Mapping[str, Adapter] | None = None) -> list[Problem]:
    """Every claim of `manifest` (default: the plugin's own) that its schema, the code or the files do not bear out.

    `adapters` are those of the code, by name; default: the registry. What only a checkout can prove (fixtures, pages)
    is left out where the plugin was installed from a wheel. An empty list means that all is well.
    """
    manifest = load() if manifest is None else manifest
    code = {name: registry.adapter(name) for name in registry.names()} if adapters is None else adapters
    shape = [Problem(show(f.path) or "manifest.json", f.what, f.fix) for f in faults("manifest.schema.json", manifest)]
    if shape:
        # Beyond the shape nothing can be looked at without tripping over it; all of the shape is reported.
        return shape
    found = [*_about(manifest), *_flags(manifest["flags"])]
    for name in sorted(code.keys() - manifest["adapters"].keys()):
        found.append(Problem("adapters", f'"{name}" is in the registry but not here', f'describe "{name}"'))
    for name, claims in manifest["adapters"].items():
        where = f"adapters.{name}"
        if name not in code:
            found.append(Problem(where, "is not in adapters/registry.py", did_you_mean(name, code)))
            continue
        found += _against_code(where, claims, code[name])
        found += _parameters(where, claims)
        found += _tier(where, name, claims, code[name])
    return found


def _about(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    about = package()
    said = (about.version, about.summary, about.licence, dict(about.scripts))
    for key, value in zip(("version", "summary", "licence", "entry_points"), said, strict=True):
        if manifest[key] != value:
            yield Problem(key, f"is {manifest[key]!r}, the package says {value!r}", "make the two equal")


def _flags(flags: Sequence[Mapping[str, str]]) -> Iterator[Problem]:
    names = [flag["name"] for flag in flags]
    if names != [flag.value for flag in Flag]:
        want = ", ".join(flag.value for flag in Flag)
        yield Problem("flags", f"are {', '.join(names)}", f"list {want}, in this order (routing/model.py)")
    revisions = {module.name.removeprefix("r") for module in iter_modules(versions.__path__)}
    order = [flag["migration"] for flag in flags]
    for flag in flags:
        if flag["migration"] not in revisions:
            yield Problem(
                f"flags.{flag['name']}.migration",
                f'there is no revision "{flag["migration"]}"',
                did_you_mean(flag["migration"], revisions),
            )
    if order != sorted(order):
        yield Problem("flags", "do not stand in the order of their migrations", "order them by revision")


def _same(where: str, said: Sequence[str], known: Iterable[str]) -> Iterator[Problem]:
    """`said` in the manifest and `known` to the code must be the same words."""
    for word in sorted(set(known) - set(said)):
        yield Problem(where, f'"{word}" of the code is missing', "add it")
    for word in sorted(set(said) - set(known)):
        yield Problem(where, f'"{word}" is not in the code', "remove it, or build it")


def _against_code(where: str, claims: Mapping[str, Any], adapter: Adapter) -> Iterator[Problem]:
    yield from _same(f"{where}.topics", claims["topics"], adapter.topics)
    yield from _same(f"{where}.capabilities", claims["capabilities"], adapter.capabilities)
    hosts, secure = claims["hosts"], {p["name"] for p in claims["parameters"] if p["secure"]}
    if "*" in hosts:
        if hosts != ["*"]:
            yield Problem(f"{where}.hosts", 'names hosts beside "*"', 'keep "*" alone, or only the hosts')
        if not any(p["name"] == "base_url" and p["required"] for p in claims["parameters"]):
            yield Problem(f"{where}.hosts", 'is "*" without a required parameter base_url', "add the parameter")
    elif adapter.default_base_url is None:
        yield Problem(
            f"{where}.hosts", "names hosts, but the adapter has no default_base_url", 'write ["*"], or set it'
        )
    if adapter.default_base_url is not None:
        url = urlsplit(adapter.default_base_url)
        if url.scheme != "https" or url.hostname not in hosts:
            what = f"lacks the host of default_base_url, {adapter.default_base_url}, or that is not https"
            yield Problem(f"{where}.hosts", what, "add the host, or correct the adapter")
    verification = claims["verification"]
    if verification["secret"] != adapter.hook_secret:
        what = f'is "{verification["secret"]}", the adapter\'s hook_secret is "{adapter.hook_secret}"'
        yield Problem(f"{where}.verification.secret", what, "make the two equal")
    if verification["signed_time"] != (Capability.SIGNED_TIME in adapter.capabilities):
        what = "does not fit the capability signed_time of the code"
        yield Problem(f"{where}.verification.signed_time", what, "make the two agree")
    proves = bool({Capability.SIGNED_WEBHOOKS, Capability.HOOK_PASSWORD} & adapter.capabilities)
    if not verification["headers"] and proves:
        what = "is empty although webhooks are signed or show a password"
        yield Problem(f"{where}.verification.headers", what, "name the headers")
    if (verification["secret"] is None) == proves:
        what = "does not fit the capability signed_webhooks or hook_password of the code"
        yield Problem(f"{where}.verification.secret", what, "name the secret that signs, or null where nothing does")
    secrets = {f"auth[{at}].secret": auth["secret"] for at, auth in enumerate(claims["auth"])}
    if verification["secret"] is not None:
        secrets["verification.secret"] = verification["secret"]
    for at, secret in secrets.items():
        if secret not in secure:
            yield Problem(f"{where}.{at}", f'"{secret}" is not a secure parameter', did_you_mean(secret, secure))


def _parameters(where: str, claims: Mapping[str, Any]) -> Iterator[Problem]:
    names = [p["name"] for p in claims["parameters"]]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield Problem(f"{where}.parameters", f'"{name}" stands twice', "remove one of the two")
    for parameter in claims["parameters"]:
        at = f"{where}.parameters.{parameter['name']}"
        if _SECRET_NAME.search(parameter["name"]) and not parameter["secure"]:
            yield Problem(at, "is named like a secret and not secure", "set secure to true, or name it otherwise")
        if "default" in parameter and (parameter["secure"] or parameter["required"]):
            yield Problem(at, "has a default although it is a secret or required", "remove the default")


def _tier(where: str, name: str, claims: Mapping[str, Any], adapter: Adapter) -> Iterator[Problem]:
    """What the tier claims and nothing bears out, unless an exemption says why; and exemptions that are not needed."""
    root = source_root()
    tiers = list(TIERS)
    wanted = {c: how for tier in tiers[: tiers.index(claims["tier"]) + 1] for c, how in TIERS[tier].items()}
    proven = _proven(name, claims, adapter, root)
    exempt = [exemption["claim"] for exemption in claims["exemptions"]]
    for claim, how in wanted.items():
        if claim not in exempt and not proven.get(claim, True):
            fix = f"give it {how}, an exemption with its reason, or a lower tier"
            yield Problem(f"{where}.tier", f'"{claims["tier"]}" claims {claim}, which nothing bears out', fix)
    for claim in exempt:
        if claim not in wanted:
            yield Problem(f"{where}.exemptions", f'"{claim}" is no claim of this tier', did_you_mean(claim, wanted))
        elif proven.get(claim, False):
            yield Problem(f"{where}.exemptions", f'"{claim}" is borne out', "remove the exemption")


def _proven(name: str, claims: Mapping[str, Any], adapter: Adapter, root: Path | None) -> dict[str, bool]:
    """Each claim that can be judged here, and whether it holds; `root` is that of the checkout, if this is one."""
    has = adapter.capabilities
    proven = {
        "signed_webhooks": Capability.SIGNED_WEBHOOKS in has,
        "replay_defence": bool({Capability.SIGNED_TIME, Capability.EVENT_ID} & has),
        "sweep": Capability.SWEEP in has,
        "renewal": all(not auth["expires"] or _renews(auth, adapter) for auth in claims["auth"]),
    }
    if root is not None:
        made, captured = _fixtures(root / "tests" / "fixtures" / name)
        proven["fixtures"] = adapter.topics.keys() <= made | captured
        proven["captured_fixtures"] = adapter.topics.keys() <= captured
        proven["live_run"] = "live_run" in captured
        proven["guide"] = _is_guide(root / claims["docs"].get("page", ""))
    return proven


def _renews(auth: Mapping[str, Any], adapter: Adapter) -> bool:
    return auth["mode"] == "oauth2" and adapter.oauth is not None


def _fixtures(folder: Path) -> tuple[set[str], set[str]]:
    """Topics with a delivery made from docs, and those with a captured one; each has its bytes in a file beside."""
    made: set[str] = set()
    captured: set[str] = set()
    for file in folder.glob("*.json"):
        about = json.loads(file.read_text("utf-8"))
        if file.with_suffix(".body").is_file():
            kind = captured if str(about.get("from")).startswith("captured") else made
            kind.add(str(about.get("topic") or file.stem))
    return made, captured


def _is_guide(page: Path) -> bool:
    if not page.is_file():
        return False
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {"Set-up", "Removal"} <= {heading.strip() for heading in headings}
