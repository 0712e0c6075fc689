"""Is a folder on a network file system?"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["network_file_system"]

MOUNTS = Path("/proc/self/mountinfo")

_KINDS = frozenset(
    [
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "smb3",
        "smbfs",
        "wekafs",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.goofys",
        "fuse.juicefs",
        "fuse.mfs",
        "fuse.mount-s3",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
    ]
)


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that holds `path`, such as "nfs4"; None for any other."""
    try:
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    longest, kind = -1, ""
    for line in lines:
        mount, _, filesystem = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one hides the earlier.
        if inside and len(point) >= longest:
            longest, kind = len(point), filesystem.split(" ")[0]
    return kind if kind in _KINDS else None
