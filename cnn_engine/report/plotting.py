"""What the plots of the laboratory share: whether there is a library that draws them."""

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
