"""How numbers are written for people."""

import math


def number(value: float) -> str:
    """Three digits, or all of those before the point."""
    if not math.isfinite(value) or abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value + 0.0:.3g}"


def score_text(value: float) -> str:
    """One digit more, from 1 on: for what is compared closely."""
    if abs(value) < 1 or not abs(value) < 1e6:
        return number(value)
    return f"{value:#.4g}" if abs(value) < 999.95 else f"{value:,.0f}"
