"""A run's folder as it is read: what the run was, how far it came, and its figures as rows."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from riglstm.lab.tables.plan import RunSpec, State
from riglstm.lab.train.folder import RunFolder

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHOSEN = "validation@"
"""What `chosen_on` begins with in a row of a result; the condition follows."""
MOST = 10**12
"""What a number of a result is below: all that are measured are."""
LONGEST = 200
"""Characters of a name."""
LONGEST_MESSAGE = 1000
"""Characters of a message, which may quote a file."""
LARGEST = 10**7
"""Bytes of a JSON file that is read."""


class RunError(ValueError):
    """A file of a run that is not as runs have it; the message names it, and is not endless."""

    def __init__(self, said: str) -> None:
        super().__init__(said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]}…")


def check_result(
    result: Mapping[str, Any],
    path: Path,
    way_out: str = "delete the folder, and train anew",
    *,
    chosen: bool = True,
) -> None:
    """Raise RunError where the content of a file is no result; `chosen`: by validation data."""
    rows, best, bars = (result.get(name) for name in ("rows", "chosen", "yardsticks"))
    for what, sound in (
        ("rows, a list of figures", isinstance(rows, list) and all(map(_row, rows))),
        (
            "chosen, the step of each condition",
            not chosen or (isinstance(best, dict) and all(map(_choice, best.values()))),
        ),
        ("updates, a whole number", is_count(result.get("updates"))),
        ("seconds, a number", is_number(result.get("seconds")) and result["seconds"] >= 0),
        ("parameters, a whole number", is_count(result.get("parameters", 0))),
        ("jobs, a whole number", is_count(result.get("jobs", 1))),
        ("device, commit and stopped, names or null", all(map(_named, map(result.get, PLACES)))),
        ("yardsticks, figures by condition and name", bars is None or _yardsticks(bars)),
        ("higher_is_better, true or false", type(result.get("higher_is_better", True)) is bool),
    ):
        if not sound:
            raise RunError(
                f"{path} must be the result of a run, with {what}, got "
                f"{', '.join(result)[:LONGEST] or 'an empty one'}; {way_out}"
            )


PLACES = ("device", "commit", "stopped")


def is_number(value: object) -> bool:
    """Finite, and not absurd."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def is_count(value: object) -> bool:
    """A whole number from 0 on."""
    return type(value) is int and 0 <= value < MOST


def is_name(value: object) -> bool:
    """Text that fits beside an axis."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST and value.isprintable()


def is_possible(metric: str, value: object) -> bool:
    """A figure that the metric can have; one of a task that is not ours can be any number."""
    low, high = RANGES.get(metric, (-MOST, MOST))
    return isinstance(value, int | float) and is_number(value) and low <= value <= high


SHARE = (0, 1)
RANGES = {"accuracy": SHARE, "success": SHARE, "success_greedy": SHARE, "bce": (0, MOST)}
"""Lowest and highest figure of metrics that are known."""


def _row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and all(is_name(row.get(name)) for name in ("condition", "metric", "chosen_on"))
        and is_count(row.get("step"))
        and is_possible(row["metric"], row.get("value"))
    )


def _choice(choice: object) -> bool:
    return (
        isinstance(choice, dict) and is_count(choice.get("step")) and is_number(choice.get("value"))
    )


def _named(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.isprintable())


def _yardsticks(found: object) -> bool:
    """The same names in every condition."""
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        return False
    figures = [value for values in found.values() for value in values.values()]
    return len({tuple(v) for v in found.values()}) <= 1 and all(map(is_number, figures))


def read_reason(folder: RunFolder) -> str:
    """Why a run failed."""
    return str(folder.read_json(folder.failed).get("reason") or "for a reason not recorded")


def read_cost(folder: RunFolder) -> dict[str, Any]:
    """Updates and seconds that a failed run took; 0 where they were not recorded."""
    said = folder.read_json(folder.failed)
    found = {name: said.get(name) or 0 for name in ("updates", "seconds")}
    if not is_count(found["updates"]) or not is_number(found["seconds"]):
        raise RunError(f"{folder.failed} must say updates and seconds, got {found}")
    return found


class Series(NamedTuple):
    """One run's values by update."""

    steps: NDArray[Any]
    values: NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run's folder, each of which has the form that it must have."""

    path: Path
    config: Mapping[str, Any]
    state: State
    run: Mapping[str, Any]
    """Versions, commit, device, command; empty where run.json is not there."""
    result: Mapping[str, Any] | None
    """None: the run has none yet."""
    reason: str
    """Why it failed; empty where it did not."""
    metrics: Mapping[str, Series]

    @property
    def last(self) -> int:
        """The last update that left a figure."""
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """Its figures."""
        return [] if self.result is None else list(self.result["rows"])


