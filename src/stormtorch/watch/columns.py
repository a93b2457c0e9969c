"""The time series of a job as a table for other programs: CSV."""

import csv
import io
from typing import Any


def as_csv(data: dict[str, Any]) -> str:
    """Returns the time series of a snapshot, one line for each bin: the time in unix seconds, then mean, lowest and
    highest of each measure over the ranks.
    """
    columns = data["series"]["columns"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow("" if value is None else value for value in row)
    return out.getvalue()
