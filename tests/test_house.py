"""The house rules that a reader of the code relies on: arrows point down, modules are short, words have one meaning."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from adapters import registry
from routing.tables import metadata

ROOT = Path(__file__).parent.parent
PACKAGES = ("routing", "adapters", "connector", "migrations")
CRMS = {f"adapters/{name}.py" for name in registry.names()}


def modules(*packages: str) -> Iterator[tuple[str, str]]:
    """Every module of these packages: its path from the root, and its text."""
    for package in packages or PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def documented(node: ast.AST) -> bool:
    """Whether a module, class or function has a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and ast.get_docstring(node) is not None


# -- arrows -----------------------------------------------------------------------------------------------------


def lint(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter. In a process of its own: it sets up logging for itself."""
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    command = [sys.executable, "-c", program, "--no-cache", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_arrows_between_the_packages_point_down() -> None:
    done = lint()
    assert done.returncode == 0, done.stdout
    assert " kept, 0 broken" in done.stdout


def test_an_arrow_that_points_up_would_be_noticed(tmp_path: Path) -> None:
    config = tmp_path / "contracts.ini"
    config.write_text(
        "[importlinter]\nroot_packages=\n  connector\n  routing\n[importlinter:contract:1]\nname=x\ntype=forbidden\n"
        "source_modules=connector.app\nforbidden_modules=routing\n"
    )
    done = lint("--config", str(config))
    assert done.returncode == 1
    assert "0 kept, 1 broken" in done.stdout


# -- size -------------------------------------------------------------------------------------------------------

LONGEST, LONGEST_OF_A_CRM = 400, 250

#: Modules that are longer than the rule, and how long each may be. It only ever shrinks.
LONGER = {
    "adapters/generic.py": 270,
}


def lines_of_code(text: str) -> int:
    """Lines that hold code: without blank ones, comments and docstrings, which nobody should be short of."""
    tree, silent = ast.parse(text), set[int]()
    for node in ast.walk(tree):
        if documented(node):
            doc = node.body[0]  # type: ignore[attr-defined]
            silent |= set(range(doc.lineno, doc.end_lineno + 1))
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - silent)


def test_lines_of_code_are_counted_without_comments_docstrings_and_blanks() -> None:
    assert (
        lines_of_code('"""Doc.\n\nMore.\n"""\n\n# Why.\nA = """x\ny"""\n\n\ndef f():\n    """D."""\n    return 1\n')
        == 4
    )


def test_a_module_fits_into_a_head() -> None:
    found = {path: lines_of_code(text) for path, text in modules()}
    limits = {path: LONGER.get(path, LONGEST_OF_A_CRM if path in CRMS else LONGEST) for path in found}
    assert {path: (n, limits[path]) for path, n in found.items() if n > limits[path]} == {}
    rule = {path: LONGEST_OF_A_CRM if path in CRMS else LONGEST for path in LONGER}
    assert [path for path in LONGER if found.get(path, 0) <= rule[path]] == [], "no exception any more: take it out"


# -- words ------------------------------------------------------------------------------------------------------

# What these are called here: tenant, adapter, hook, delivery, event, lead, agent, decision, assignment, parked, alarm,
# position. The short list is of words that have no other meaning in this code; vendors' words may stand in the
# module of their CRM, and the sandbox speaks as the CRMs do.
UNSAID = frozenset(
    {"org", "organisation", "organization", "customer", "provider", "integration", "endpoint", "notification",
     "contact", "person", "people", "rep", "alert", "allocation", "deadletter", "pointer", "hit", "history",
     "roundrobin", "assignee", "broker", "realtor"}
)  # fmt: skip


def words(name: str) -> list[str]:
    """The words of an identifier, each as one."""
    return [word.lower().removesuffix("s") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def identifiers(text: str) -> Iterator[str]:
    """The names that a module makes: of functions, classes, arguments, variables and attributes."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr
            case ast.keyword(arg=str() as name):
                yield name


def unsaid(name: str) -> bool:
    found = words(name)
    pairs = {a + b for a, b in pairwise(found)}
    return bool(UNSAID & ({*found} | pairs))


def test_one_thing_has_one_word() -> None:
    wrong = {}
    for path, text in modules():
        if path in CRMS or path.startswith("connector/sandbox/"):
            continue
        names = {name for name in identifiers(text) if unsaid(name)} | {n for n in [Path(path).stem] if unsaid(n)}
        if names:
            wrong[path] = sorted(names)
    assert wrong == {}
    columns = {f"{t.name}.{c.name}" for t in metadata.tables.values() for c in t.columns}
    assert {name for name in columns if unsaid(name)} == set()


@pytest.mark.parametrize(
    "name", ["webhook_endpoint", "org_id", "OrgSettings", "dead_letter", "CRMProvider", "round_robin"]
)
def test_a_word_that_is_not_ours_would_be_noticed(name: str) -> None:
    assert unsaid(name)
    assert name in set(identifiers(f"def f({name}): ..."))


# -- docstrings -------------------------------------------------------------------------------------------------


def undocumented(path: str, text: str) -> list[str]:
    """Public modules, classes, functions and methods of public classes that say nothing of themselves."""
    tree = ast.parse(text)
    found = [] if documented(tree) or not text.strip() else [path]

    def look(nodes: list[ast.stmt], within: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                if not documented(node):
                    found.append(f"{within}:{node.name}")
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{within}:{node.name}")

    look(tree.body, path)
    return found


def test_everything_public_says_what_it_is() -> None:
    assert [
        name for path, text in modules("routing", "adapters", "connector") for name in undocumented(path, text)
    ] == []


def test_what_says_nothing_would_be_noticed() -> None:
    text = '"""M."""\nclass A:\n    """A."""\n    def b(): ...\n    def _c(): ...\ndef d(): ...\nclass _E: ...'
    assert undocumented("m", text) == ["m:A:b", "m:d"]
    assert undocumented("m", "x = 1") == ["m"]


# -- nothing of one machine -------------------------------------------------------------------------------------

_MACHINE = re.compile(
    r"(?<![\w./*-])/(?:home|root|work|Users|workspace|builds)/\w"  # a folder of one machine
    r"|--(?:extra-)?index-url|PIP_(?:EXTRA_)?INDEX|find-links|trusted-host"  # where one machine finds packages
    r"|\b(?:artifactory|nexus|devpi)\b"
)
_TEXTS = {".py", ".toml", ".json", ".md", ".yaml", ".yml", ".cfg", ".txt", ".mako", ".sh", ".body", ""}


def texts() -> Iterator[tuple[str, str]]:
    """Every text that is part of the repository."""
    made = {".venv", ".git", "build", "dist", "__pycache__", "node_modules"}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".gitignore", ".gitattributes") for part in parts)
        if path.is_file() and path.suffix in _TEXTS and not hidden and not made & set(parts):
            if any(part.endswith(".egg-info") for part in parts) or path == Path(__file__):
                continue
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8", "replace")


def test_the_tree_knows_no_machine() -> None:
    found = {path: hits for path, text in texts() if (hits := [m.group() for m in _MACHINE.finditer(text)])}
    assert found == {}


@pytest.mark.parametrize(
    "text", ["cd /home/ana", "'/root/x'", "pip install --index-url=https://x", "https://x/artifactory/y"]
)
def test_a_trace_of_a_machine_would_be_noticed(text: str) -> None:
    assert _MACHINE.search(text)


# -- what a stranger looks for ----------------------------------------------------------------------------------


def test_the_top_of_the_tree_is_what_the_readme_says() -> None:
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "manifest.json",
        "pyproject.toml",
    ):
        assert (ROOT / name).is_file(), name
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    for crm in registry.names():
        assert (ROOT / "tests" / "fixtures" / crm).is_dir(), f"{crm} has no fixtures"


_LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")


def test_every_link_between_the_pages_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = []
    for page in pages:
        for target in _LINK.findall(page.read_text("utf-8")):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
    assert len(pages) > 4
