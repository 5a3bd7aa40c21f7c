"""Folders for servers of the tests and benches, which go with all that is in them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from connector.embedded_cluster import SHARED


@contextmanager
def passing(parent: str | None = None) -> Iterator[Path]:
    """A folder, below `parent` or where temporary ones are made, that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        # Root's server runs as another user, who must get through; else the data would lie outside and stay.
        os.chmod(folder, 0o711)
        yield Path(folder)


def forget(folder: Path) -> None:
    """Remove what root's servers keep outside of homes below `folder`, for they could not get through to them."""
    for link in folder.rglob("data"):
        if link.is_symlink() and SHARED in (data := link.readlink()).parents:
            shutil.rmtree(data, ignore_errors=True)
            Path(f"{data}.lock").unlink(missing_ok=True)
