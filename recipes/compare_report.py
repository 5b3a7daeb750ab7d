"""The records of a comparison as tables, for terminals and Markdown, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, TypeAlias

from rich.table import Table

Record: TypeAlias = dict[str, Any]  # one run: names, status, rows of its curve

_CSV = ("task", "optimizer", "contender", "seed", "status", "epoch", "step", "seconds")


class Summary(NamedTuple):
    """Hold what the seeds of one contender came to.

    Args:
        task: what was learnt.
        optimizer: by what.
        contender: by which rule.
        metric: name of the validation metric.
        values: final validation metric of each seed that trained.
        losses: final training loss of each seed that trained.
        seconds: of training of each seed that trained, without validation.
        sent: bytes per step of all workers, of each seed that trained.
        diverged: how many seeds did not train.
        failed: how many ended with an error.
    """

    task: str
    optimizer: str
    contender: str
    metric: str
    values: tuple[float, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    sent: tuple[float, ...]
    diverged: int
    failed: int

    @property
    def count(self) -> int:
        """Return how many seeds there are."""
        return len(self.losses) + self.diverged + self.failed

    @property
    def cells(self) -> tuple[str, ...]:
        """Return metric, loss, seconds and the runs that did not train, as text.

        Where not all seeds trained, the others' mean says how many they are.
        """
        if not self.losses:
            missing = "diverged" if self.diverged else "failed"
            return (missing, missing, "", "", self.lost)
        part = f" (of {len(self.losses)})" if len(self.losses) < self.count else ""
        return (
            spread(self.values, 4) + part,
            spread(self.losses, 4) + part,
            spread(self.seconds, 1),
            f"{mean(self.sent) / 1000:,.1f}" if any(self.sent) else "-",
            self.lost,
        )

    @property
    def lost(self) -> str:
        """Return how many runs diverged, and failed if any did."""
        diverged = f"{self.diverged} of {self.count}"
        return f"{diverged}, {self.failed} failed" if self.failed else diverged


def summaries(records: Sequence[Record]) -> list[Summary]:
    """Put the seeds of each contender together, in the order of the records."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        names = (record["task"], record["optimizer"], record["contender"], record["metric"])
        groups.setdefault(names, []).append(record)
    return [_summary(names, group) for names, group in groups.items()]


def _summary(names: tuple[str, ...], records: Sequence[Record]) -> Summary:
    trained = [record for record in records if record["status"] == "trained"]
    return Summary(
        *names,
        values=tuple(record["value"] for record in trained if record["value"] is not None),
        losses=tuple(record["loss"] for record in trained),
        seconds=tuple(record["seconds"] for record in trained),
        sent=tuple(record.get("bytes_per_step", 0.0) for record in trained),
        diverged=sum(record["status"] == "diverged" for record in records),
        failed=sum(record["status"] == "failed" for record in records),
    )


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation; of one value, the value."""
    if not values:
        return "-"
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


def result_of(record: Record) -> str:
    """Say in a line, or several where it failed, what came of a run."""
    names = "{task} {optimizer} {contender} seed {seed}".format(**record)
    if record["status"] != "trained":
        return f"{names}: {record['status']}: {record['reason']}"
    value = "" if record["value"] is None else f"{record['metric']} {record['value']:.4f}, "
    return f"{names}: {value}loss {record['loss']:.4f}, {record['seconds']:.1f} s"


# ---------------------------------------------------------------------- tables


def tables(rows: Sequence[Summary]) -> list[Table]:
    """Return a table per task and optimizer, for a terminal; what did not train is red."""
    found: dict[str, Table] = {}
    for row in rows:
        title = f"{row.task}, {row.optimizer}: mean ± standard deviation over {row.count} seeds"
        if title not in found:
            headers = (
                "contender",
                row.metric,
                "training loss",
                "seconds",
                "kB a step",
                "diverged",
            )
            found[title] = Table(*headers, title=title)
            for column in found[title].columns[1:]:
                column.justify = "right"
        style = "red" if row.diverged or row.failed else None
        found[title].add_row(row.contender, *row.cells, style=style)
    return list(found.values())


def markdown_table(rows: Sequence[Summary]) -> str:
    """Return the same table for a README; without seconds, which are of this machine."""
    headers = ("task", "optimizer", "rule", "metric", "training loss", "kB a step", "diverged")
    lines = [headers, ("---", "---", "---", *["---:"] * 4)]
    for row in rows:
        metric, loss, _, sent, lost = row.cells
        names = (f"{row.task}, {row.metric}", row.optimizer, f"`{row.contender}`")
        lines.append((*names, metric, loss, sent, lost))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ---------------------------------------------------------------------- CSV


def write_csv(records: Sequence[Record], path: Path) -> None:
    """Write all curves: a line per step with its loss, and one per validation with its metric."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*_CSV, "loss", "metric", "value"])
        writer.writeheader()
        writer.writerows(_lines(records))


def _lines(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for record in records:
        names = {name: record[name] for name in _CSV if name in record}
        for row in record["rows"] or [{}]:  # a run without a step has a line, too
            value = {k: row[k] for k in ("epoch", "step", "seconds", "loss", "value") if k in row}
            yield names | value | ({"metric": record["metric"]} if "value" in row else {})
