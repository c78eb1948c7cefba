"""The page and the summary of a compressed model."""

import io
import re

import pytest
from rich.console import Console

from assay import report
from assay.compressor import Compression, Tried
from assay.compressor._run import LayerReport, Measured
from assay.core.loss import DriftResult, LossResult
from assay.core.stats import mean_interval

EVIL = "<script>alert(1)</script>"


def loss(values):
    import torch

    values = torch.tensor(values, dtype=torch.float64)
    return LossResult(values, values, 100, mean_interval(values.numpy()))


def compression(tried=True, note="", windows=3, source="model", blocks=3):
    values = [3.0, 3.1, 3.3][:windows]
    layers = tuple(
        LayerReport(f"model.layers.{i}.mlp.{kind}", "gptq 4 bit g64", (8, 64), 4.25, 0.01 * (i + 1), note)
        for i in range(blocks)
        for kind in ("up_proj", "down_proj")
    )
    points = (
        Tried("gptq 3 bit g64", True, 3.25, 0.3, 24.0, True),
        Tried("obr 4 bit g64 50% pruned", True, 3.25, 0.4, 25.0, True),
        Tried("gptq 4 bit g64", True, 4.25, 0.1, 21.0, False),
        Tried("mixture of 2", False, 3.5, 0.2, 22.5, True),
    )
    return Compression(
        source=source,
        out="out",
        setting="2 settings",
        format="assay",
        before=Measured(loss(values), 4_000_000, 32.0),
        after=Measured(loss([v + 0.1 for v in values]), 600_000, 3.5),
        drift=DriftResult(mean_interval(values), mean_interval(values), 3.2, 0.9, 100),
        layers=layers,
        left={"lm_head": "skipped by name", **{f"model.layers.{i}.experts": "stacked experts are not packed" for i in range(9)}},
        calibration_tokens=512,
        held_tokens=100,
        parameters=1_000_000,
        seconds=12.0,
        peak_memory=1 << 30,
        tried=points if tried else (),
    )  # fmt: skip


def printed(result):
    console = Console(file=io.StringIO(), width=100)
    report.print_compression(result, console)
    return console.file.getvalue()


def test_the_summary():
    text = printed(compression(note="too few tokens came here"))
    assert len(text.splitlines()) <= 45
    for part in (
        "mixture of 2",
        "KL to the original",
        "90.0%",
        "4.0",
        "0.6",
        "4.80",
        "and 3 more: compression.json",
        "8 more",
    ):
        assert part in text


def test_one_window_gives_no_interval():
    text = printed(compression(windows=1))
    assert "nan" not in text
    assert "20.09  " in text


@pytest.mark.parametrize("tried", [True, False])
def test_the_page_needs_no_network_and_escapes_what_strangers_send(tried):
    page = report.compression_page(compression(tried, note=EVIL, source=EVIL))
    assert EVIL not in page
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", outside)
    assert ("What was tried" in page) == tried
    assert "stacked experts are not packed" in page
    assert "and 5 more" in page


def test_layers_without_an_error():
    import dataclasses

    result = compression()
    blind = tuple(dataclasses.replace(x, error=float("nan")) for x in result.layers)
    page = report.compression_page(dataclasses.replace(result, layers=blind))
    assert "No layer saw enough tokens" in page
    exact = tuple(dataclasses.replace(x, error=0.0) for x in result.layers)
    assert report.compression_page(dataclasses.replace(result, layers=exact))


@pytest.mark.browser
@pytest.mark.parametrize("tried", [True, False])
def test_in_a_browser(browser, tmp_path, tried):
    path = tmp_path / "report.html"
    path.write_text(report.compression_page(compression(tried, note="a note")), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    troubles = []
    page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: troubles.append(str(e)))
    page.goto(path.as_uri())
    page.wait_for_selector(".plot .main-svg")
    plots = page.query_selector_all("figure .plot")
    assert len(plots) == (2 if tried else 1)
    for plot in plots:
        assert len(plot.get_attribute("aria-label")) > 60
        assert plot.query_selector_all(".xtick")
        assert plot.query_selector_all(".ytick")
    page.click("#layers button.data")
    assert page.locator("#layers-data tbody tr").count() == 6
    assert not troubles
    page.close()
