"""Text that others chose (names of groups, clients, topics), made safe to show on a terminal."""


def printable(text: str) -> str:
    """Return the text with every character that is not printable as an escape such as `\\x1b`.

    Those are control characters, line ends and characters that change the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
