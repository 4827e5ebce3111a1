"""What messages quote, kept to a length that a dialog shows."""

QUOTED_AT_MOST = 60  # characters


def shorten(text: object) -> str:
    """``text`` as it is, or its beginning and an ellipsis: pasted text may be of any length."""
    text = str(text)
    return text if len(text) <= QUOTED_AT_MOST else f"{text[: QUOTED_AT_MOST - 3]}..."
