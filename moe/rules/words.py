"""What the rules say in the same words."""

from enum import Enum


def plain(value: object) -> object:
    """A setting as the command line writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value.name if isinstance(value, Enum) else value


def divisors(number: int) -> str:
    """The divisors of a number, as a list to choose from; the smallest ones when there are many or it is huge."""
    found = [divisor for divisor in range(1, min(number, 4096) + 1) if number % divisor == 0]
    shown = found if len(found) <= 12 else [*found[:11], number]
    return ", ".join(map(str, shown))


def multiples_near(number: int, of: int) -> str:
    """The positive multiples just below and above a number: "8 or 10"."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)
