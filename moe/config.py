"""From a recipe and overrides to a typed, validated `RunConfig`: start of the data path, and the only user of Hydra.

Hydra composes the YAML files (`configs/`: config.yaml, then one option of each group, then the recipe) and reads the
override grammar. What it composes, and each override after it, is then laid setting by setting onto the structured
config, so that every problem is found in one go. Numbers: one reader for files, command line, sweeps and saved
configurations, so 1e-5 is a float everywhere (A41).
"""

import dataclasses
import itertools
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe.safe_yaml import check, read_text
from moe.schema import ConfigError as ConfigError
from moe.schema import Problem as Problem
from moe.schema import RunConfig as RunConfig
from moe.validate import validate as validate
from moe.values import Refused, annotation_at, coerce, is_number_for_text, leaves, nearest, nearest_path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MAX_OVERRIDE_CHARACTERS = 4096
MAX_OVERRIDE_BRACKETS = 32
MAX_SWEEP_RUNS = 256

_RECIPE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_REFERENCE = re.compile(r"\$\{([a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)*)\}")
_GLOBAL_PACKAGE = "# @package _global_"


@dataclasses.dataclass(frozen=True, slots=True)
class OptionInfo:
    """One YAML file of a folder of configs/."""

    name: str
    description: str
    """First comment of the file."""


def load_config(overrides: Sequence[str], recipe: str) -> RunConfig:
    """The configuration of one run: defaults, then groups, then the recipe, then the overrides in order.

    recipe: a name in configs/recipe/, or the path of a YAML file (it ends in .yaml or .yml, or holds a slash), which is
    read exactly as if it lay in configs/recipe/.
    overrides: Hydra's grammar (`moe.top_k=4`, `backend=cpu`, `data.sources=[stdlib]`), without sweeps.

    Raises ConfigError with every problem found.
    """
    reader = _Reader()
    parsed = [override for text in overrides if (override := reader.parse(text)) is not None]
    choices = reader.take_group_choices(parsed)
    name = reader.compose(recipe, choices)
    for override in parsed:
        reader.apply_override(override)
    return reader.finish(name)


def from_resolved(path: Path) -> RunConfig:
    """Read a saved config.yaml again: no recipe, no groups. Exact inverse of `to_yaml`.

    Raises ConfigError, also for a file that somebody edited into something else.
    """
    reader = _Reader()
    return reader.finish(reader.read_saved(path))


def to_plain_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested dicts of str, int, float, bool, None and lists; enums by name."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def to_yaml(config: RunConfig) -> str:
    """The configuration as YAML that `from_resolved` reads back exactly."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain_dict(config)))


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of a sweep's values, the last override varying fastest; [overrides] when nothing sweeps.

    `a=1,2`, `a=choice(1,2)` and `a=range(1,4)` sweep. Raises ConfigError for a sweep without end or one too long.
    """
    reader = _Reader()
    axes: list[list[str]] = []
    for text in overrides:
        override = reader.parse(text, sweeping=True)
        if override is None:
            continue
        if not override.is_sweep_override():
            axes.append([text])
            continue
        key = text.split("=", 1)[0]
        values = list(itertools.islice(override.sweep_string_iterator(), MAX_SWEEP_RUNS + 1))
        axes.append([f"{key}={value}" for value in values])
    runs = math.prod(len(axis) for axis in axes)
    if not reader.problems and not 0 < runs <= MAX_SWEEP_RUNS:
        reader.refuse("-m", None, f"must give 1 to {MAX_SWEEP_RUNS} runs", "sweep over other values")
    if reader.problems:
        raise ConfigError(reader.problems)
    return [list(point) for point in itertools.product(*axes)]


def list_options(group: str) -> list[OptionInfo]:
    """The recipes (group "recipe"), or the options of another group, by name."""
    found = []
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        comments = (line.removeprefix("#").strip() for line in path.read_text("utf-8").splitlines() if line[:1] == "#")
        found.append(OptionInfo(path.stem, next((line for line in comments if not line.startswith("@")), "")))
    return found


