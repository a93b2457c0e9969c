"""Shell completion for options with fixed choices, and for comma-separated lists of them."""

from collections.abc import Callable


def complete_choice(*choices: str) -> Callable[[str], list[str]]:
    """Completes one value; `choices` are single values or comma-separated lists of them."""
    known = _split(choices)

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


def complete_choice_list(*choices: str) -> Callable[[str], list[str]]:
    """Completes the last item of a comma-separated list, without those that it already has."""
    known = _split(choices)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        return [f"{before}{comma}{name}" for name in known if name.startswith(last) and name not in taken]

    return complete


def _split(choices: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(name for choice in choices for name in choice.split(",")))
