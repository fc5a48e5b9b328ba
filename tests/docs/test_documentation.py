"""The pages name existing things: links, commands, options and Python names."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import memstore
from docs_build.__main__ import write_pages
from docs_build.commands import commands, option_names
from docs_build.environment import VARIABLES
from docs_build.hooks import relinked
from docs_build.settings import SETTINGS, settings
from docs_build.tables import stale_pages, with_tables
from memstore.cli.main import app
from support.paths import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "reference" not in page.relative_to(ROOT).parts]
COMMANDS = {path: option_names(command) for path, command in commands()}
GROUPS = {path.rpartition(" ")[0] for path in COMMANDS}
ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>"}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code(text: str) -> Iterator[str]:
    """Lines of blocks of code, those that go on joined, and code within sentences."""
    for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))


def called(line: str) -> Iterator[list[str]]:
    """The words of every call of memstore in a line of a shell."""
    line = line.removeprefix("$ ").strip()
    if not re.search(r"(^|[|&;(] ?|\bthen |\bdo |=\S* )(\S*/)?memstore ", line):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    try:
        words = list(lexer)
    except ValueError:  # a quotation that goes on in the next line
        words = line.split()
    for place, word in enumerate(words):
        if word.rpartition("/")[2] == "memstore" and words[place - 1 : place] != ["install"]:
            rest = words[place + 1 :]
            end = next((n for n, one in enumerate(rest) if one in ENDS), len(rest))
            yield rest[:end]


def wrong(words: list[str]) -> str | None:
    """Which of the words after `memstore` no command has."""
    verb = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
    path = next(
        (p for n in (2, 1) if (p := " ".join(["memstore", *verb[:n]])) in COMMANDS and verb[:n]),
        None,
    )
    options = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    if path is None:
        group = " ".join(["memstore", *verb[:1]])
        if not verb or (group in GROUPS and len(words) < 2):
            known = {name for one in typer.main.get_command(app).params for name in one.opts}
            known |= {"--install-completion", "--show-completion", "--help"}
            return next(iter(options - known), None)
        if group in GROUPS and not re.fullmatch(r"[a-z]+", words[1]):
            return None  # "memstore share ..."
        return " ".join(["memstore", *words[:2]])
    unknown = options - COMMANDS[path]
    return f"{path} {sorted(unknown)[0]}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_and_options_of_a_page_exist(page: Path) -> None:
    lines = code(page.read_text(encoding="utf-8"))
    found = [wrong(words) for line in lines for words in called(line)]
    assert [one for one in found if one is not None] == []


def exists(dotted: str) -> bool:
    """Is there memstore.dotted: a public name, or a module, or a name at a module's top?"""
    first, *rest = dotted.split(".")
    if first in memstore.__all__:
        return not rest or rest[0] in dir(getattr(memstore, first))
    place = ROOT / "memstore"
    for number, part in enumerate(dotted.split(".")):
        if (place / part).is_dir():
            place /= part
            continue
        inside = [place / f"{part}.py"] if (place / f"{part}.py").exists() else []
        rest = dotted.split(".")[number + bool(inside) :]
        module = inside[0] if inside else place / "__init__.py"
        return not rest or (module.exists() and rest[0] in _at_the_top(module))
    return True


def _at_the_top(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign() | ast.AnnAssign() | ast.ImportFrom() | ast.Import():
                names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                names |= {one.asname or one.name for one in getattr(node, "names", [])}
    return names


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_names_of_a_page_exist(page: Path) -> None:
    said = re.findall(
        r"(?<![\w/.-])memstore\.([A-Za-z_][\w.]*\w)", page.read_text(encoding="utf-8")
    )
    others = {"jsonl", "toml", "txt", "md", "json", "service"}  # endings of files
    names = {name for name in said if name.split(".")[0] not in others}
    assert [name for name in sorted(names) if not exists(name)] == []


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and as mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"(?m)^#+ +(.*)$", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        github = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found |= {github, re.sub(r"-+", "-", github)}
    return found


LINKED = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
]


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)", text):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        to = (page.parent / path).resolve() if path else page
        if (ROOT / "docs/reference") in to.parents:
            continue
        known = to.exists() and (not anchor or to.suffix != ".md" or anchor in slugs(to))
        dead += [] if known else [link]
    assert dead == []


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_a_list_after_a_paragraph_follows_an_empty_line(page: Path) -> None:
    """Else the site shows it as a part of the paragraph."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"\n(?!- |\d+\. |#|  )[^\n]+\n(?:- |\d+\. )", text) == []


def test_the_reference_names_every_setting_with_what_it_means() -> None:
    for kind, *_ in SETTINGS:
        found = list(settings(kind))
        assert {one.name for one in found} <= set(kind.__annotations__)
        assert [one.name for one in found if not one.about] == []


def test_the_reference_names_every_variable_that_the_package_reads() -> None:
    read = {
        name
        for path in (ROOT / "memstore").rglob("*.py")
        for name in re.findall(r"\bMEMSTORE_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    assert read == set(VARIABLES)


def test_pictures_are_found_from_the_url_of_their_page() -> None:
    has = {"a.svg"}.__contains__
    both = '<img src="a.svg"> ![a](a.svg)'
    assert relinked(both, "docs/b.md", "b.md", has) == '<img src="../a.svg"> ![a](a.svg)'
    both = both.replace("a.svg", "docs/a.svg")
    assert relinked(both, "README.md", "index.md", has) == '<img src="a.svg"> ![a](a.svg)'


def test_tables_of_the_pages_equal_their_result_files() -> None:
    assert [str(page.relative_to(ROOT)) for page in stale_pages()] == []
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert with_tables(page.replace("13 kB", "14 kB")) == page


def test_every_reference_page_is_written(tmp_path: Path) -> None:
    write_pages(tmp_path / "reference")
    for name in ("commands", "settings", "environment", "api"):
        assert (tmp_path / f"reference/{name}.md").read_text(encoding="utf-8").startswith("# ")
