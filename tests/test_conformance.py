"""Every method of the catalogue is whole: module, tests, trial, recorded verdict and page."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from torch import nn

from assay.core.catalogue import FAMILIES, SHAPES, catalogue, lazy_family, method
from assay.core.errors import InputError
from assay.core.results import Result
from assay.core.subject import KINDS
from assay.reference import builtin
from assay.trials import Trial

ROOT = Path(__file__).resolve().parents[1]
METHODS = list(catalogue().values())
each = pytest.mark.parametrize("m", METHODS, ids=lambda m: m.slug)


@each
def test_the_row(m):
    assert m.family in FAMILIES
    assert m.shape
    assert set(m.shape) <= set(SHAPES)
    assert set(m.subject) <= set(KINDS)
    assert re.fullmatch(r"\d{4}\.\d{5}|openreview:\w+", m.arxiv)
    assert len(m.summary) <= 110
    assert m.title
    assert m.exports


@each
def test_what_it_exports_is_there_documented_and_typed(m):
    package = importlib.import_module(f"assay.{m.family}")
    for name in m.exports:
        thing = getattr(package, name)
        assert name in package.__all__
        assert name in dir(package)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.annotation is not inspect.Parameter.empty, (name, parameter.name)
        if inspect.isclass(thing) and issubclass(thing, Result):
            assert is_dataclass(thing)
            assert {"table", "figure"} <= set(vars(thing)), f"{name} has no table or figure of its own"
    module = importlib.import_module(m.module)
    assert m.arxiv in inspect.getsource(module)


@each
def test_the_shapes_are_what_the_row_says(m):
    package = importlib.import_module(f"assay.{m.family}")
    things = [getattr(package, name) for name in m.exports]
    classes = [t for t in things if inspect.isclass(t)]
    if "measure" in m.shape:
        assert any(inspect.isfunction(t) for t in things)
        assert any(issubclass(t, Result) for t in classes)
    if "estimator" in m.shape:
        assert any(hasattr(t, "fit") and hasattr(t, "get_params") for t in classes)
    if "module" in m.shape:
        assert any(issubclass(t, nn.Module) or callable(t) for t in classes)
    if "rewrite" in m.shape:
        assert inspect.isfunction(getattr(package, m.stem))


@each
def test_the_mathematics_touches_nothing_else(m):
    """No printing, no files, no argument parsing, no global seeds in a method's module."""
    source = (ROOT / "src" / Path(*m.module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"print", "open", "input"}, called
            assert called not in {"torch.manual_seed", "np.random.seed", "random.seed", "numpy.random.seed"}, called
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                assert not name.startswith(("argparse", "typer", "rich")), name


@each
def test_its_tests_are_there(m):
    path = ROOT / "tests" / m.family / f"test_{m.stem}.py"
    assert path.read_text(encoding="utf-8").count("def test_") >= 10


@each
def test_its_trial(m):
    trial = importlib.import_module(m.trial_module).TRIAL
    assert isinstance(trial, Trial)
    assert trial.slug == m.slug
    assert trial.subject in m.subject
    assert trial.subject == builtin(trial.builtin).KIND
    assert trial.question.endswith("?")
    assert len(trial.arms) >= 2
    assert len({a.name for a in trial.arms}) == len(trial.arms)
    assert all(a.about for a in trial.arms)
    assert any(x.better for x in trial.metrics)
    assert set(trial.budgets) >= {"quick", "full"}
    assert trial.budgets["full"]["seeds"] >= 5


@each
def test_its_recorded_verdict_is_of_the_trial_as_it_stands(m):
    trial = importlib.import_module(m.trial_module).TRIAL
    recorded = json.loads((ROOT / "docs" / "trials" / f"{m.slug}.json").read_text(encoding="utf-8"))
    assert recorded["budget"] == "full"
    assert recorded["question"] == trial.question
    assert recorded["arms"] == [a.name for a in trial.arms]
    assert recorded["metrics"] == [x.name for x in trial.metrics]
    assert len(recorded["seeds"]) >= 5
    assert recorded["sentence"]


@each
def test_its_page(m):
    text = (ROOT / "docs" / "methods" / f"{m.slug}.md").read_text(encoding="utf-8")
    assert f"<!-- trial:{m.slug} -->" in text
    assert m.arxiv in text
    assert m.title in re.sub(r"\s+", " ", text)
    assert "```python" in text
    assert f"assay try {m.slug}" in text


@each
def test_its_benchmark(m):
    assert (ROOT / "benchmarks" / f"{m.stem}.py").is_file()


def test_the_catalogue_file_has_no_row_twice_and_no_strange_key():
    text = (ROOT / "src/assay/catalogue.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    assert list(rows) == [m.slug for m in METHODS]
    exported = [name for m in METHODS for name in m.exports]
    assert len(exported) == len(set(exported))


def test_near_misses_are_suggested():
    with pytest.raises(InputError, match="did you mean nerve"):
        method("nerv")
    with pytest.raises(InputError, match="`assay methods` lists them"):
        method("zzzzzz")


def test_a_family_knows_only_its_own():
    get, names, everything = lazy_family("assay.lens")
    assert "nerve" in everything
    assert names() == everything
    with pytest.raises(AttributeError, match="no attribute 'bof4'"):
        get("bof4")


def test_every_family_of_the_catalogue_is_a_package():
    for family in FAMILIES:
        assert importlib.import_module(f"assay.{family}").__doc__


def test_the_stubs_are_current():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "write_stubs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_project_speaks_of_itself_alone():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.splitlines():
        if name.endswith((".py", ".md", ".toml", ".html", ".js", ".css", ".yml")) and "test_conformance" not in name:
            text = (ROOT / name).read_text(encoding="utf-8")
            assert "/work/" not in text, name
            assert "../shared" not in text, name
