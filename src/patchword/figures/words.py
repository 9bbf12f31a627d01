"""Numbers as words for people."""


def count(value: int) -> str:
    return f"{value:,}"


def plural(value: int, noun: str, ending: str = "s") -> str:
    return f"{count(value)} {noun}{'' if value == 1 else ending}"
