"""Files of pictures: whole ones in every form are read, damaged ones never, and downloads."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from helpers import files_below, free_port, put, seeded
from riglstm.lab.tasks.datasets import (
    DATASETS,
    DataError,
    Dataset,
    Download,
    Form,
    alone_in,
    data_folder,
    fetch,
    find,
    load,
    obtain,
)

MNIST, CIFAR10 = DATASETS["mnist"], DATASETS["cifar"]
NAMES = list(MNIST.forms[0].sums)
PIXELS = 3 * 32 * 32
DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _a_tiny_set_and_no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch)
    monkeypatch.delenv("RIGLSTM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def idx_bytes(values: Tensor) -> bytes:
    return (
        bytes([0, 0, 8, values.dim()])
        + b"".join(struct.pack(">I", n) for n in values.shape)
        + bytes(values.flatten().tolist())
    )


def pictures(n: int) -> tuple[Tensor, Tensor]:
    gen = seeded(n)
    return (
        torch.randint(256, (n, 28, 28), generator=gen, dtype=torch.uint8),
        torch.randint(10, (n,), generator=gen, dtype=torch.uint8),
    )


PARTS = (*pictures(7), *pictures(3))
CONTENTS = {name: idx_bytes(part) for name, part in zip(NAMES, PARTS, strict=True)}
PACKED = {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in CONTENTS.items()}
MIXED = dict([*PACKED.items()][::2] + [*CONTENTS.items()][1::2])


def sums(files: dict[str, bytes]) -> dict[str, str]:
    return {name: sha256(data) for name, data in files.items()}


def tiny(*mirrors: str) -> Dataset:
    """A set with MNIST's names and ten pictures."""
    downloads = tuple(Download(n, sha256(data), len(data)) for n, data in PACKED.items())
    form = Form(sums(CONTENTS), MNIST.forms[0].parse)
    return Dataset("Tiny: 7 + 3 pictures", ("tiny", "TINY/raw"), (form,), downloads, mirrors)


def use(monkeypatch: pytest.MonkeyPatch, *mirrors: str) -> None:
    monkeypatch.setitem(DATASETS, "tiny", tiny(*mirrors))


def is_tiny(data_dir: Path) -> bool:
    images, labels, test_images, test_labels = load("tiny", data_dir)
    parts = (images[:, 0], labels, test_images[:, 0], test_labels)
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(parts, PARTS, strict=True))


@pytest.mark.parametrize("below", [".", "tiny", "TINY/raw"])
@pytest.mark.parametrize("files", [PACKED, CONTENTS, MIXED], ids=["gz", "plain", "mixed"])
def test_files_are_found_in_every_form_and_place(tmp_path, below, files):
    put(tmp_path / below, files)
    assert find("tiny", tmp_path) == tmp_path / below
    assert is_tiny(tmp_path)


def test_a_folder_with_the_name_of_the_set_comes_first(tmp_path):
    put(tmp_path, dict.fromkeys(CONTENTS, b"another set"))
    put(tmp_path / "tiny", PACKED)
    assert is_tiny(tmp_path)


def test_the_folder_comes_from_the_argument_or_the_environment_or_the_cache(tmp_path, monkeypatch):
    assert data_folder(None) == tmp_path / "cache" / "riglstm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder(None) == Path.home() / ".cache" / "riglstm"
    monkeypatch.setenv("RIGLSTM_DATA", "~/sets")
    assert data_folder(None) == Path.home() / "sets"
    assert data_folder(tmp_path) == tmp_path


def test_missing_files_are_named_with_the_way_out(tmp_path):
    way_out = r"get them with `riglstm data tiny --data-dir .*`, or name the folder that has them"
    expected = rf"expected train-images.*\.gz.* got none or not all; {way_out}"
    with pytest.raises(DataError, match=expected):
        find("tiny", tmp_path / "nowhere")
    put(tmp_path / "tiny", {NAMES[0]: CONTENTS[NAMES[0]], f"{NAMES[3]}.gz": b""})
    with pytest.raises(DataError, match=expected):
        load("tiny", tmp_path)
    with pytest.raises(DataError, match="must be one of mnist, cifar, tiny, got 'minst'"):
        find("minst")


def test_a_file_that_is_cut_short_changed_or_unreadable_is_refused(tmp_path):
    name = NAMES[0]
    put(tmp_path, PACKED)
    packed = tmp_path / f"{name}.gz"
    whole = packed.read_bytes()
    way_out = "; if it belongs to tiny, delete it, and download it again with `riglstm data tiny"
    for cut in (0, 1, 15, len(whole) // 2, len(whole) - 1):
        packed.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=f"{name}.gz .*is damaged.*{way_out} --data-dir"):
            load("tiny", tmp_path)
    changed = CONTENTS[name][:-1] + bytes([CONTENTS[name][-1] ^ 1])
    packed.write_bytes(gzip.compress(changed))
    want, got = (hashlib.sha256(data).hexdigest() for data in (CONTENTS[name], changed))
    expected = (
        f"is damaged, or another file: expected {name} with sha256 {want}, got {got}{way_out}"
    )
    with pytest.raises(DataError, match=expected):
        load("tiny", tmp_path)
    (tmp_path / name).write_bytes(CONTENTS[name][:-1])
    with pytest.raises(DataError, match=f"expected {name} with sha256"):
        load("tiny", tmp_path)


