"""Shares for people."""


def percent(share: float) -> str:
    """A share: "12 %"; small ones with a digit more."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share:.1%}".replace("%", " %") if share < 0.1 else f"{share:.0%}".replace("%", " %")
