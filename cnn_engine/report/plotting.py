"""Checks for matplotlib, which draws all plots."""

from __future__ import annotations


def unavailable() -> str | None:
    """Returns why no plot can be drawn, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return (
            f"no plot: expected the package matplotlib, found none ({error}); "
            "pip install 'cnn-engine[lab]'"
        )
    return None
