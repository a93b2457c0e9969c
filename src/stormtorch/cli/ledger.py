"""`stormtorch ledger`: a summary of a training's ledgers and step records."""

import csv as csv_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.cli.console import check_file, check_outputs, friendly_errors, save
from stormtorch.cli.terminal.options import Json, Plot

if TYPE_CHECKING:
    from stormtorch.telemetry.histories import RankHistory


def ledger(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Files of `ledger.follow` or `ledger.write`, record files, or folders of STORM_RECORD.",
            metavar="FILE...",
            show_default=False,
        ),
    ],
    csv: Annotated[Path | None, typer.Option(help="Write every ledger row or step record to this CSV file.")] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Summarise a training: what arrived, what waiting cost, the worst link.

    The summary comes first, then a line for each rank and the links that lost most.
    A ledger has one row per step and no wall-clock time; records of STORM_RECORD have the time too.

    [bold]Examples[/bold]

      stormtorch ledger ledger.jsonl                   written by optimizer.ledger.follow("ledger.jsonl")
      stormtorch ledger runs/today                     written by all ranks with STORM_RECORD=runs/today
      stormtorch ledger runs/today --plot today.png --csv today.csv
    """
    with friendly_errors():
        from rich.console import Console

        from stormtorch.cli.tables.ledger import show_histories
        from stormtorch.telemetry.histories import all_links, one_sentence, read_histories, summary
        from stormtorch.telemetry.json_files import without_nan, write_json

        check_outputs(json, plot)
        check_file("csv", csv)
        try:
            histories = read_histories(files)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="FILE") from error
        data = {
            "answer": one_sentence(histories),
            "ranks": [summary(each) for each in histories],
            "links": [asdict(each) for each in all_links(histories)],
        }
        save(lambda path: write_json(path, without_nan(data)), json)
        save(lambda path: _write_csv(histories, path), csv)
        if plot is not None:
            from stormtorch.cli.plots.ledger import plot_histories

            save(lambda path: plot_histories(histories, path), plot)
        show_histories(histories, Console())


def _write_csv(histories: "list[RankHistory]", path: Path) -> None:
    from stormtorch.telemetry.histories import COLUMNS

    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv_format.writer(file)
        lines.writerow(["rank", "time", *COLUMNS])
        for history in histories:
            for entry in history.entries:
                lines.writerow([history.name, entry["time"] or "", *(entry.get(name, "") for name in COLUMNS)])
