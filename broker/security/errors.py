"""Errors of authentication. Their texts never contain a password or a token."""


class AuthenticationError(Exception):
    """The client is refused. `answer` is for the client, the reason for the log."""

    def __init__(self, reason: str, answer: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.answer = answer


class InvalidTokenError(AuthenticationError):
    """The client is refused and learns no reason, so that it cannot find out which users exist."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "")
