"""What several rooms' tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

import hdet

SYNC = [field.name for field in dataclasses.fields(hdet.Sync)]


def policies(**settings: Any) -> dict[str, Any]:
    """Settings of an `hdet.Ensemble` written side by side; those of its average are put into one `hdet.Sync`."""
    sync = {name: settings.pop(name) for name in SYNC if name in settings}
    return {**settings, "sync": hdet.Sync(**sync)} if sync else settings
