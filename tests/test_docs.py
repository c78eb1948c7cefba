"""The documentation: its examples run, its commands exist, its links lead somewhere, its pages carry their markers."""

from __future__ import annotations

import ast
import contextlib
import html
import importlib.util
import io
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

from assay.cli import main
from assay.cli._main import app
from assay.core.catalogue import catalogue
from assay.trials import Arm, Cell, Metric, Trial, TrialRun, judge
from tests.trials.test_full import record

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
RUN = [p for p in PAGES if p.name != "CONTRIBUTING.md"]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    runs: bool


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            m.group(1),
            m.group(2),
            text.count("\n", 0, m.start()) + 1,
            not _NOT_RUN.search(text, max(0, m.start() - 200), m.start()),
        )
        for m in _FENCE.finditer(text)
    ]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def having(language: str) -> list[Path]:
    return [p for p in RUN if any(b.language == language and b.runs for b in blocks(p))]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", having("python"), ids=name)
def test_python_examples_run(page, elsewhere):
    namespace = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and block.runs:
            # Lines of an error are then lines of the page.
            source = "\n" * block.line + block.text
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(source, name(page), "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if p not in having("python")], ids=name)
def test_other_python_examples_are_python(page):
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)


def commands(block: Block) -> list[str]:
    """The assay commands of a block, in `console` blocks after a prompt."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.startswith("assay ")] if block.language in ("", "console") else []


@pytest.mark.parametrize("page", having("console"), ids=name)
def test_console_examples_run(page, elsewhere, monkeypatch, capsys):
    for block in blocks(page):
        if block.language == "console" and block.runs:
            for line in commands(block):
                monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
                status = 0
                try:
                    main()
                except SystemExit as stop:
                    status = stop.code
                assert not status, (line, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_are_such_as_the_command_line_takes(page):
    top = typer.main.get_command(app)
    for line in [line for block in blocks(page) for line in commands(block)]:
        _, first, *rest = shlex.split(line, comments=True)
        if first in top.commands and "--help" not in rest:
            top.commands[first].make_context(first, rest).close()
    # In running text an option may stand without its value.
    for line in re.findall(r"\bassay ([a-z-][^`\n]*)", " ".join(re.findall(r"`[^`\n]+`", page.read_text("utf-8")))):
        first, *rest = line.split()
        parts = [top, top.commands[first]] if not first.startswith("--") else [top]
        known = {o for part in parts for p in part.params for o in p.opts} | {"--help", "--install-completion"}
        assert {word for word in [first, *rest] if word.startswith("--")} <= known, line


def _hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = _hooks()


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


def page_texts() -> dict[Path, str]:
    """Every page, those that the site makes included."""
    texts = {p: p.read_text(encoding="utf-8") for p in PAGES}
    return texts | {DOCS / path: text for path, text in hooks.generated().items()}


@pytest.mark.parametrize("page", page_texts(), ids=name)
def test_links_lead_somewhere(page):
    texts = page_texts()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(texts[page])):
        if re.match(r"https?:", target):
            assert target.startswith("https://arxiv.org/abs/"), "only papers are linked outside"
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found in texts or found.is_file(), f"{name(page)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(texts[found]), f"{name(page)} links to {target}: there is no such heading"


@pytest.mark.parametrize("slug", catalogue())
def test_the_page_of_a_method_has_one_place_for_its_trial(slug):
    text = (DOCS / "methods" / f"{slug}.md").read_text(encoding="utf-8")
    assert re.findall(r"^<!-- trial:.* -->$", text, re.MULTILINE) == [f"<!-- trial:{slug} -->"]


def test_every_page_is_of_a_method():
    assert {p.stem for p in (DOCS / "methods").glob("*.md")} == {"index", *catalogue()}


def test_every_marker_is_known():
    for page in PAGES:
        for comment in re.findall(r"<!-- (.+?) -->", prose(page.read_text(encoding="utf-8"))):
            if not comment.startswith("not run: "):
                assert hooks.MARKER.fullmatch(f"<!-- {comment} -->"), f"{name(page)}: {comment}"


def test_the_site_lists_every_method():
    listed = hooks.generated()
    for slug, row in catalogue().items():
        assert f"]({slug}.md)" in hooks._catalogue()
        for export in row.exports:
            assert f"::: {row.module}.{export}\n" in listed[f"reference/{row.family}.md"] + "\n"


@pytest.fixture
def recorded(tmp_path):
    """A record of a trial of two arms, one with a name that Markdown would act on."""
    trial = Trial(
        slug="deql",
        question="Is a*b* better than |c|?",
        subject="ratings",
        builtin="builtin:ratings",
        prepare=lambda source: None,
        arms=(Arm("a*b*", len, "new"), Arm("|c|", len, "old")),
        metrics=(Metric("score", "higher", "", "more is better"), Metric("error", "lower", "nats")),
    )
    cells = [
        Cell(arm, seed, {"score": seed + bonus, "error": 1.5 - bonus}, 2.0, 3.0, 100.0)
        for arm, bonus in (("a*b*", 0.5), ("|c|", 0.0))
        for seed in range(3)
    ]
    verdict = judge(trial, cells, source="builtin:ratings", budget="full", seeds=range(3))
    path = tmp_path / "deql.json"
    path.write_text(json.dumps(record(TrialRun("builtin:ratings", 2, tuple(cells), verdict)), allow_nan=False))
    return path


def test_a_recorded_trial_becomes_text_tables_and_a_figure(recorded):
    text = hooks.trial(recorded, "../javascripts/plotly.min.js")
    plain = html.unescape(text)
    stored = json.loads(recorded.read_text())
    assert stored["sentence"] in plain
    assert "a*b*" not in re.sub(r"<div.*</div>", "", text)
    tables = [[line for line in part.splitlines() if line.startswith("|")] for part in text.split("\n\n")]
    tables = [t for t in tables if t]
    assert [len(t) - 2 for t in tables] == [2, 2, 1]  # comparisons, arms, costs
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
    # The same difference on every seed: an interval of no length, beside the difference.
    assert "0.5 [0.5, 0.5] | better" in plain
    assert "failures" not in plain
    figure = json.loads(re.search(r'<script type="application/json">(.*)</script>', text).group(1))
    assert len(figure["data"]) == 4
    assert "template" not in figure["layout"]


def test_a_trial_that_was_not_recorded_is_called_that(tmp_path):
    assert "Not recorded yet" in hooks.trial(tmp_path / "none.json", "")
