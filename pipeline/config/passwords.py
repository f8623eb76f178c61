"""Passwords of stores, which are written down nowhere."""

from __future__ import annotations

import re

HIDDEN = "***"


def hide_password(url: str) -> str:
    """``url`` with its password, if it has one, as ``***``."""
    url = re.sub(r"""(password=)[^&"'\s,}]*""", rf"\1{HIDDEN}", url)
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not at:
        return url
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}:{HIDDEN}@{host}"