def records(n: int, seed: int) -> tuple[bytes, list[int]]:
    """Pixels of n pictures and their labels."""
    gen = seeded(seed)
    pixels = torch.randint(256, (n * PIXELS,), generator=gen, dtype=torch.uint8)
    return bytes(pixels.tolist()), torch.randint(10, (n,), generator=gen).tolist()


def binary(pixels: bytes, labels: list[int]) -> bytes:
    rows = (pixels[i * PIXELS : (i + 1) * PIXELS] for i in range(len(labels)))
    return b"".join(bytes([label]) + row for label, row in zip(labels, rows, strict=True))


def python2_pickle(pixels: bytes, labels: list[int]) -> bytes:
    """What Python 2 writes for {"data": array, "labels": list}, opcode by opcode."""
    shape = b"J" + struct.pack("<i", len(labels)) + b"J" + struct.pack("<i", PIXELS) + b"\x86"
    kind = (
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}U\x04data" + array + b"sU\x06labels" + numbers + b"s."


BATCHES = [records(3 - (i == 5), seed=i) for i in range(6)]
BIN = {name: binary(*b) for name, b in zip(CIFAR10.forms[0].sums, BATCHES, strict=True)}
PY = {name: python2_pickle(*b) for name, b in zip(CIFAR10.forms[1].sums, BATCHES, strict=True)}


