"""The pictures of docs/page.md, of a run that has ended: python -m tests.e2e.page_pictures runs/NAME docs"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright


def chromium(playwright: Any) -> str | None:
    """Playwright's own, or the system's; None where there is none."""
    own = Path(playwright.chromium.executable_path)
    return str(own) if own.exists() else shutil.which("chromium") or shutil.which("google-chrome")


def main() -> None:
    """Writes them."""
    run, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(playwright), args=["--no-sandbox"])
        page = started.new_page(viewport={"width": 1200, "height": 640})
        page.goto(f"file://{run}/report.html#curves")
        page.screenshot(path=folder / "page-curves.png")
        page.keyboard.press("3")
        page.locator("#rollouts label", has_text="order").locator("select").select_option("spread")
        page.locator(".list .row").nth(1).click()
        page.screenshot(path=folder / "page-rollouts.png")
        started.close()


if __name__ == "__main__":
    main()
