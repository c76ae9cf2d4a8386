"""Escape text from clients (names of groups, clients, topics) before a terminal shows it."""


def printable(text: str) -> str:
    """Return the text with each unprintable character replaced by an escape such as `\\x1b`.

    Unprintable are control characters, line ends and characters that change the text direction.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