def tar(folder: str, files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in {"readme.html": b"x", **files}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def little_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = zip(CIFAR10.forms, (BIN, PY), strict=True)
    little = CIFAR10._replace(forms=tuple(form._replace(sums=sums(f)) for form, f in forms))
    monkeypatch.setitem(DATASETS, "cifar", little)


@pytest.mark.usefixtures("little_cifar")
@pytest.mark.parametrize("base", [".", "cifar10", "cifar-10"])
@pytest.mark.parametrize(
    "files",
    [
        {"cifar-10-batches-bin": BIN},
        {"cifar-10-batches-py": PY},
        {".": BIN},
        {".": {"cifar-10-binary.tar.gz": tar("cifar-10-batches-bin", BIN)}},
        {".": {"cifar-10-python.tar.gz": tar("cifar-10-batches-py", PY)}},
    ],
    ids=["binary", "python", "here", "binary-archive", "python-archive"],
)
def test_cifar_is_found_in_every_form_and_place(tmp_path, base, files):
    for below, contents in files.items():
        put(tmp_path / base / below, contents)
    images = load("cifar", tmp_path)
    assert images.train_images.shape == (15, 3, 32, 32)
    assert images.test_images.shape == (2, 3, 32, 32)
    pixels, labels = BATCHES[1]
    assert images.train_labels[3:6].tolist() == labels
    assert images.test_labels.tolist() == BATCHES[5][1]
    assert images.train_images[3:6].flatten().tolist() == list(pixels)


@pytest.mark.usefixtures("little_cifar")
def test_a_damaged_archive_is_refused(tmp_path):
    whole = tar("cifar-10-batches-bin", BIN)
    path = tmp_path / "cifar-10-binary.tar.gz"
    for cut in (0, 10, len(whole) // 2, len(whole) - 1000):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"binary\.tar\.gz .*is damaged.*download it again"):
            load("cifar", tmp_path)
    for files in (
        {n: d for n, d in BIN.items() if "5" not in n},
        {**BIN, "data_batch_5.bin": bytes(2 * 3073)},
    ):
        path.write_bytes(tar("cifar-10-batches-bin", files))
        with pytest.raises(DataError, match=r"expected data_batch_5\.bin with sha256"):
            load("cifar", tmp_path)


@pytest.mark.usefixtures("little_cifar")
def test_nothing_is_read_from_a_pickle_whose_sum_is_another(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "bomb"),)

    put(tmp_path, {**PY, "test_batch": pickle.dumps(Bomb())})
    with pytest.raises(DataError, match="expected test_batch with sha256"):
        load("cifar", tmp_path)
    assert not (tmp_path / "bomb").exists()


class Server(ThreadingHTTPServer):
    """A mirror on this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Mirror)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes | int] = dict(PACKED)
        self.asked: list[str] = []


class Mirror(BaseHTTPRequestHandler):
    """Serves files by their path or last name; a value that is a number is an HTTP status."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        files = self.server.files
        data = files.get(self.path, files.get(self.path.rsplit("/", 1)[-1], 404))
        if isinstance(data, int):
            self.send_error(data)
            return
        self.send_response(200)
        # More than there is, where the path asks for it: a connection that breaks.
        more = 100 if self.path.startswith("/broken/") else 0
        self.send_header("Content-Length", str(len(data) + more))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The mirror of the set "tiny"."""
    pytest.importorskip("pooch", reason="downloads need pooch")
    with Server() as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        use(monkeypatch, f"{http.url}/good/")
        yield http
        http.shutdown()
        thread.join()


def test_a_set_is_downloaded_once(server, tmp_path):
    data, lines = tmp_path / "new" / "data", list[str]()
    for _ in range(2):
        assert fetch("tiny", data, lines.append) == data / "tiny"
        assert files_below(data) == sorted(f"tiny/{name}" for name in PACKED)
        assert len(lines) == len(server.asked) == 4
    assert lines[0] == f"downloading {server.url}/good/{NAMES[0]}.gz (0.0 MB)"
    assert is_tiny(data)


def test_a_download_goes_on_where_it_was_left_and_replaces_or_names_damaged_files(server, tmp_path):
    names = list(PACKED)
    put(tmp_path / "tiny", {names[0]: PACKED[names[0]], names[1]: b"half"})
    # A file that would be read before what is downloaded.
    plain = put(tmp_path / "tiny", {NAMES[2]: b"half"}) / NAMES[2]
    with pytest.raises(DataError, match=rf"{NAMES[2]} is damaged.*delete it, and download"):
        fetch("tiny", tmp_path)
    plain.unlink()
    fetch("tiny", tmp_path)
    assert server.asked == [f"/good/{name}" for name in names[1:]]
    assert files_below(tmp_path / "tiny") == sorted(PACKED)
    assert is_tiny(tmp_path)


def test_mirrors_are_asked_in_turn_and_where_all_fail_each_is_named_with_its_reason(
    server, tmp_path, monkeypatch
):
    # An address at which nobody listens any more.
    refused = f"http://127.0.0.1:{free_port()}/"
    server.files.update({f"/ill/{name}": 503 for name in PACKED})
    server.files.update({f"/other/{name}": b"x" * len(data) for name, data in PACKED.items()})
    kinds = ("ill", "broken", "other")
    mirrors = (refused, *(f"{server.url}/{kind}/" for kind in kinds))
    use(monkeypatch, *mirrors)
    with pytest.raises(DataError) as error:
        fetch("tiny", tmp_path)
    name, data = next(iter(PACKED.items()))
    for words in (
        f"expected {len(data):,} bytes with {sha256(data)}",
        f"{refused}{name}: ",
        "Connection refused",
        f"/ill/{name}: 503 Server Error",
        f"/broken/{name}: ",
        f"/other/{name}: SHA256 hash of downloaded file ({name}) does not match",
        "check the network, or put the file into",
    ):
        assert words in str(error.value)
    assert files_below(tmp_path) == []
    server.asked.clear()
    use(monkeypatch, *mirrors, f"{server.url}/good/")
    fetch("tiny", tmp_path)
    assert is_tiny(tmp_path)
    assert server.asked == [f"/{kind}/{name}" for name in PACKED for kind in (*kinds, "good")]


def test_one_process_downloads_while_others_wait_and_take_what_it_brought(server, tmp_path):
    lines: list[str] = []
    waiting = threading.Thread(target=fetch, args=("tiny", tmp_path, lines.append))
    with alone_in(tmp_path / "tiny", lines.append):
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert lines == [f"waiting for another process that makes files in {tmp_path / 'tiny'}"]
        put(tmp_path / "tiny", PACKED)
    waiting.join(30)
    assert not waiting.is_alive()
    assert server.asked == []
    assert len(lines) == 1


def test_what_keeps_a_set_from_being_downloaded_is_said_with_the_way_out(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    use(monkeypatch, "http://mirror/", "http://other/")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file/tiny cannot be written to"):
        fetch("tiny", tmp_path / "file")
    pooch = pytest.importorskip("pooch", reason="downloads need pooch")
    with monkeypatch.context() as patch:
        patch.setattr(pooch, "retrieve", full)
        with pytest.raises(DataError, match=r"cannot be written to \(No space left on device\)"):
            fetch("tiny", tmp_path / "a")


def test_a_set_is_downloaded_by_itself_only_into_the_cache(server, tmp_path, monkeypatch):
    named = put(tmp_path / "named", {})
    with pytest.raises(DataError, match="got none or not all"):
        obtain("tiny", named)
    monkeypatch.setenv("RIGLSTM_DATA", str(named))
    with pytest.raises(DataError, match="got none or not all"):
        obtain("tiny")
    assert server.asked == []
    monkeypatch.delenv("RIGLSTM_DATA")
    assert len(obtain("tiny").train_images) == 7
    assert len(obtain("tiny").train_images) == 7
    assert len(server.asked) == 4
    assert find("tiny") == tmp_path / "cache" / "riglstm" / "tiny"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real pictures in {DATA}")
def test_the_real_files_have_the_pinned_sums():
    for file in MNIST.downloads:
        data = (DATA / "mnist" / file.name).read_bytes()
        assert (len(data), sha256(data)) == (file.size, file.checksum)
    for name, shape in (("mnist", (60_000, 1, 28, 28)), ("cifar", (50_000, 3, 32, 32))):
        found = load(name, DATA)
        assert (found.train_images.shape, len(found.test_labels)) == (shape, 10_000)
