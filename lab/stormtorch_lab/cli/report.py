"""The command `stormtorch report`: an HTML page of the JSON results of other commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.checks import BadSetting
from stormtorch.cli.console import check_file, friendly_errors, save, save_into

if TYPE_CHECKING:
    from stormtorch_lab.report.parts import Page


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Files that commands wrote with --json, or their folders; several files of one command are compared.",
            metavar="FILE...",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file.", show_default="the first file's name with .html", dir_okay=False),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Also draw each chart as a PNG into this folder; needs matplotlib.", file_okay=False),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Also write each chart and table as CSV into this folder.", file_okay=False)
    ] = None,
) -> None:
    """Make one HTML page of results: verdict, charts, tables.

    It reads what `train`, `simulate`, `bench allreduce`, `bench ddp`, `bench latency`, `bench convergence`,
    `bench sweep`, `chaos` and `demo` write with --json. Several files of the same command become one comparison.

    [bold]Examples[/bold]

      stormtorch report learning.json -o learning.html
      stormtorch report monday.json tuesday.json -o both.html
      stormtorch report sweep.json --png pictures --csv tables
    """
    with friendly_errors(results="FILE"):
        from stormtorch_lab.report.files import UnknownFile, page_of
        from stormtorch_lab.report.page import page_html

        out = out or (results[0].resolve() if results[0].is_dir() else results[0]).with_suffix(".html")
        try:
            page, kind = page_of(results)
        except UnknownFile as error:
            raise BadSetting("results", str(error)) from error
        check_file("out", out)
        text = page_html(page)
        save(lambda path: _write(path, text), out)
        save_into(lambda folder: _write_tables(page, folder), csv)
        if png is not None:
            from stormtorch_lab.cli.plots.report import plot_page

            save_into(lambda folder: plot_page(page, folder), png)
        typer.echo(page.verdict)
        typer.echo(f"{kind}: {out.resolve().as_uri()}")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_tables(page: "Page", folder: Path) -> None:
    import csv

    from stormtorch_lab.report.names import file_names

    for name, part in file_names(page):
        table = part.table()
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.headings)
            writer.writerows([["" if cell is None else cell for cell in row] for row in table.rows])
