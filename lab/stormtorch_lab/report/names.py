"""Names of the files into which the parts of a page are written."""

import re

from stormtorch_lab.report.parts import Page, PageElement


def file_names(page: Page) -> list[tuple[str, PageElement]]:
    """Gives every part a unique short name, made of its title."""
    found: list[tuple[str, PageElement]] = []
    for number, part in enumerate(page.parts, start=1):
        words = re.sub(r"[^a-z0-9]+", "-", part.title.lower()).strip("-")[:48]
        found.append((f"{number:02d}-{words}", part))
    return found
