"""The datasets by name: finding them in a folder, and getting them from the network.

A download is written beside its place and moved there when its sum is right.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from riglstm.lab.tasks.cifar import CIFAR10
from riglstm.lab.tasks.files import (
    DamagedError,
    DataError,
    Dataset,
    Download,
    Images,
    alone_in,
    aside,
    data_folder,
    locate,
    missing,
    read,
    read_checked,
)
from riglstm.lab.tasks.idx import FASHION, MNIST

STALE = 3600.0
"""Seconds after which what a killed process left of a download is removed."""
OURS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)
"""Errors in the middle of a download that are the folder's; all others are the network's."""

DATASETS: dict[str, Dataset] = {"mnist": MNIST, "fashion": FASHION, "cifar": CIFAR10}


def find(name: str, data_dir: Path | None = None) -> Path:
    """The folder that holds a dataset's files: the data folder, or one below it."""
    dataset, root = _known(name), data_folder(data_dir)
    folders = (*(root / below for below in dataset.folders), root)
    for folder in folders:
        if locate(dataset, folder) is not None:
            return folder
    wanted = ", ".join(download.name for download in dataset.downloads)
    got = "no such files" if root.is_dir() else "no such folder"
    for folder in folders:
        if lacks := missing(dataset, folder):
            got = f"{folder} without {', '.join(lacks)}"
    raise DataError(
        f"{name}: expected {wanted}, packed or unpacked, in {root} or {folders[0]}, got {got}; "
        f"get them with `riglstm data {name} --data-dir {root}`, or name the folder that has them "
        "with --data-dir or RIGLSTM_DATA"
    )


def load(name: str, data_dir: Path | None = None) -> Images:
    """A dataset that is there, every file of it checked."""
    place = locate(_known(name), find(name, data_dir))
    assert place is not None
    with _way_out(name, data_folder(data_dir)):
        return read(place)


def obtain(
    name: str, data_dir: Path | None = None, show: Callable[[str], None] | None = None
) -> Images:
    """A dataset that is there; one that is not is downloaded, unless a folder was named for it."""
    if data_dir is None and not os.environ.get("RIGLSTM_DATA"):
        try:
            find(name)
        except DataError:
            fetch(name, None, show)
    return load(name, data_dir)


def describe(name: str, data_dir: Path | None = None) -> str:
    """A line on a dataset: what it is, and where it lies or what is wrong with it."""
    title = _known(name).title
    try:
        folder = find(name, data_dir)
    except DataError:
        return f"{title}; not in {data_folder(data_dir)}"
    try:
        load(name, data_dir)
    except DataError as error:
        return f"{title}; in {folder}, but {error}"
    return f"{title}; in {folder}, all sums right"


def fetch(
    name: str, data_dir: Path | None = None, show: Callable[[str], None] | None = None
) -> Path:
    """Download what is missing of a dataset; gives the folder that holds it.

    Of several processes that want it one downloads, and the others wait for it.
    """
    dataset, root = _known(name), data_folder(data_dir)
    show = show or (lambda line: None)
    with contextlib.suppress(DataError):
        load(name, data_dir)
        return find(name, data_dir)
    folder = root / dataset.folders[0]
    with _made(folder, show):
        with _way_out(name, root):
            _nothing_in_the_way(dataset, folder)
        for download in dataset.downloads:
            # Another process may have brought it while this one waited.
            if not _is_whole(folder / download.name, download):
                _get(download, folder, show)
    load(name, data_dir)
    return find(name, data_dir)


def _nothing_in_the_way(dataset: Dataset, folder: Path) -> None:
    """No damaged file would be read in the place of a download."""
    downloads = frozenset(folder / download.name for download in dataset.downloads)
    place = locate(dataset, folder, expected=downloads)
    assert place is not None
    if len(place.paths) < len(place.layout.contents):
        return
    for path, content in zip(place.paths, place.layout.contents, strict=True):
        if path not in downloads:
            read_checked(path, content)


@contextlib.contextmanager
def _way_out(name: str, root: Path) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise DataError(
            f"{error}; if it belongs to {name}, delete it and download it again with "
            f"`riglstm data {name} --data-dir {root}`; if it belongs to another set, leave it, and "
            f"put the files of {name} into {root / _known(name).folders[0]}"
        ) from error


def _known(name: str) -> Dataset:
    if name not in DATASETS:
        raise DataError(f"the dataset must be one of {', '.join(DATASETS)}, got {name!r}")
    return DATASETS[name]


@contextlib.contextmanager
def _made(folder: Path, show: Callable[[str], None]) -> Iterator[None]:
    """The folder exists, for this process alone; if the work in it fails, empty ones go again."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with alone_in(folder, show):
            try:
                yield
            except BaseException:
                for path in new:
                    with contextlib.suppress(OSError):
                        path.rmdir()
                raise
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to ({error.strerror}): expected a folder with free "
            "space; name another with --data-dir or RIGLSTM_DATA"
        ) from error


def _get(download: Download, folder: Path, show: Callable[[str], None]) -> None:
    """Try the mirrors in turn."""
    downloader = _downloader(download, folder)
    part = aside(folder / download.name)
    for old in folder.glob(f"{download.name}.*.part"):
        # Where there are no locks, another process may take it away first.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > STALE:
                old.unlink()
    failures = []
    for url in download.urls:
        show(f"downloading {url} ({download.size / 1e6:.1f} MB)")
        try:
            with part.open("wb") as file:
                broken = _network_error(downloader, url, file)
                file.flush()
                os.fsync(file.fileno())
            if broken is None and _is_whole(part, download):
                part.replace(folder / download.name)
                return
            broken = broken or f"{part.stat().st_size:,} bytes with another sum"
            failures.append(f"{url}: {broken}")
        finally:
            part.unlink(missing_ok=True)
    raise DataError(
        f"{download.name} could not be downloaded: expected {download.size:,} bytes with "
        f"{download.checksum}, got from\n  " + "\n  ".join(failures) + "\n"
        f"check the network, or put the file into {folder} by other means, or name a folder "
        "that has it with --data-dir or RIGLSTM_DATA"
    )


def _network_error(downloader: Downloader, url: str, file: IO[bytes]) -> str | None:
    """Download; what went wrong on the way, in words."""
    try:
        downloader(url, file, None)
    except OSError as error:
        if error.errno in OURS:
            raise
        # What a server says beside a refusal is never read, and keeps the connection open.
        if (response := getattr(error, "response", None)) is not None:
            response.close()
        cause = getattr(error.args[0], "reason", error) if error.args else error
        return str(cause) or type(error).__name__
    return None


class Downloader(Protocol):
    """What pooch downloads with."""

    def __call__(self, url: str, output_file: IO[bytes], pooch: None) -> object:
        """Write what lies at the address into the file."""


def _downloader(download: Download, folder: Path) -> Downloader:
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(
            "downloading needs the package pooch, got none; install it with `pip install pooch`, "
            f"or put {download.name} into {folder} yourself, from {download.urls[0]}"
        ) from error
    bar = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    downloader: Downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16)
    return downloader


def _is_whole(path: Path, download: Download) -> bool:
    if not path.is_file() or path.stat().st_size != download.size:
        return False
    kind, _, expected = download.checksum.partition(":")
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest() == expected
