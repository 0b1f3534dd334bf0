"""Checkpoints as things on a disk: whole or not, published at once, found again after a kill at any instant.

A sharded checkpoint is a folder of DCP's files plus a marker, ``memwall.json``, which lists every file and its size
and is written and synced last: a folder is whole exactly when its marker is there and every listed file has its size.
A full checkpoint is one file, written beside and put in place by one rename, so a file under its final name is whole.

How replacing ``X`` never leaves a moment without a whole checkpoint: the new one grows in ``X.partial-<id>`` until its
marker is there; from then on two whole ones exist. Only then is ``X`` renamed to ``X.old-<id>``, the new one renamed to
``X``, and the old one removed, its marker first. A process killed in between leaves one of these names behind, and
``find_last``, ``resolve`` and ``tidy`` treat a whole folder under any of them as what it is. While a partial folder is
being written its writer holds a lock on it, which the kernel drops when the writer dies: that is how ``tidy`` knows
which leftovers nobody will finish. On a file system without such locks leftovers are kept.

It does not detect bytes that rot at constant size.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickletools
import re
import shutil
import time
import uuid
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memwall_strategy.core.errors import CheckpointError

MARKER = "memwall.json"
FORMAT = "memwall-checkpoint"
VERSION = 1

_LEFTOVER = re.compile(r"^(?P<name>.+)\.(?P<stage>partial|old)-(?P<id>[0-9a-f]{8})$")


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What the commit marker says.

    Attributes:
        step: optimizer steps taken when the checkpoint was made.
        world_size: ranks that wrote it.
        created_s: seconds since the epoch when it was committed.
        torch: version of torch that wrote it.
        files: size in bytes of every file of the folder but the marker.
    """

    step: int
    world_size: int
    created_s: float
    torch: str
    files: dict[str, int]
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Whole:
    """A checkpoint that ``verify`` found whole.

    Attributes:
        path: where it is.
        created_s: seconds since the epoch when it was committed.
        marker: the marker of a sharded checkpoint; None for a full file.
    """

    path: Path
    created_s: float
    marker: Marker | None


# -- asking --


def verify(path: str | os.PathLike[str]) -> Whole:
    """Return what stands at ``path``, exactly there.

    Raises:
        CheckpointError: nothing is there, it is half-written, a file is missing or truncated, or it is something else.
    """
    where = Path(path)
    if where.is_file():
        return _verify_file(where)
    if not where.is_dir():
        raise CheckpointError(f"There is no checkpoint at {where}. Check the path, or use find_last on its folder.")
    marker = _read_marker(where)
    for name, size_bytes in marker.files.items():
        try:
            found_bytes = (where / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"Checkpoint {where} lacks its file {name}. Use another checkpoint.") from None
        if found_bytes != size_bytes:
            raise CheckpointError(
                f"Checkpoint {where}: file {name} has {found_bytes} bytes, not the {size_bytes} that were written. "
                "It is truncated or damaged; use another checkpoint."
            )
    return Whole(where, marker.created_s, marker)


