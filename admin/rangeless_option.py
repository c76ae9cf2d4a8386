"""Options with a number, such as `--max N`, whose help names no range."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.types import OptionHelpExtra


class RangelessOption(click.Option):
    """An option with a number whose bounds go without saying: the help does not show them."""

    def get_help_extra(self, ctx: click.Context) -> "OptionHelpExtra":
        """See click.Option."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra
