"""A run's folder as it is read: what the run was, how far it came, and its figures as rows."""

from __future__ import annotations

import contextlib
import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from riglstm.lab.tables.plan import Planned, RunSpec
from riglstm.lab.tables.recipes import AT_HOME, SHIFTED
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder, State, differences

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHOSEN = "validation@"
"""What `chosen_on` begins with in a row of a result; the condition follows."""
LAST = "last"
"""What chose the weights of an agent: nothing, they are the last (P35)."""


def check_result(
    result: Mapping[str, Any], path: Path, way_out: str = "delete the folder, and train anew"
) -> None:
    """Raise ValueError where the content of a file is no result of a run."""
    rows, wanted = result.get("rows"), {"condition", "metric", "chosen_on", "step", "value"}
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, dict) and wanted <= row.keys() for row in rows)
        or not {"updates", "seconds", "chosen"} <= result.keys()
    ):
        raise ValueError(
            f"{path} must be the result of a run, with rows of figures, what was chosen, updates "
            f"and seconds, got {', '.join(result) or 'an empty one'}; {way_out}"
        )
    figures = Counter((row["condition"], row["metric"], row["chosen_on"]) for row in rows)
    for figure in [", ".join(key) for key, count in figures.items() if count > 1]:
        raise ValueError(f"{path} must have a figure once, got {figure} twice; {way_out}")


class Series(NamedTuple):
    """One run's values by update."""

    steps: NDArray[Any]
    values: NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """The files of a run's folder, each of which has the form that it must have."""

    path: Path
    """The folder, or a file that was exported from it."""
    spec: RunSpec
    state: State
    run: Mapping[str, Any] = field(default_factory=dict)
    """Versions, commit, device, command; empty where run.json is not there."""
    result: Mapping[str, Any] = field(default_factory=dict)
    """Empty: the run has none yet."""
    failed: Mapping[str, Any] = field(default_factory=dict)
    """Reason, updates and seconds of a run that failed; empty where it did not."""
    metrics: Mapping[str, Series] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last update that left a figure."""
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def reason(self) -> str:
        """Why it failed; empty where it did not."""
        failed = self.state == "failed"
        return str(self.failed.get("reason") or "for a reason not recorded") if failed else ""

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """Its figures."""
        return list(self.result.get("rows", ()))

    @property
    def trained_on(self) -> str | None:
        """The condition of the training data; None: nothing was measured yet."""
        if "trained_on" in self.result:
            return str(self.result["trained_on"])
        # Files that were exported by earlier versions.
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

    def check_done(self) -> None:
        """Raise ValueError where the run has no result yet."""
        if not self.result:
            raise ValueError(
                f"{self.path} holds a run that is not done: expected result.json, got none; "
                "go on with it by --resume first"
            )

    def weights_of(self, step: int) -> Path:
        """The file of the weights after so many updates."""
        return self.path if self.path.is_file() else RunFolder(self.path).weights_of(step)

    def describe(self) -> str:
        """Which run it is, and how far it came, in a line."""
        begun = f"{self.path}: {self.spec.name} on {self.spec.task}, seed {self.spec.seed}"
        fit = self.spec.fit
        unit, wanted = ("update", fit.updates) if isinstance(fit, Fit) else ("frame", fit.frames)
        if self.state == "failed":
            return f"{begun}: failed after {unit} {self.last:,} of {wanted:,}: {self.reason}"
        if self.state == "partial":
            return f"{begun}: not finished, {unit} {self.last:,} of {wanted:,}; go on with --resume"
        return begun


def read_record(path: Path, curves: bool = True) -> Record:
    """The run in a folder; `curves`: with what it logged on the way.

    Raises ValueError where one of its files has another form.
    """
    folder = RunFolder(path)
    state = folder.state
    with refused(folder.config):
        spec = RunSpec.from_json(folder.read_json(folder.config))
        spec.digest()
    with refused(folder.run):
        run = folder.read_json(folder.run) if folder.run.exists() else {}
        made_by(run)
    with refused(folder.result):
        result = folder.read_json(folder.result) if state == "done" else {}
    if state == "done":
        check_result(result, folder.result)
    failed = folder.read_json(folder.failed) if state == "failed" else {}
    metrics = read_metrics(folder.metrics) if curves and folder.metrics.exists() else {}
    return Record(
        path=path, spec=spec, state=state, run=run, result=result, failed=failed, metrics=metrics
    )


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turns what wrong types and absurd numbers raise within it into a ValueError on a file."""
    try:
        yield
    except (ValueError, OSError, csv.Error) as error:
        said = str(error)
        raise ValueError(said if str(path) in said else f"{path}: {said}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} must be that of a run, got {error!r} from it") from error


def read_metrics(path: Path) -> dict[str, Series]:
    """metrics.csv, by name; half a line, as a kill may leave one, is no figure, nor is infinity."""
    # Verbs that draw nothing do without.
    import numpy as np

    points: dict[str, dict[int, float]] = {}
    with refused(path):
        with path.open(newline="", encoding="utf-8") as file:
            whole = [line for line in file if line.endswith("\n")]
        for number, line in enumerate(csv.reader(whole[1:]), start=2):
            if len(line) != 3:
                got = ",".join(line)[:80]
                raise ValueError(f"{path}, line {number}, must be step,name,value, got {got!r}")
            points.setdefault(line[1], {})[int(line[0])] = float(line[2])
        found = {
            name: Series(np.array([*of], np.int64), np.array([*of.values()]))
            for name, of in points.items()
        }
    for series in found.values():
        series.values[~np.isfinite(series.values)] = np.nan
    return found


def made_by(record: Mapping[str, Any]) -> dict[str, Any]:
    """Device and commit of all sessions in run.json ("NVIDIA H200, then CPU"), and most jobs."""
    sessions = [record, *record.get("resumed", [])]
    said: dict[str, Any] = {}
    for name in ("device", "commit"):
        found = [session.get(name) for session in sessions]
        words = ", then ".join(dict.fromkeys(value or "unknown" for value in found))
        said[name] = words if any(found) else None
    return {**said, "jobs": max(int(session.get("jobs", 1)) for session in sessions)}


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

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that the run's recipe counts by; one that nobody searched counts by both."""
        return tuple(self.rule.split(", ")) if self.rule else (AT_HOME, SHIFTED)


FAILED = "failed"
"""The metric of a run that diverged."""
TYPES = {f.name: str(f.type) for f in fields(ResultRow)}
HEAD = tuple(TYPES)
"""The columns of a CSV file of rows."""


def rows_of(run: Record, /, **named: Any) -> list[ResultRow]:
    """The figures of a run that is done, one row of a run that failed, none of another.

    `named`: table, model, budget, setting and run of the rows; trial and rule of a recipe that was
    searched.
    """
    figures = [(f"{r['metric']}@{r['condition']}", r["value"], r["chosen_on"]) for r in run.rows]
    said = run.result
    if run.state == "failed":
        said = {**run.failed, **made_by(run.run)}
        figures = [(FAILED, 1.0, "")]
    return [
        ResultRow(
            **named,
            seed=run.spec.seed,
            precision=run.spec.precision,
            recipe=run.spec.recipe(),
            metric=metric,
            value=value,
            chosen_on=chosen_on,
            updates=said.get("updates") or 0,
            seconds=said.get("seconds") or 0,
            device=said.get("device") or "",
            commit=said.get("commit") or "",
            jobs=said.get("jobs", 1),
        )
        for metric, value, chosen_on in figures
    ]


def read_planned(planned: Planned, curves: bool = False) -> Record:
    """The run in a planned run's folder; raises ValueError where it is another."""
    run = read_record(planned.folder, curves)
    if run.spec.digest() != planned.spec.digest():
        found = differences(run.spec.identity(), planned.spec.identity())
        raise ValueError(
            f"{planned.folder} must hold the run that its name says, got another: "
            f"{'; '.join(found)}; move it away, or delete it"
        )
    return run


def csv_text(rows: Iterable[ResultRow], head: bool = True) -> str:
    """Rows as lines of a CSV file."""
    text = io.StringIO()
    lines = [HEAD] if head else []
    csv.writer(text, lineterminator="\n").writerows([*lines, *map(astuple, rows)])
    return text.getvalue()
