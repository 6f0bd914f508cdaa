"""Debian's Chromium through Playwright, with pages that may ask for nothing."""

import contextlib
import pathlib
import shutil

import pytest

EXECUTABLE = shutil.which("chromium")


@contextlib.contextmanager
def launched():
    """A browser; the test is skipped where there is none."""
    if EXECUTABLE is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=EXECUTABLE, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser, path: pathlib.Path, *, width=1280, height=900, **context):
    """A page, with the network off; leaving it checks that nothing was asked for or went wrong."""
    with browser.new_context(
        viewport={"width": width, "height": height}, offline=True, **context
    ) as new:
        page, requests, complaints = new.new_page(), [], []
        page.on("request", lambda request: requests.append(request.url[:200]))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        yield page
        assert complaints == []
        outside = [url for url in requests if not url.startswith(("data:", "blob:"))]
        assert outside == [path.as_uri()]
