"""Names of the files into which the parts of a page are written."""

import re

from stormtorch_lab.report.parts import Page, Part


def file_names(page: Page) -> list[tuple[str, Part]]:
    """Gives every part a short name of its own, made of its title."""
    found: list[tuple[str, Part]] = []
    for number, part in enumerate(page.parts, start=1):
        words = re.sub(r"[^a-z0-9]+", "-", part.title.lower()).strip("-")[:48]
        found.append((f"{number:02d}-{words}", part))
    return found