@dataclass(frozen=True, kw_only=True)
class Record(RunFiles):
    """A run that learned a task from its data."""

    spec: RunSpec

    @property
    def trained_on(self) -> str | None:
        """The condition of the training data; None: nothing was measured yet."""
        if self.rows:
            return str(self.rows[0]["chosen_on"]).removeprefix(CHOSEN)
        return next(iter(self.validated), None)

    @property
    def metric(self) -> str | None:
        """The name of the figure that models are compared by; None: nothing was measured yet."""
        if self.rows:
            return str(self.rows[0]["metric"])
        # Beside it a task may log several losses.
        names = (name for name, condition, _ in self._validation() if condition)
        return next((name for name in names if not name.endswith("loss")), None)

    @property
    def validated(self) -> dict[str, Series]:
        """The metric on validation data, by condition."""
        return {c: series for name, c, series in self._validation() if c and name == self.metric}

    def _validation(self) -> Iterator[tuple[str, str, Series]]:
        for full, series in self.metrics.items():
            if full.startswith("validation/"):
                name, _, condition = full.removeprefix("validation/").partition("@")
                yield name, condition, series

    def describe(self) -> str:
        """Which run it is, and how far it came, in a line."""
        begun = f"{self.path}: {self.spec.name} on {self.spec.task}, seed {self.spec.seed}"
        wanted = self.spec.fit.updates
        if self.state == "failed":
            return f"{begun}: failed after update {self.last:,} of {wanted:,}: {self.reason}"
        if self.state == "partial":
            return f"{begun}: not finished, update {self.last:,} of {wanted:,}; go on with --resume"
        return begun


def read_record(path: Path, curves: bool = True) -> Record:
    """A run that learned a task; `curves`: with what it logged on the way.

    Raises RunError where the folder's files are not those of such a run.
    """
    files = read_files(path, curves)
    with refused(files.path / "config.json"):
        spec = RunSpec.from_json(files.config)
        spec.digest()
    record = Record(**vars(files), spec=spec)
    if record.result is not None:
        check_result(record.result, path / "result.json")
    for condition, series in record.validated.items():
        known = [value for value in series.values.tolist() if not math.isnan(value)]
        if not all(is_possible(str(record.metric), value) for value in known):
            raise RunError(
                f"{path / 'metrics.csv'} must have an {record.metric} at {condition} that can be, "
                f"got values from {min(known):g} to {max(known):g}"
            )
    return record


