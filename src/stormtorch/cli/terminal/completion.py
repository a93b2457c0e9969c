"""Values that the shell offers for options with fixed choices, also for lists separated by commas."""

from collections.abc import Callable


def complete_choice(*choices: str) -> Callable[[str], list[str]]:
    """Completes one value out of several, each given by itself or as a list separated by commas."""
    known = _split(choices)

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


def complete_choice_list(*choices: str) -> Callable[[str], list[str]]:
    """Completes the last of a list separated by commas, without those that it already has."""
    known = _split(choices)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        return [f"{before}{comma}{name}" for name in known if name.startswith(last) and name not in taken]

    return complete


def _split(choices: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(name for choice in choices for name in choice.split(",")))
