"""Keys as text: any bytes on one line, without control characters."""

from base64 import b64encode
from typing import Final

CHARS_MAX: Final = 80


def key_text(key: bytes | None) -> str:
    """Return a key for people: quoted text if it is printable, else hexadecimal; cut if long."""
    if key is None:
        return "without a key"
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and (text or not key):
        return repr(text if len(text) <= CHARS_MAX else f"{text[:CHARS_MAX]}...")
    digits = key.hex()
    return f"0x{digits if len(digits) <= CHARS_MAX else f'{digits[:CHARS_MAX]}...'}"


def key_json(key: bytes | None) -> dict[str, str | None]:
    """Return a key for JSON output: in base64 and as text."""
    encoded = None if key is None else b64encode(key).decode()
    return {"key": encoded, "key_text": key_text(key)}