class _Reader:
    """Lays settings onto the structured config one by one and gathers what is refused."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._config: DictConfig = OmegaConf.structured(RunConfig)
        self._parser = OverridesParser.create()
        self._references: dict[str, tuple[str, str]] = {}
        self._failed: set[str] = set()
        self._complete = True
        self._saved_name: str | None = None
        self._contents: dict[Path, dict[str, Any]] = {}
        self._origins: dict[str, str] = {}
        # Every folder of configs/ but recipe/ is a group; its files are the options.
        self._groups = {
            folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
            for folder in sorted(CONFIGS.iterdir())
            if folder.is_dir() and folder.name != "recipe"
        }

    def refuse(self, path: str, value: object, rule: str, way_out: str, origin: str = "") -> None:
        """Add a problem."""
        self.problems.append(Problem(path=path, value=value, rule=rule, way_out=way_out, origin=origin))
        self._failed.add(path)

    # --- overrides

    def parse(self, text: str, sweeping: bool = False) -> Override | None:
        """One override through Hydra's grammar, or None and a problem."""
        key = text.split("=", 1)[0]
        if len(text) > MAX_OVERRIDE_CHARACTERS or sum(map(text.count, "[{(")) > MAX_OVERRIDE_BRACKETS:
            # The grammar's parser is slow and recursive.
            self.refuse(key, None, "is too long or too deeply nested", "put long values into a recipe file")
            return None
        try:
            override = self._parser.parse_override(text)
            value = override.value()
        except (HydraException, ValueError, OverflowError, RecursionError) as error:
            way_out = "write section.key=value; quote text with special characters, as 'section.key=\"a, b\"'"
            self.refuse(text, None, f"is not an override ({_first_line(error)})", way_out)
            return None
        if override.is_delete():
            self.refuse(
                text, None, "deletes a setting, which cannot be", f"write {key.lstrip('~')}=VALUE, or leave it out"
            )
            return None
        if override.package is not None or "/" in key:
            self.refuse(
                text, None, "names a Hydra package or nested group, which there are none of", "write section.key=value"
            )
            return None
        if override.is_sweep_override():
            finite = isinstance(value, ChoiceSweep | RangeSweep) and (
                not isinstance(value, RangeSweep) or value.step is None or value.step > 0
            )
            if not sweeping:
                self.refuse(
                    key, text.split("=", 1)[1], "is a sweep over values", "add -m to run them all, or choose one"
                )
                return None
            if not finite:
                self.refuse(
                    key, text.split("=", 1)[1], "is not a plain sweep", "write a=1,2 or a=choice(1,2) or a=range(1,4)"
                )
                return None
        return override

    def take_group_choices(self, parsed: list[Override]) -> dict[str, str]:
        """Remove `group=option` from the overrides; the options by group."""
        choices: dict[str, str] = {}
        for override in list(parsed):
            key = override.key_or_group
            if key == "recipe":
                parsed.remove(override)
                self.refuse(
                    "recipe", override.value(), "is chosen by the first argument", "write switchyard run RECIPE ..."
                )
            elif key in self._groups and not isinstance(override.value(), dict):
                parsed.remove(override)
                option = override.value()
                if option in self._groups[key]:
                    choices[key] = str(option)
                else:
                    options = self._groups[key]
                    near = nearest(str(option), options)
                    way_out = f"did you mean {near}?" if near else "choose one of them"
                    self.refuse(key, option, f"must be one of {', '.join(options)}", way_out)
        return choices

    def apply_override(self, override: Override) -> None:
        """One value from the command line."""
        path, value = override.key_or_group, override.value()
        text = (override.input_line or "=").split("=", 1)[1]
        if override.type is OverrideType.ADD and annotation_at(path) is not None:
            self.refuse(path, value, "is there already and cannot be added", f"write {path}={text}")
            return
        if is_number_for_text(annotation_at(path), text.strip()):
            # The grammar made a number of it: 20240101_1200 would lose its underscore, 1e3 its spelling.
            value = text.strip()
        self._set(path, value, origin="")

    # --- files

    def compose(self, recipe: str, choices: Mapping[str, str]) -> str | None:
        """Let Hydra compose the files and apply what comes out; the recipe's name, or None and problems."""
        before = len(self.problems)
        name, file = self._find_recipe(recipe)
        if file is not None:
            self._scan_groups(choices)
            self._scan(file, "", recipe)
        if name is None or file is None or len(self.problems) > before:
            self._complete = False
        # Each file by itself first: what is wrong in one is said with the file's name, and Hydra meets no surprise.
        for scanned, content in self._contents.items():
            self._apply_file(content, origin=_shown(scanned, recipe))
        if name is None or file is None or len(self.problems) > before:
            return name
        try:
            settings = _composed(file, choices)
        except (HydraException, OmegaConfBaseException, RecursionError) as error:
            self.refuse("recipe", recipe, f"cannot be composed ({_first_line(error)})", "check its defaults list")
            self._complete = False
            return name
        settings.pop("recipe", None)
        self._report_hidden_choices(choices, settings)
        self._config = OmegaConf.structured(RunConfig)
        self._references.clear()
        self._apply_file(settings, origin=None)
        return self._saved_name or name

    def read_saved(self, path: Path) -> str | None:
        """Apply a saved configuration; the name of its recipe, or None and problems."""
        shown = str(path)
        text, problems = read_text(path, shown)
        self.problems += problems or check(text, shown)
        content = {} if self.problems else self._content_of(text, shown)
        self._complete = not self.problems
        name = content.pop("recipe", None)
        if self._complete and not (isinstance(name, str) and _RECIPE_NAME.fullmatch(name)):
            self.refuse("recipe", name, "must be the name of a recipe", "write recipe: NAME at the top", shown)
            self._complete = False
        self._origins.update((leaf, shown) for leaf, _ in leaves(content))
        self._apply_file(content, origin=shown)
        return name if self._complete else None

    def _content_of(self, text: str, shown: str) -> dict[str, Any]:
        """The plain content of a YAML text that `check` has passed."""
        try:
            content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            self.refuse(shown, None, f"cannot be read ({_first_line(error)})", "check quotes and ${...}")
            return {}
        return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}

    def _apply_file(self, content: Mapping[str, Any], origin: str | None) -> None:
        """Settings of a file; origin None looks up which of the scanned files each came from."""
        self._set_all("", content, origin)

    def _find_recipe(self, recipe: str) -> tuple[str | None, Path | None]:
        """Name and file of a recipe."""
        if not ("/" in recipe or recipe.endswith((".yaml", ".yml"))):
            known = [info.name for info in list_options("recipe")]
            if recipe in known:
                return recipe, CONFIGS / "recipe" / f"{recipe}.yaml"
            way_out = f"did you mean {near}?" if (near := nearest(recipe, known)) else "see switchyard ls recipes"
            self.refuse("recipe", recipe, f"must be one of {', '.join(known)} or the path of a YAML file", way_out)
            return None, None
        path = Path(recipe)
        if not _RECIPE_NAME.fullmatch(path.stem) or path.suffix not in (".yaml", ".yml"):
            rule = (
                "must be a .yaml file whose name begins with a letter or digit and has letters, digits, -, _ and . only"
            )
            self.refuse("recipe", recipe, rule, "rename it; the name goes into the run folder's")
            return None, None
        try:
            return path.stem, path.resolve()
        except (OSError, RuntimeError) as error:
            # Python 3.11 raises RuntimeError for links that lead back to themselves.
            self.refuse("recipe", recipe, f"must be a file ({error})", "give the path of the file itself")
            return None, None

    def _scan_groups(self, choices: Mapping[str, str]) -> None:
        """configs/config.yaml names an option for each group, in their order; the recipe comes after them."""
        content = OmegaConf.to_container(OmegaConf.load(CONFIGS / "config.yaml"))
        assert isinstance(content, dict)
        for entry in content["defaults"]:
            for group, option in entry.items() if isinstance(entry, dict) else ():
                if group in self._groups:
                    self._scan(CONFIGS / group / f"{choices.get(group, option)}.yaml", group)

    def _scan(self, file: Path, group: str, recipe: str = "") -> None:
        """Refuse what no settings file may hold, in this file and in those that its defaults list names."""
        if file in self._contents:
            return
        self._contents[file] = {}  # Taken note of before its defaults list is followed, which may lead back here.
        shown = _shown(file, recipe)
        text, problems = read_text(file, shown)
        problems = problems or check(text, shown)
        self.problems += problems
        if problems:
            return
        content = self._content_of(text, shown)
        if not group and not _is_ours(file):
            self._take_name(content, shown)
        if not group and _is_ours(file) and not text.startswith(_GLOBAL_PACKAGE):
            self.refuse(shown, None, f"must begin with {_GLOBAL_PACKAGE}", "make it the first line of the recipe")
        defaults = content.pop("defaults", None) or []
        if not isinstance(defaults, list):
            self.refuse("defaults", defaults, "must be a list", f"write [{defaults}]", shown)
            defaults = []
        for entry in defaults:
            self._scan_default(entry, shown)
        # Last, after the files it builds upon: later contents win, as in Hydra.
        del self._contents[file]
        self._contents[file] = {group: content} if group else content
        self._origins.update((path, shown) for path, _ in leaves(self._contents[file]))

    def _take_name(self, content: dict[str, Any], shown: str) -> None:
        """A saved configuration, or the output of --cfg job, run as a recipe: it says which recipe it came from."""
        if "recipe" not in content:
            return
        name = content.pop("recipe")
        if isinstance(name, str) and _RECIPE_NAME.fullmatch(name):
            self._saved_name = name
        else:
            self.refuse("recipe", name, "must be the name of a recipe", "write recipe: NAME, or leave it out", shown)

    def _scan_default(self, entry: object, shown: str) -> None:
        """One line of a recipe's defaults list: _self_, a base recipe, or `override /group: option`."""
        if entry == "_self_":
            return
        if isinstance(entry, str) and entry in [info.name for info in list_options("recipe")]:
            self._scan(CONFIGS / "recipe" / f"{entry}.yaml", "")
            return
        if isinstance(entry, dict) and len(entry) == 1:
            [(key, option)] = entry.items()
            group = str(key).removeprefix("override /")
            if str(key).startswith("override /") and option in self._groups.get(group, ()):
                self._scan(CONFIGS / group / f"{option}.yaml", group)
                return
        groups = "; ".join(f"{group}: {', '.join(options)}" for group, options in self._groups.items())
        rule = "is not a line that a recipe's defaults list may hold"
        self.refuse(
            "defaults",
            entry,
            rule,
            f"write _self_, another recipe's name, or override /GROUP: OPTION ({groups})",
            shown,
        )

    def _report_hidden_choices(self, choices: Mapping[str, str], composed: Mapping[str, Any]) -> None:
        """A group chosen on the command line must not lose silently to the recipe's own values."""
        final = dict(leaves(composed))
        for group, option in choices.items():
            for path, value in leaves(self._contents[CONFIGS / group / f"{option}.yaml"]):
                if final.get(path) != value:
                    rule = f"says {path}={value}, but the recipe itself says {final.get(path)}"
                    self.refuse(group, option, rule, f"write {path}={value} as well, or leave {group}={option} out")

    # --- settings

    def _set_all(self, prefix: str, content: Mapping[Any, Any], origin: str | None) -> None:
        for key, value in content.items():
            if "." in str(key):
                self.refuse(
                    f"{prefix}{key}", value, "must not be written with dots inside a file", "indent it", origin or ""
                )
            else:
                self._set(f"{prefix}{key}", value, origin)

    def _set(self, path: str, value: object, origin: str | None) -> None:
        """One setting or section. origin: a file's name, "" for the command line, None to look the file up."""
        annotation = annotation_at(path)
        if origin == "":
            self._origins.pop(path, None)
        source = self._origins.get(path, "") if origin is None else origin
        if annotation is None:
            self._refuse_unknown(path, value, source)
        elif dataclasses.is_dataclass(annotation):
            if not isinstance(value, Mapping):
                names = ", ".join(field.name for field in dataclasses.fields(annotation))
                self.refuse(path, value, "is a section, not a value", f"set one of its keys: {names}", source)
                return
            self._set_all(f"{path}.", value, origin)
        elif isinstance(value, str) and "${" in value:
            match = _REFERENCE.fullmatch(value)
            if match is None:
                rule = "must not use ${...} except as a whole value that names another setting"
                self.refuse(path, value, rule, "write the value, or ${section.key}", source)
            else:
                self._references[path] = (match[1], source)
        else:
            self._references.pop(path, None)
            self._store(path, annotation, value, source)

    def _store(self, path: str, annotation: Any, value: object, origin: str) -> None:
        try:
            OmegaConf.update(self._config, path, coerce(annotation, value), merge=False)
        except Refused as refused:
            self.refuse(path, "null" if value is None else value, refused.rule, refused.way_out, origin)
        except OmegaConfBaseException as error:  # The schema has the last word.
            self.refuse(
                path, value, f"does not fit the schema ({_first_line(error)})", "see switchyard run --help", origin
            )

    def _refuse_unknown(self, path: str, value: object, origin: str) -> None:
        last = path.rsplit(".", 1)[-1]
        if path == "recipe":
            rule, way_out = "is given by the first argument", "leave it out"
        elif last.startswith("_") and last.endswith("_"):
            rule, way_out = "is not a setting: YAML here never names code to call", "leave it out"
        else:
            near = nearest_path(path)
            rule = "is not a setting"
            way_out = f"did you mean {near}?" if near else "switchyard run RECIPE --cfg job shows all of them"
        self.refuse(path, value, rule, way_out, origin)

    def _resolve_references(self) -> None:
        for path, (target, origin) in self._references.items():
            seen = [path]
            while target in self._references and target not in seen:
                seen.append(target)
                target = self._references[target][0]
            shown = f"${{{target}}}"
            if target in seen:
                self.refuse(path, shown, "goes round in a circle", "write the value", origin)
                continue
            annotation = annotation_at(target)
            if annotation is None or dataclasses.is_dataclass(annotation) or target == "recipe":
                self.refuse(path, shown, "must name another setting", "write the value, or ${section.key}", origin)
                continue
            value = OmegaConf.select(self._config, target)
            if isinstance(value, Enum):
                value = value.name
            elif OmegaConf.is_config(value):
                value = OmegaConf.to_container(value)
            self._store(path, annotation_at(path), value, origin)

    def finish(self, name: str | None) -> RunConfig:
        """Resolve references, check the rules between settings, and make the plain record."""
        self._resolve_references()
        self._config.recipe = name or "none"
        config = OmegaConf.to_object(self._config)
        assert isinstance(config, RunConfig)
        if self._complete:
            # A rule that reads a refused setting would complain about a default that nobody chose.
            for problem in validate(config):
                if not self._failed & {problem.path, *problem.involves}:
                    origin = self._origins.get(problem.path, "")
                    self.problems.append(dataclasses.replace(problem, origin=origin))
        if self.problems:
            raise ConfigError(list({str(problem): problem for problem in self.problems}.values()))
        return config


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return list(value) if isinstance(value, list) else value


def _composed(file: Path, choices: Mapping[str, str]) -> dict[str, Any]:
    """What Hydra makes of config.yaml, the groups and a recipe's file."""
    with tempfile.TemporaryDirectory(prefix="switchyard-recipe-") as folder:
        name, arguments = file.stem, [f"{group}={option}" for group, option in choices.items()]
        if not _is_ours(file):
            # Hydra knows recipes by name. Another name than its own, which may be that of one of ours.
            name = "recipe_from_a_path"
            text = file.read_text("utf-8")
            copy = Path(folder, "recipe", f"{name}.yaml")
            copy.parent.mkdir()
            copy.write_text(text if text.startswith(_GLOBAL_PACKAGE) else f"{_GLOBAL_PACKAGE}\n{text}", "utf-8")
            arguments.append(f"hydra.searchpath=['file://{folder}']")
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            content = OmegaConf.to_container(compose("config", overrides=[f"recipe='{name}'", *arguments]))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _is_ours(file: Path) -> bool:
    return file.is_relative_to(CONFIGS)


def _shown(file: Path, recipe: str) -> str:
    """How a settings file is named in messages: below the repository, or as the user wrote it."""
    return str(file.relative_to(CONFIGS.parent)) if _is_ours(file) else recipe


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
