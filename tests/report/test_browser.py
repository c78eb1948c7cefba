"""The pages in a real browser: no console errors, and what can be clicked works."""

import pytest

from assay import report
from assay.trials import run_trial

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page_file(examination, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.examination_page(examination), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, page_file):
    context = browser.new_context(viewport={"width": 1100, "height": 900}, offline=True, accept_downloads=True)
    page = context.new_page()
    troubles = []
    page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: troubles.append(str(e)))
    page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith(("file:", "blob:", "data:")) else None)
    page.goto(page_file.as_uri())
    page.wait_for_selector(".plot .main-svg")
    yield page
    assert not troubles
    context.close()


def shown(page, key):
    return page.evaluate(f"document.querySelector('#{key} .plot').data.map(t => t.visible)")


def test_every_figure_is_drawn_and_has_words_for_it(page):
    plots = page.query_selector_all("figure .plot")
    assert len(plots) == 6
    for plot in plots:
        assert plot.query_selector(".main-svg")
        assert len(plot.get_attribute("aria-label")) > 40


def test_data_buttons_show_the_numbers(page):
    for button in page.query_selector_all("button.data"):
        target = page.locator(f"#{button.get_attribute('aria-controls')}")
        assert target.is_hidden()
        button.click()
        assert target.is_visible()
        assert button.get_attribute("aria-expanded") == "true"
        assert target.locator("tbody tr").count() > 1


def test_numbers_can_be_saved(page):
    page.click("#loss-by-position button.data")
    with page.expect_download() as download:
        page.click("#loss-by-position button.save")
    text = download.value.path().read_text()
    assert text.startswith("positions,loss (nats/token),perplexity\n1,")


def test_tables_sort(page):
    table = page.locator("#four-bits table.sortable").first
    button = table.locator("th button").nth(2)

    def column():
        return [float(v) for v in table.locator("tbody td:nth-child(3)").evaluate_all("c => c.map(x => x.dataset.v)")]

    button.click()
    assert column() == sorted(column())
    assert table.locator("th").nth(2).get_attribute("aria-sort") == "ascending"
    button.click()
    assert column() == sorted(column(), reverse=True)


def test_a_layer_can_be_picked(page):
    page.select_option('select[data-for="spectrum-of-layer"]', "layer 2")
    assert shown(page, "spectrum-of-layer") == [False] * 4 + [True] * 2 + [False] * 2
    page.select_option('select[data-for="spectra"]', "early enrichment")
    assert shown(page, "spectra") == [False] * 4 + [True] * 2


def test_the_head_map_by_mouse_and_keyboard(page):
    said = page.locator("#head-said")
    page.hover("table.heads tbody tr:nth-child(2) td:nth-of-type(3)")
    assert "layer 1, head 2" in said.text_content()
    page.focus("table.heads td[tabindex='0']")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert said.text_content().startswith("layer 1, head 1")
    page.keyboard.press("Enter")
    assert page.input_value('select[data-for="spectrum-of-layer"]') == "layer 1"
    assert shown(page, "spectrum-of-layer")[2:4] == [True, True]


def test_everything_can_be_reached_by_keyboard(page):
    reached = set()
    for _ in range(150):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.className + '|' + document.activeElement.tagName"))
    kinds = {r.split("|")[1] for r in reached}
    assert {"A", "BUTTON", "SELECT", "TD"} <= kinds


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser, page_file, scheme):
    page = browser.new_page(color_scheme=scheme)
    page.goto(page_file.as_uri())
    ratio = page.evaluate(
        """() => {
          const lum = c => { const v = c.match(/\\d+/g).slice(0, 3).map(x => { x /= 255;
            return x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4; });
            return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
          const ground = lum(getComputedStyle(document.body).backgroundColor);
          return [...document.querySelectorAll('p, dt, dd, caption, figcaption span, td, .plot text')].map(e => {
            const s = getComputedStyle(e), ink = lum(e.closest('svg') ? s.fill : s.color);
            return (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05); }).reduce((a, b) => Math.min(a, b)); }"""
    )
    assert ratio >= 3.9
    page.close()


def test_it_prints(browser, page_file, tmp_path):
    page = browser.new_page()
    page.goto(page_file.as_uri())
    page.wait_for_selector(".plot .main-svg")
    page.emulate_media(media="print")
    assert page.locator("button.data").first.is_hidden()
    assert page.locator(".sentence").first.is_visible()
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
    page.close()


def test_a_trial_page(browser, tmp_path):
    run = run_trial("tests.trials.fake_trials:GOOD", seeds=3, out=tmp_path / "out")
    path = tmp_path / "trial.html"
    path.write_text(report.trial_page(run), encoding="utf-8")
    page = browser.new_page()
    troubles = []
    page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: troubles.append(str(e)))
    page.goto(path.as_uri())
    page.wait_for_selector(".plot .main-svg")
    assert run.verdict.sentence() in page.locator(".verdict").text_content()
    page.click("#trial button.data")
    assert page.locator("#trial-data tbody tr").count() == len(run.cells)
    assert not troubles
    page.close()
