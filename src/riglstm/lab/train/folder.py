"""A run is a folder: what it was to be, what it ran on, what it measured, and its weights.

    config.json      what the run is; a folder that holds it is a run
    run.json         versions, commit, device, command, when it was started and gone on with
    metrics.csv      step,name,value
    checkpoints/     to go on from: the last two
    weights/         step-N.safetensors, the network after N updates, where a choice fell on them;
                     its averaged weights in a run that averages them
    result.json      the result; a folder that holds it is done
    failed.json      why it has no result and never will
    tensorboard/
    riglstm.lock     there while a process trains here; one that is left over means nothing

Whole files are written beside their place and renamed, so that none is ever half there. A folder
that holds anything and no config.json of ours is refused, and only files with these names are ever
deleted.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import torch
from filelock import FileLock, Timeout

import riglstm
from riglstm.lab.tasks import offered
from riglstm.lab.train.config import FREE, rank
from riglstm.lab.train.stopping import Diverged

PACKAGES = ("pytorch-lightning", "numpy", "safetensors", "triton")
"""Recorded with every run, beside torch."""
SHARES = ("RIGLSTM_MULTIPROCESSORS", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
"""Variables that say which part of a GPU a run has, recorded where they are set."""
PART = ".part"
MADE: dict[str, str] = {
    "": r"(config|run|result|failed)\.json|metrics\.csv",
    "checkpoints": r"step-\d+\.ckpt",
    "weights": r"step-\d+\.safetensors",
    "tensorboard": r"events\.out\.tfevents\..+",
}
"""By folder, the names of the files that a run makes; half-written, they end with PART."""
HALF = rf"\.\d+{re.escape(PART)}"
"""What the name of such a file ends with."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer; runs there do without."""


State: TypeAlias = Literal["new", "partial", "done", "failed"]


class BusyError(ValueError):
    """Another process trains in the folder."""


