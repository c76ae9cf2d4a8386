"""What tests of the console's pages do in a browser."""

import json
import urllib.request

from playwright.sync_api import FloatRect, Locator, Page, expect

from tests.support.varve import VarveBroker

# Programs, the first one found. Without a window, the shell takes the least processor time.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
IO_LIMIT = "log.cleaner.io.max.bytes.per.second"


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


def limit_io(broker: VarveBroker, change: object) -> None:
    """Change the cleaner's rate limit, for example to keep a clean running."""
    url, headers = f"{broker.url}/api/v1/settings", {"Content-Type": "application/json"}
    body = json.dumps(change).encode()
    request = urllib.request.Request(url, body, headers, method="PATCH")
    urllib.request.urlopen(request, timeout=30).close()


def row_with(page: Page, text: str) -> Locator:
    """Return the rows of tables that contain a text."""
    return page.get_by_role("row").filter(has_text=text)


def box_of(part: Locator) -> FloatRect:
    """Return where a part of the page is."""
    box = part.bounding_box()
    assert box is not None
    return box


def cramped_dialogs(page: Page) -> list[str]:
    """Open every dialog of a page; return what is cut, or a text input that is too narrow."""
    return list(
        page.evaluate(
            """() => [...document.querySelectorAll("dialog")].flatMap((dialog) => {
              dialog.showModal();
              const frame = dialog.getBoundingClientRect();
              const isWide = (place) => place.width > 0
                && (place.left < frame.left || place.right > frame.right);
              const found = [...dialog.querySelectorAll("*")].flatMap((element) => {
                const place = element.getBoundingClientRect();
                const text = document.createRange();
                text.selectNodeContents(element);
                const isText = element.matches("input[type=text], input[type=password], textarea");
                const isCramped = isWide(place) || isWide(text.getBoundingClientRect())
                  || (isText && place.width < 120);
                return isCramped ? [`${dialog.ariaLabel}: ${element.outerHTML.slice(0, 100)}`] : [];
              });
              const isOut = frame.left < 0 || frame.right > innerWidth;
              if (isOut) found.push(`${dialog.ariaLabel} is wider than the window`);
              dialog.close();
              return found;
            })"""
        )
    )
