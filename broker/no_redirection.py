"""Requests of the broker to other servers follow no redirection."""

import urllib.request


class NoRedirection(urllib.request.HTTPRedirectHandler):
    """Makes an error of a redirection: the settings name the server, and no other."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """Follow nothing."""
        return
