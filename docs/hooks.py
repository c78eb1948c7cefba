"""Fills the site from the catalogue and from the recorded trials.

Adding a method is then a matter of its own files: its page enters the navigation, the list of methods and the API
reference by itself.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.core.catalogue import FAMILIES, Method, catalogue
from assay.core.results import Column, Table
from assay.core.subject import KINDS

# The tests read this module where mkdocs is not installed.
if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PLOTLY = "javascripts/plotly.min.js"
MARKER = re.compile(r"<!-- (trial|catalogue|families|sources)(?::([a-z0-9-]+))? -->")


def by_family() -> dict[str, list[Method]]:
    """The methods of every family that has one."""
    rows = list(catalogue().values())
    found = {family: [m for m in rows if m.family == family] for family in FAMILIES}
    return {family: members for family, members in found.items() if members}


def generated() -> dict[str, str]:
    """The pages that stand in no file of `docs/`: their paths and their Markdown."""
    pages = {f"reference/{family}.md": _reference(family, members) for family, members in by_family().items()}
    return pages | {"contributing.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the methods and the families into the navigation."""
    assert config.nav is not None
    for entry in config.nav:
        if "Methods" in entry:
            families = [{f: [{m.slug: f"methods/{m.slug}.md"} for m in members]} for f, members in by_family().items()]
            entry["Methods"] = [entry["Methods"], *families]
        if "API" in entry:
            entry["API"] += [{f"assay.{f}": f"reference/{f}.md"} for f in by_family()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, content in generated().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put what a marker stands for in its place."""
    from mkdocs.utils import get_relative_url

    plotly = get_relative_url(PLOTLY, page.url)

    def fill(match: re.Match[str]) -> str:
        what, slug = match.groups()
        if what == "trial":
            return trial(Path(config.docs_dir) / "trials" / f"{slug}.json", plotly)
        return {"catalogue": _catalogue, "families": _families, "sources": _sources}[what]()

    return MARKER.sub(fill, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Bring the plotting library along, from the Python package."""
    target = Path(config.site_dir) / PLOTLY
    with package_files("plotly").joinpath("package_data", "plotly.min.js").open("rb") as source:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as copy:
            shutil.copyfileobj(source, copy)


def trial(path: Path, plotly: str) -> str:
    """A recorded trial as Markdown: sentence, verdict, picture, arms and cost.

    Args:
        path: the record that `make trials` wrote.
        plotly: where the page finds the plotting library.
    """
    if not path.is_file():
        return '!!! warning "Not recorded yet"\n\n    `make trials` runs this trial and records it.\n'
    record = json.loads(path.read_text(encoding="utf-8"))
    seeds = len(record["seeds"])
    how = f"`{record['source']}`, budget {record['budget']}, {seeds} seeds, assay {record['assay']}"
    parts = [
        f"**{_escaped(record['question'])}**",
        f"{_escaped(record['sentence'])}",
        _figure(record, plotly),
        _table(record["verdict_table"]),
        _table(record["arms_table"]),
        _table(record["cost_table"]),
        f"*Recorded on {how}; {record['workers']} arms ran side by side. `assay try {record['slug']} --budget "
        f"{record['budget']}` runs it again.*",
    ]
    return "\n\n".join(parts) + "\n"


def _figure(record: dict[str, Any], plotly: str) -> str:
    # No "<" may stand in the script, and no empty line in the block.
    data = json.dumps(record["figure"], ensure_ascii=False).replace("<", "\\u003c")
    height = int(record["figure"]["layout"].get("height", 400))
    return (
        f'<div class="assay-figure" role="img" aria-label="{html.escape(record["sentence"])}" '
        f'data-plotly="{plotly}" style="min-height: {height}px">'
        f'<script type="application/json">{data}</script></div>'
    )


def _table(stored: dict[str, Any]) -> str:
    """A stored table in Markdown, with the ends of an interval in the column that they belong to."""
    table = Table(
        tuple(Column(**c) for c in stored["columns"]), tuple(tuple(r) for r in stored["rows"]), stored["title"]
    )
    cells = table.formatted()
    names = [c.name for c in table.columns]
    keep, lows = [], {}
    for i, name in enumerate(names):
        if name.split()[-1] == "low" and names[i + 1].split()[-1] == "high":
            lows[keep[-1]] = i
        elif name.split()[-1] != "high":
            keep.append(i)
    # A column that no row fills says nothing.
    keep = [i for i in keep if any(row[i] for row in cells)]
    heads = [table.columns[i].heading for i in keep]
    lines = [
        "| " + " | ".join(_escaped(h) for h in heads) + " |",
        "|" + "|".join("---:" if i in lows or _numeric(table, i) else "---" for i in keep) + "|",
    ]
    for row in cells:
        texts = [f"{row[i]} [{row[lows[i]]}, {row[lows[i] + 1]}]" if i in lows else row[i] for i in keep]
        lines.append("| " + " | ".join(_escaped(t) for t in texts) + " |")
    told = [f"{table.columns[i].name}: {table.columns[i].about}" for i in keep if table.columns[i].about]
    level = next((table.columns[i].unit for i in lows.values()), "")
    note = "; ".join(told) + ("; in brackets the " + level.removeprefix("×, ") + " interval" if level else "")
    return f"**{_escaped(table.title)}**\n\n" + "\n".join(lines) + f"\n\n<small>{_escaped(note)}.</small>"


def _numeric(table: Table, i: int) -> bool:
    return all(isinstance(row[i], int | float | None) for row in table.rows)


def _escaped(text: str) -> str:
    """Text in which Markdown finds nothing to act on."""
    return re.sub(r"([\\`*_{}\[\]|<>])", lambda m: f"&#{ord(m.group()[0])};", text)


def _catalogue() -> str:
    """Every method by family, with what it takes and where it comes from."""
    parts = []
    for family, members in by_family().items():
        parts += [
            f"## {family}: {FAMILIES[family]}",
            "| method | what it is for | gives | takes |\n|---|---|---|---|\n"
            + "\n".join(
                f"| [{m.slug}]({m.slug}.md) | {_escaped(m.summary)} | {', '.join(m.shape)} | {', '.join(m.subject)} |"
                for m in members
            ),
        ]
    return "\n\n".join(parts)


def _families() -> str:
    """Every family with a link to its page of the reference."""
    rows = [f"- [`assay.{f}`]({f}.md): {FAMILIES[f]}" for f in by_family()]
    return "\n".join(rows)


def _sources() -> str:
    """The kinds of input."""
    return "| kind | what it is |\n|---|---|\n" + "\n".join(f"| {k} | {_escaped(v)} |" for k, v in KINDS.items())


def _reference(family: str, members: list[Method]) -> str:
    about = FAMILIES[family]
    parts = [f"# assay.{family}", f"{about[0].upper()}{about[1:]}. `from assay.{family} import …`"]
    for m in members:
        paper = m.arxiv if m.arxiv.startswith("openreview:") else f"[arXiv {m.arxiv}](https://arxiv.org/abs/{m.arxiv})"
        link = f"[guide](../methods/{m.slug}.md), {paper}"
        parts += [f"## {m.slug}", f"{_escaped(m.title)}: {link}", *(f"::: {m.module}.{name}" for name in m.exports)]
    return "\n\n".join(parts) + "\n"
