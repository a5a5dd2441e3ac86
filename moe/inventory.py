"""`switchyard ls`: what there is to choose from, as (name, description) pairs per topic."""

from collections.abc import Callable

from moe.config import CONFIGS, list_options


def recipes() -> list[tuple[str, str]]:
    """Recipes of configs/recipe/, with the first comment of each file."""
    return [(info.name, info.description) for info in list_options("recipe")]


def groups() -> list[tuple[str, str]]:
    """Options of the other groups, as written on the command line."""
    folders = sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir() and folder.name != "recipe")
    return [(f"{group}={info.name}", info.description) for group in folders for info in list_options(group)]


def sources() -> list[tuple[str, str]]:
    """Data sources by name; text:PATH is a source of your own."""
    from moe.data.sources import SOURCES

    return [*((name, source.description) for name, source in SOURCES.items()), ("text:PATH", "your own file or folder")]


def dispatchers() -> list[tuple[str, str]]:
    """Modes of dispatch.mode."""
    from dispatch.config import DispatchMode

    return [(f"dispatch.mode={mode.name}", "") for mode in DispatchMode]


def ops() -> list[tuple[str, str]]:
    """Implementations of each op. Loads torch."""
    from backends.ops.listing import OPS

    listed = []
    for op, implementations in OPS.items():
        listed.append((f"backend.ops.{op}=auto", "the first of these that can run"))
        for name, record in implementations.items():
            listed.append((f"backend.ops.{op}={name}", f"on {', '.join(record.devices)}; cost: {record.cost}"))
    return listed


TOPICS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "recipes": recipes,
    "groups": groups,
    "sources": sources,
    "dispatchers": dispatchers,
    "ops": ops,
}
"""What `ls` can list."""
