"""What tests of the console's pages do in a browser."""

from playwright.sync_api import Locator, Page, expect

from tests.support.varve import VarveBroker

# Programs, the first one found. Without a window, the shell takes the least processor time.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def open_page(page: Page, broker: VarveBroker, path: str) -> None:
    """Open a page of the console and wait until it has its data."""
    page.goto(f"{broker.url}/#/{path.removeprefix('#/')}")
    expect(page.locator("h1")).to_be_visible()
    expect(page.locator(".loading")).to_have_count(0)


def confirm(page: Page, button: str, *, typed: str | None = None) -> None:
    """Press a button of the open dialog, after what has to be typed."""
    dialog = page.get_by_role("dialog")
    if typed is not None:
        dialog.get_by_role("textbox").fill(typed)
    dialog.get_by_role("button", name=button, exact=True).click()


def row_with(page: Page, text: str) -> Locator:
    """Return the rows of tables that contain a text."""
    return page.get_by_role("row").filter(has_text=text)