class RunFolder:
    """The files of one run. Only the first of several processes writes."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.writes = rank() == 0
        self.config = self.path / "config.json"
        self.run = self.path / "run.json"
        self.metrics = self.path / "metrics.csv"
        self.result = self.path / "result.json"
        self.failed = self.path / "failed.json"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self.tensorboard = self.path / "tensorboard"
        self.lock = self.path / "riglstm.lock"
        self.holding = False

    @property
    def state(self) -> State:
        """partial: a run was begun here; done: it has its result; failed: it never will."""
        if self.result.exists():
            return "done"
        if not self.config.exists():
            return "new"
        return "failed" if self.failed.exists() else "partial"

    def check(self) -> None:
        """Raise ValueError where the folder holds anything and is no run."""
        if not self.path.is_dir():
            return
        with contextlib.suppress(ValueError):
            config = self.read_json(self.config)
            kinds = {"task": str, "fit": dict, "seed": int}
            if all(isinstance(config.get(name), kind) for name, kind in kinds.items()):
                return
        others = [name for name in sorted(os.listdir(self.path)) if name != self.lock.name]
        # A kill may come before the first file has its name; the lock is there then.
        if self.lock.exists():
            others = [name for name in others if not re.fullmatch(f"config.json{HALF}", name)]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise ValueError(
                f"{self.path} must be a new or empty folder, or that of a run, got one that holds "
                f"{', '.join(others[:3])}{more} and no config.json of a run; give another folder"
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder's lock, so that no other process trains here; may be nested.

        A run that is begun within it, and ends with an error before it has saved anything, is
        removed again. Raises BusyError where another process trains here, and what `check` does.
        """
        if self.holding or not self.writes:
            yield
            return
        self.check()
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._acquire()
        except OSError as error:
            _remove_empty(made)
            raise unwritten(self.lock, error) from error
        self.holding = True
        begun_here = self.state == "new"
        try:
            # What a kill has left half-written.
            for folder in (self.path, self.checkpoints, self.weights):
                self._remove(folder, HALF)
            yield
        except Exception as error:
            if begun_here and not isinstance(error, Diverged) and not self.made(self.checkpoints):
                self.empty()
            raise
        finally:
            self.holding = False
            # Windows removes the file itself, and not while it is held.
            with contextlib.suppress(PermissionError):
                self.lock.unlink(missing_ok=True)
            lock.release()
            # Nothing was begun, where this can be done.
            _remove_empty(made)

    def _acquire(self) -> FileLock:
        lock = FileLock(self.lock)
        try:
            # Not at once: whoever held it may be removing the file that was opened here.
            lock.acquire(timeout=0.1)
        except Timeout:
            raise BusyError(
                f"{self.path} is being trained in by another process; expected a run that "
                "nobody works on; wait for its end, stop it, or give another folder"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return lock

    def begin(
        self, config: Mapping[str, Any], *, command: str, device: str, jobs: int = 1, resume: bool
    ) -> None:
        """Write config.json and run.json, or check that the run that is here is this one.

        `config` is what JSON has: it is the run's identity, less the options under "fit" that only
        say how it is computed. A folder that is new is begun, with `resume` or without.
        `jobs`: runs that share the device.
        """
        if not self.writes:
            return
        session = {**surroundings(), "device": device, "jobs": jobs, "command": command}
        session["started"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.check_run(config, resume=resume)
        if self.state == "new":
            self.write_json(self.config, config)
        if self.run.exists():
            record = self.read_json(self.run)
            session = {**record, "resumed": [*record.get("resumed", []), session]}
        self.write_json(self.run, session)

    def check_run(self, config: Mapping[str, Any], *, resume: bool) -> None:
        """Raise ValueError where the folder holds another run, or one that is not to be resumed."""
        if self.state == "new":
            return
        found = differences(self.read_json(self.config), config) if resume else []
        done = ", which is done" if self.state == "done" else ""
        if found:
            raise ValueError(
                f"{self.path} holds another run{done}: {'; '.join(found)}; "
                "go on with its own options, or give another folder"
            )
        if done:
            raise ValueError(
                f"{self.path} holds a run that is done; `riglstm evaluate {self.path}` shows its "
                "result; give another folder, or delete this one"
            )
        if not resume:
            raise ValueError(
                f"{self.path} holds a run that was stopped; go on with it by --resume, give "
                "another folder, or delete this one"
            )

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result; remove checkpoints, and weights that no choice fell on.

        `result["chosen"]`, where there is such a thing: condition to {"step": …}.
        """
        self.write_json(self.result, result)
        self.tidy()

    def tidy(self) -> None:
        """Remove what a run that is done needs no more; a kill may have come before that."""
        if not self.writes or self.state != "done":
            return
        result = self.read_json(self.result)
        if "chosen" in result:
            self.keep_weights({chosen["step"] for chosen in result["chosen"].values()})
        self._remove(self.checkpoints)

    def keep_weights(self, steps: Collection[int]) -> None:
        """Delete the weights of all other steps."""
        if self.writes:
            self._remove(self.weights, but={self.weights_of(step) for step in steps})

    def empty(self) -> None:
        """Remove all that the run has made, checkpoints first: nothing resumes without them.

        config.json goes last, and stays beside files of others: it says that the folder is a run's.
        """
        for folder in (self.checkpoints, self.weights, self.tensorboard, self.path):
            self._remove(folder, but={self.config})
        if {path.name for path in self.path.iterdir()} <= {self.config.name, self.lock.name}:
            self.config.unlink(missing_ok=True)

    def _remove(self, folder: Path, ending: str = "", but: Collection[Path] = ()) -> None:
        """Remove what `made` names, `but` for some; then the folder, if it is empty."""
        for path in self.made(folder, ending):
            if path not in but:
                path.unlink(missing_ok=True)
        if folder != self.path:
            _remove_empty([folder])

    def made(self, folder: Path, ending: str = "") -> list[Path]:
        """What the run has made in one of its folders, by names that have this ending, too."""
        names = f"({MADE['' if folder == self.path else folder.name]}){ending}"
        paths = folder.iterdir() if folder.is_dir() else ()
        return [path for path in paths if re.fullmatch(names, path.name) and path.is_file()]

    def weights_of(self, step: int) -> Path:
        """The file with the network's weights after `step` updates."""
        return self.weights / f"step-{step}.safetensors"

    def read_json(self, path: Path) -> dict[str, Any]:
        """The object in one of the folder's JSON files."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} is not a run: expected the file {path.name} in it, got none; "
                "`riglstm train` writes such folders"
            ) from None
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} must be a JSON file, and cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(
                f"{path} must hold a JSON object, got {type(content).__name__}; is this a run?"
            )
        return content

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write one of the folder's JSON files, whole or not at all."""
        if self.writes:
            with atomic_write(path) as file:
                file.write((json.dumps(content, indent=2) + "\n").encode())


def _remove_empty(folders: Collection[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name, and replaces an older one, once it is whole and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritten(path, error, ", and nothing is left of it") from error
        raise
    # A rename is on disk when its folder is; Windows opens no folders.
    if os.name != "nt":
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def unwritten(path: Path, error: OSError, rest: str = "") -> OSError:
    """The same error, with the file that it concerns and the way out."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return OSError(
        error.errno,
        f"{path} could not be written ({error.strerror or error}){rest}; "
        + ("make room, or give another folder" if full else "give another folder"),
    )


def surroundings() -> dict[str, Any]:
    """The versions and shares that could change a result, and the commit; no host names."""
    versions: dict[str, str | None] = {
        "riglstm": riglstm.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions |= {point.dist.name: point.dist.version for point in offered() if point.dist}
    return {
        "versions": versions,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit(),
        "share": {name: os.environ[name] for name in SHARES if name in os.environ},
    }


def commit() -> str | None:
    """The commit of this code, "+changes" where files differ from it; None: it is not in git.

    Where the code is a copy without git, the variable RIGLSTM_COMMIT may say what of.
    """
    # The file must be tracked: an environment may lie inside a repository that is not ours.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    head = _git("rev-parse", "HEAD") if tracked else None
    if head is None:
        return os.environ.get("RIGLSTM_COMMIT")
    return head + ("+changes" if _git("status", "--porcelain", "--", "../..") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", *arguments),
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def differences(was: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """What two runs differ in, in words; as JSON has them, so a tuple is a list."""
    found = []
    for name in dict.fromkeys((*was, *now)):
        if within.endswith("fit") and name in FREE:
            continue
        a, b = was.get(name), now.get(name)
        full = f"{within}.{name}" if within else name
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, full)
        elif _plain(a) != _plain(b):
            found.append(f"{full} is {a!r} there, {b!r} here")
    return found


def _plain(value: object) -> object:
    return json.loads(json.dumps(value))
