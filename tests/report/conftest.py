"""One examination and one browser for all report tests."""

import shutil

import pytest

from assay.examine import examine


@pytest.fixture(scope="session")
def examination():
    return examine("builtin:tiny-lm", level="quick", tokens=512, context=64)


@pytest.fixture(scope="session")
def browser():
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.skip("no Chromium on this machine: the pages are not opened")
    playwright = pytest.importorskip("playwright.sync_api")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-sync"]
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=executable, args=arguments)
        yield chromium
        chromium.close()
