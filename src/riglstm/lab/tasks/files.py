"""Files of a dataset: where they lie, and reading them so that no damaged one passes for whole.

What is pinned is the content of each file, so it may lie there plain, gzipped or in an archive.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import tarfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


class DataError(ValueError):
    """Data that is missing, damaged or out of reach; the message says the way out."""


class DamagedError(DataError):
    """A file that is not what it should be; whoever knows the dataset adds the way out."""


class Content(NamedTuple):
    """One file of a dataset, unpacked."""

    name: str
    checksum: str
    """"sha256:" or "md5:", and the sum in hexadecimal."""
    size: int | None = None
    """Bytes, where they are known."""


class Images(NamedTuple):
    """A dataset of pictures, on the CPU."""

    train_images: Tensor
    """(60000, 1, 28, 28) uint8, for instance: picture, channel, row, column."""
    train_labels: Tensor
    """int64, from 0."""
    test_images: Tensor
    test_labels: Tensor


class Layout(NamedTuple):
    """A form in which a dataset is handed around."""

    contents: tuple[Content, ...]
    parse: Callable[[Sequence[bytes]], Images]
    """From the contents, in their order."""
    folder: str = "."
    """Where the files lie, under the dataset's own folder; they may also lie there directly."""
    archive: str | None = None
    """A tar file that holds them all."""
    spellings: tuple[tuple[str, str], ...] = ()
    """(part of a name, what stands for it in other copies)."""


class Download(NamedTuple):
    """A file on the network."""

    name: str
    checksum: str
    size: int
    urls: tuple[str, ...]
    """Mirrors, in the order in which they are tried."""


class Dataset(NamedTuple):
    """What is known of a dataset before any file is opened."""

    title: str
    folders: tuple[str, ...]
    """Names of its folder below the data folder; downloads go to the first."""
    layouts: tuple[Layout, ...]
    downloads: tuple[Download, ...]


class Place(NamedTuple):
    """A dataset that was found."""

    layout: Layout
    paths: tuple[Path, ...]
    """One for each content, or the archive alone."""


def data_folder(data_dir: Path | None) -> Path:
    """The folder of all data: as given, or from RIGLSTM_DATA, or in the user's cache."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    if named := os.environ.get("RIGLSTM_DATA"):
        return Path(named).expanduser()
    return cache_folder()


def cache_folder() -> Path:
    """The folder that is written to without being named."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "riglstm"


def aside(path: Path) -> Path:
    """A name beside a file's, to write to before it is moved there; no process has it twice."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")


@contextlib.contextmanager
def alone_in(folder: Path, show: Callable[[str], None]) -> Iterator[bool]:
    """Make a folder, and wait until no other process makes files in it; whether that was had."""
    handle = _locked(folder, show)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _locked(folder: Path, show: Callable[[str], None]) -> int | None:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
        except (ImportError, OSError):
            return None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                show(f"waiting for another process that makes files in {folder}")
                fcntl.flock(handle, fcntl.LOCK_EX)
            # Whoever had it may have failed, and taken the empty folder away.
            if folder.is_dir() and os.path.samestat(os.fstat(handle), folder.stat()):
                return handle
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError):
                return None
            raise
        os.close(handle)


def locate(dataset: Dataset, folder: Path, expected: frozenset[Path] = frozenset()) -> Place | None:
    """The files of a dataset in one folder, unpacked ones before an archive.

    `expected`: files that count as being there.
    """
    for layout, paths in _candidates(dataset, folder, expected):
        whole = tuple(path for path in paths if path is not None)
        if len(whole) == len(paths):
            return Place(layout, whole)
    for layout in dataset.layouts:
        if layout.archive is not None:
            archive = folder / layout.archive
            if archive in expected or archive.is_file():
                return Place(layout, (archive,))
    return None


def missing(dataset: Dataset, folder: Path) -> list[str]:
    """What a folder that holds some of the files lacks; empty where there are none at all."""
    for layout, paths in _candidates(dataset, folder):
        names = [c.name for c, path in zip(layout.contents, paths, strict=True) if path is None]
        if len(names) < len(paths):
            return names
    return []


def _candidates(
    dataset: Dataset, folder: Path, expected: frozenset[Path] = frozenset()
) -> Iterator[tuple[Layout, list[Path | None]]]:
    for layout in dataset.layouts:
        for base in (folder / layout.folder, folder):
            yield layout, [_path(base, c.name, layout, expected) for c in layout.contents]


def _path(base: Path, name: str, layout: Layout, expected: frozenset[Path]) -> Path | None:
    names = [name, *(name.replace(part, other) for part, other in layout.spellings)]
    candidates = [base / (n + ending) for n in names for ending in ("", ".gz")]
    return next((path for path in candidates if path in expected or path.is_file()), None)


def read(place: Place) -> Images:
    """The dataset, every file of it checked."""
    contents, paths = place.layout.contents, place.paths
    if len(paths) == len(contents):
        pairs = zip(paths, contents, strict=True)
        return place.layout.parse([read_checked(path, content) for path, content in pairs])
    blobs = read_archive(paths[0], [content.name for content in contents])
    for data, content in zip(blobs, contents, strict=True):
        check(data, content, paths[0])
    return place.layout.parse(blobs)


def read_checked(path: Path, content: Content) -> bytes:
    """A file's bytes, unpacked, if they are what they should be."""
    data = read_file(path)
    check(data, content, path)
    return data


def read_file(path: Path) -> bytes:
    """A file's bytes, unpacked if it ends in .gz."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, "a whole gzip file", str(error)) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from error


def read_archive(path: Path, names: Sequence[str]) -> list[bytes]:
    """Members of a tar file, by their last name."""
    found: dict[str, bytes] = {}
    try:
        # In one pass: going back would unpack the archive again.
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None and Path(member.name).name in names:
                    found[Path(member.name).name] = file.read()
    except (EOFError, tarfile.TarError, zlib.error, OSError) as error:
        raise _damaged(path, "a whole tar archive", str(error)) from error
    if lost := [name for name in names if name not in found]:
        raise _damaged(path, f"an archive with {', '.join(names)}", f"none of {', '.join(lost)}")
    return [found[name] for name in names]


def check(data: bytes, content: Content, path: Path) -> None:
    """The content is what the dataset's authors published."""
    if content.size is not None and len(data) != content.size:
        got = f"{len(data):,} bytes" + (", cut short" if len(data) < content.size else "")
        raise _damaged(path, f"{content.size:,} bytes of {content.name}", got)
    kind, _, expected = content.checksum.partition(":")
    got = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
    if got != expected:
        raise _damaged(path, f"{content.name} with {kind} {expected}", got)


def _damaged(path: Path, expected: str, got: str) -> DamagedError:
    return DamagedError(f"{path} is damaged, or another file: expected {expected}, got {got}")
