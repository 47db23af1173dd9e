"""A folder of the cache is found whole or made whole: under a hidden name, by one process, and renamed when it is done."""
from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

from ipu_lean.data import store

log = logging.getLogger("ipu_lean")


def mark_of(*identity: Any) -> str:
    """16 hex digits that change when what a folder is made from does (plain data)."""
    return hashlib.sha256(json.dumps([store.SCHEMA, *identity], sort_keys=True).encode("utf-8")).hexdigest()[:16]


def find_or_make(
    cache: Path,
    name: str,
    kind: str,
    mark: str,
    make: Callable[[Path], Dict[str, Any]],
    waiting: Callable[[], None],
    *,
    verify: bool = False,
    what: str = "text",
) -> Tuple[Path, Dict[str, Any]]:
    """The folder `NAME-KIND-MARK` and its manifest: found if it is there and whole, made otherwise.

    Args:
        make: fills the folder it is given (which may hold what a killed call left), and returns the manifest it wrote there.
        waiting: called while another process makes it. verify: compare checksums too, not only sizes.
        what: is prepared, for messages.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "corpus"
    final = cache / f"{slug}-{kind}-{mark}"

    def find(aloud: bool) -> Optional[Dict[str, Any]]:
        if not final.exists():
            return None
        manifest = store.read_json(final / store.MANIFEST)
        damage = store.find_damage(final, manifest, mark, verify)
        if damage and aloud:
            log.warning("The prepared %s in %s is damaged (%s) and is made again.", what, final, damage)
        return None if damage else manifest

    manifest = find(aloud=False)
    if manifest is not None:
        return final, manifest
    with store.disk_errors(cache), store.exclusive(cache / "locks" / f"{mark}.lock", waiting) as locked:
        manifest = find(aloud=True)
        if manifest is None:
            mine = "" if locked else f".{socket.gethostname()}.{os.getpid()}"
            work = final.with_name(f".{final.name}{mine}.part")
            with store.disk_errors(work):
                manifest = make(work)
                store.publish(work, final)
    return final, manifest
