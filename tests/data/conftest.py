"""The tests use a temporary cache folder, and every download fails."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERYFORMER_CACHE", str(folder))
        patch.delenv("EVERYFORMER_DATA", raising=False)
        patch.setattr(urllib.request, "urlopen", _unreachable)
        yield folder


def _unreachable(address: str, **_: Any) -> Any:
    raise urllib.error.URLError("no network")