def read_files(path: Path, curves: bool = True) -> RunFiles:
    """The files of any run; raises RunError where one has another form."""
    folder = RunFolder(path)
    config = _object(folder, folder.config)
    failed = folder.state != "done" and folder.failed.exists()
    if failed:
        _object(folder, folder.failed)
        read_cost(folder)
    return RunFiles(
        path=path,
        config=config,
        state="failed" if failed else folder.state,
        run=_session(folder) if folder.run.exists() else {},
        result=_object(folder, folder.result) if folder.state == "done" else None,
        reason=read_reason(folder) if failed else "",
        metrics=read_metrics(folder.metrics) if curves and folder.metrics.exists() else {},
    )


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turns what wrong types and absurd numbers raise within it into a RunError on a file."""
    try:
        yield
    except RunError:
        raise
    except (ValueError, OSError, csv.Error) as error:
        said = str(error)
        raise RunError(said if str(path) in said else f"{path}: {said}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RunError(f"{path} must be that of a run, got {error!r} from it") from error


def _object(folder: RunFolder, path: Path) -> dict[str, Any]:
    """A JSON file of the folder."""
    with refused(path):
        if path.is_file() and path.stat().st_size > LARGEST:
            raise RunError(f"{path} must have at most {LARGEST:,} bytes, got a larger file")
        try:
            found = folder.read_json(path)
        except ValueError as error:
            raise RunError(str(error)) from error
        # Half a character, which JSON can spell, cannot be written anywhere.
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _session(folder: RunFolder) -> dict[str, Any]:
    """run.json."""
    run = _object(folder, folder.run)
    again = run.get("resumed", [])
    sessions: list[Any] = [run, *again] if isinstance(again, list) else [again]
    for session in sessions:
        sound = isinstance(session, dict) and isinstance(session.get("versions", {}), dict)
        if not sound or not is_count(session.get("jobs", 1)):
            raise RunError(
                f"{folder.run} must say of each session its versions, an object, and its jobs, a "
                f"number, got {str(session)[:80]}"
            )
    return run


def read_metrics(path: Path) -> dict[str, Series]:
    """metrics.csv, by name; half a line, as a kill may leave one, is no figure.

    A value that is no number, or infinite, is NaN.
    """
    # Verbs that draw nothing do without.
    import numpy as np

    points: dict[str, dict[int, float]] = {}
    with refused(path):
        with path.open(newline="", encoding="utf-8") as file:
            whole = [line for line in file if line.endswith("\n")]
        for number, line in enumerate(list(csv.reader(whole))[1:], start=2):
            name, step, value = _point(line)
            if name is None:
                raise RunError(
                    f"{path}, line {number}, must be step,name,value, got {','.join(line)[:80]!r}"
                )
            points.setdefault(name, {})[step] = value
    return {
        name: Series(np.array(list(values)), np.array(list(values.values())))
        for name, values in points.items()
    }


def _point(line: list[str]) -> tuple[str | None, int, float]:
    """Name, step and value; no name where it is no line of metrics."""
    try:
        step, name, value = int(line[0]), line[1], float(line[2])
    except (ValueError, IndexError):
        return None, 0, 0.0
    sound = len(line) == 3 and is_count(step) and is_name(name)
    return name if sound else None, step, value if is_number(value) else math.nan


def sessions(folder: RunFolder, name: str) -> str | None:
    """What run.json says of all the sessions of a run: "NVIDIA H200, then CPU"; None: nothing."""
    record = folder.read_json(folder.run)
    found = [session.get(name) for session in (record, *record.get("resumed", []))]
    if not any(found):
        return None
    return ", then ".join(dict.fromkeys(value or "unknown" for value in found))


def most_jobs(folder: RunFolder) -> int:
    """How many runs shared the device, in the session that shared it most."""
    record = folder.read_json(folder.run)
    return max(int(session.get("jobs", 1)) for session in (record, *record.get("resumed", [])))


@dataclass(frozen=True)
class ResultRow:
    """One figure of one run, with what leads back to the run."""

    table: str
    model: str
    seed: int
    metric: str
    """With its condition: accuracy@19x19; or FAILED, of a run that has no figures."""
    value: float
    """As measured: a share from 0 to 1, or nats; 1 for a run that failed."""
    chosen_on: str
    """The data that chose the checkpoint: validation@14x14; empty where none was chosen."""
    updates: int
    seconds: float
    device: str
    commit: str
    budget: str
    setting: str
    """What the model was trained in: M=2."""
    precision: str
    """Of matrix products: fp32, tf32, bf16."""
    jobs: int
    """Runs that shared the device, and its time: `seconds` are of the clock on the wall."""
    recipe: str
    """A digest of the run's configuration without its seed: runs that have it are alike."""
    run: str
    """The name of the run's folder, which ends in a digest of its configuration."""
    trial: str = ""
    """Of a search: the trial that the recipe is of; empty where the recipe was not searched."""
    rule: str = ""
    """The rule, or the two, that chose the trial; empty where there was none to choose."""

    @property
    def condition(self) -> str:
        """Where the figure was measured; empty for a run that failed."""
        return self.metric.partition("@")[2]

    def counts_by(self, rule: str) -> bool:
        """Whether the run's recipe is the one of that rule; one that nobody searched is of both."""
        return not self.rule or rule in self.rule.split(", ")


FAILED = "failed"
"""The metric of a run that diverged."""
TYPES = {f.name: str(f.type) for f in fields(ResultRow)}
HEAD = tuple(TYPES)
"""The columns of a CSV file of rows."""


def rows_of(run: RunFiles, /, **identity: Any) -> list[ResultRow]:
    """The figures of a run that is done, or one row of a run that failed.

    `identity`: table, model, seed, budget, setting, precision, recipe and run of the rows; trial
    and rule of a recipe that was searched.
    """
    folder, figures = RunFolder(run.path), [(FAILED, 1.0, "")]
    if run.result is not None:
        said: Mapping[str, Any] = run.result
        figures = [
            (f"{r['metric']}@{r['condition']}", r["value"], r["chosen_on"]) for r in run.rows
        ]
    elif run.state == "failed":
        said = read_cost(folder)
        if run.run:
            places = {key: sessions(folder, key) for key in ("device", "commit")}
            said = {**said, **places, "jobs": most_jobs(folder)}
    else:
        return []
    return [
        ResultRow(
            **identity,
            metric=metric,
            value=value,
            chosen_on=chosen_on,
            updates=said["updates"],
            seconds=said["seconds"],
            device=said.get("device") or "",
            commit=said.get("commit") or "",
            jobs=said.get("jobs", 1),
        )
        for metric, value, chosen_on in figures
    ]


def csv_text(rows: Iterable[ResultRow], head: bool = True) -> str:
    """Rows as lines of a CSV file."""
    text = io.StringIO()
    lines = [HEAD] if head else []
    csv.writer(text, lineterminator="\n").writerows([*lines, *map(astuple, rows)])
    return text.getvalue()
