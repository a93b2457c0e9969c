"""The time series of a job as CSV."""

import csv
import io
from typing import Any


def as_csv(data: dict[str, Any]) -> str:
    """Returns the time series of a snapshot, one line per bin: unix time, then mean, minimum and maximum of each
    measure over the ranks.
    """
    columns = data["series"]["columns"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow("" if value is None else value for value in row)
    return out.getvalue()