def find_last(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest whole checkpoint in ``folder``; half-written and foreign entries are passed over.

    After a kill in the middle of a replacement it may stand under a leftover's name; ``tidy`` puts it in place.
    """
    whole = list(_whole_among(Path(folder).iterdir())) if Path(folder).is_dir() else []
    return max(whole, key=_age_order).path if whole else None


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return the newest whole checkpoint that goes by the name ``path``.

    Normally that is ``path`` itself; after a kill in the middle of a replacement it may be a leftover beside it. The
    name of a leftover stands for the checkpoint that it was to become.

    Raises:
        CheckpointError: as ``verify(path)``, when none is whole.
    """
    where = Path(path)
    parts = _LEFTOVER.match(where.name)
    final = where.with_name(parts["name"]) if parts else where
    whole = list(_whole_among([final, *_leftovers(final.parent, final.name)]))
    if not whole:
        return verify(final if os.path.lexists(final) else where).path
    return max(whole, key=_age_order).path


def _age_order(whole: Whole) -> tuple[float, int, str]:
    return whole.created_s, whole.marker.step if whole.marker else 0, whole.path.name


def _whole_among(paths: Iterator[Path] | list[Path]) -> Iterator[Whole]:
    for path in paths:
        if path.is_file() and _LEFTOVER.match(path.name):
            continue  # a file carries no marker: before its rename nobody knows whether it is complete
        try:
            yield verify(path)
        except CheckpointError:
            continue


def _read_marker(folder: Path) -> Marker:
    try:
        fields: dict[str, Any] = json.loads((folder / MARKER).read_text())
        if fields["format"] != FORMAT:
            raise CheckpointError(f"{folder} is not a memwall checkpoint: its {MARKER} says {fields['format']!r}.")
        if fields["version"] > VERSION:
            raise CheckpointError(
                f"Checkpoint {folder} has format version {fields['version']}, this memwall reads up to {VERSION}. "
                "Update memwall."
            )
        return Marker(**fields)
    except FileNotFoundError:
        raise CheckpointError(_without_marker(folder)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"Checkpoint {folder}: {MARKER} cannot be read ({error}). Use another one.") from error


def _without_marker(folder: Path) -> str:
    ours = _LEFTOVER.match(folder.name) or any(folder.glob("*.distcp")) or (folder / ".metadata").exists()
    if ours:
        return (
            f"Checkpoint {folder} is half-written, or not memwall's: it has no commit marker ({MARKER}). "
            "Use an earlier one; find_last on its folder returns the last whole one."
        )
    return f"{folder} is a directory of something else, not a checkpoint: it has no {MARKER}. Check the path."


def _verify_file(path: Path) -> Whole:
    foreign = f"{path} is not a checkpoint: "
    remedy = "Give a checkpoint folder, or a file with the keys of a Lightning checkpoint."
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if not pickles:
                raise CheckpointError(f"{foreign}a zip file without torch's data. {remedy}")
            names = {argument for _, argument, _ in pickletools.genops(archive.read(pickles[0]))}
    except zipfile.BadZipFile:
        raise CheckpointError(f"{foreign}it is truncated, or not a file of torch.save. {remedy}") from None
    if "state_dict" not in names:
        raise CheckpointError(f"{foreign}a plain torch file without the key 'state_dict'. {remedy}")
    return Whole(path, path.stat().st_mtime, None)


# -- writing --


class Partial:
    """The place where a new checkpoint grows until it is published. The process that makes it owns it.

    Args:
        path: the final name.
        id: eight hex digits, the same on all ranks.
    """

    def __init__(self, path: Path, id: str) -> None:
        self.final, self.id = path, id
        self.path = path.with_name(f"{path.name}.partial-{id}")
        self._mine = False
        self._lock: int | None = None

    @staticmethod
    def new_id() -> str:
        """Eight random hex digits."""
        return uuid.uuid4().hex[:8]

    def create_folder(self) -> None:
        """Make the empty folder, and the folders above it, and lock it."""
        self.path.mkdir(parents=True)
        self._own()

    def create_file(self) -> None:
        """Make the empty file, and the folders above it, and lock it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(exist_ok=False)
        self._own()

    def commit(self, *, step: int, world_size: int, torch_version: str, files: dict[str, int]) -> None:
        """Write the marker: from here on the folder is whole. Syncs the folder before and after."""
        marker = Marker(step=step, world_size=world_size, created_s=time.time(), torch=torch_version, files=files)
        sync_folder(self.path)
        write_synced(self.path / f"{MARKER}.new", json.dumps(asdict(marker), indent=1).encode())
        os.rename(self.path / f"{MARKER}.new", self.path / MARKER)
        sync_folder(self.path)

    def publish(self) -> None:
        """Put it in place of whatever has the final name, as the module's text says."""
        replaced: Path | None = None
        over_a_folder = self.final.is_dir() and not self.final.is_symlink()
        if os.path.lexists(self.final) and (over_a_folder or self.path.is_dir()):  # else one rename does both
            replaced = self.final.with_name(f"{self.final.name}.old-{self.id}")
            os.rename(self.final, replaced)
        try:
            os.replace(self.path, self.final)
        except OSError:
            if replaced is not None:
                os.rename(replaced, self.final)
            raise
        sync_folder(self.final.parent)
        self._disown()
        if replaced is not None:
            try:
                discard(replaced)
            except OSError as error:
                warnings.warn(f"{self.final} is saved, but {replaced} could not be removed: {error}", stacklevel=2)

    def abandon(self) -> None:
        """Remove it. Does nothing when another process made it, or it was never made, or is published already."""
        if self._mine and os.path.lexists(self.path):
            discard(self.path)
        self._disown()

    def _own(self) -> None:
        self._mine = True
        self._lock = _try_lock(self.path)

    def _disown(self) -> None:
        self._mine = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write_synced(path: Path, content: bytes | memoryview) -> int:
    """Write a file and wait until it is on the disk; return its size in bytes."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a checkpoint, marker first, so that what a kill leaves of it never looks whole; a link is unlinked."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


# -- after a kill --


def tidy(folder: str | os.PathLike[str]) -> list[Path]:
    """Finish or remove what dead runs left in ``folder``; return the leftovers that are gone.

    For each name the newest whole checkpoint ends up under it; the rest is removed. Names that a living process works
    on are left alone. Call it on one rank.
    """
    where = Path(folder)
    if not where.is_dir():
        return []
    names = {match["name"] for entry in where.iterdir() if (match := _LEFTOVER.match(entry.name))}
    gone: list[Path] = []
    for name in sorted(names):
        gone += _tidy_name(where, name)
    return gone


def _tidy_name(folder: Path, name: str) -> list[Path]:
    leftovers, final = _leftovers(folder, name), folder / name
    locks = [_try_lock(path) for path in leftovers]
    try:
        if None in locks:
            return []
        whole = list(_whole_among([final, *leftovers]))
        best = max(whole, key=_age_order).path if whole else final
        if best != final:
            if os.path.lexists(final):
                # the older one: aside, so that the newer one can take its name, then removed with the rest
                aside = final.with_name(f"{name}.old-{Partial.new_id()}")
                os.rename(final, aside)
                leftovers.append(aside)
            os.rename(best, final)
            sync_folder(folder)
        gone = [path for path in leftovers if path != best]
        for path in gone:
            discard(path)
        return leftovers
    finally:
        for lock in locks:
            if lock is not None:
                os.close(lock)


def _leftovers(folder: Path, name: str) -> list[Path]:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [entry for entry in entries if (match := _LEFTOVER.match(entry.name)) and match["name"] == name]


def _try_lock(path: Path) -> int | None:
    """Lock a file or folder for as long as the descriptor is open; None when another holds it, or locks do not work."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
