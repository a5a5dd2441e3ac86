"""The configuration: what is accepted, what is refused, and with which words."""

import dataclasses
import itertools
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.config import DeviceKind
from moe.config import (
    CONFIGS,
    ConfigError,
    expand_sweep,
    from_resolved,
    list_options,
    load_config,
    to_plain_dict,
    to_yaml,
)
from moe.model.config import BalanceScope, RouterKind
from moe.rules.ranges import value_at
from moe.schema import RunConfig
from moe.validate import validate
from moe.values import annotation_at, known_paths

SPELLINGS = {"1e-5": 1e-5, "1e-05": 1e-5, "1E-4": 1e-4, "1.e-4": 1e-4, "3": 3.0, "1e5": 1e5, ".5": 0.5, "+1e-5": 1e-5}


def refusal(overrides: list[str], recipe: str = "tiny") -> str:
    """What is said against a configuration."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, recipe)
    assert caught.value.exit_code == 2
    return str(caught.value)


def write(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    return str(path)


def leaf_paths() -> Iterator[str]:
    return (path for path in known_paths() if not dataclasses.is_dataclass(annotation_at(path)) and path != "recipe")


# --- what is accepted


def test_example_of_the_readme_works() -> None:
    config = load_config(["moe.num_experts=16", "moe.top_k=4", "parallel.expert=2", "optim.lr=1e-3"], "quickstart")
    assert (config.moe.num_experts, config.moe.top_k, config.parallel.expert, config.optim.lr) == (16, 4, 2, 1e-3)
    assert config.recipe == "quickstart"


@pytest.mark.parametrize("recipe", [info.name for info in list_options("recipe")])
def test_every_recipe_is_valid_and_says_what_it_is_for(recipe: str) -> None:
    load_config([], recipe)
    assert next(info.description for info in list_options("recipe") if info.name == recipe)


@pytest.mark.parametrize(
    "choice",
    [
        f"{folder.name}={option.name}"
        for folder in sorted(CONFIGS.iterdir())
        if folder.is_dir() and folder.name != "recipe"
        for option in list_options(folder.name)
    ],
)
def test_every_group_option_is_valid(choice: str) -> None:
    load_config([choice], "tiny")


def test_recipes_hold_only_what_differs_from_the_defaults() -> None:
    default = to_plain_dict(RunConfig(recipe="none"))
    for info in list_options("recipe"):
        text = (CONFIGS / "recipe" / f"{info.name}.yaml").read_text("utf-8")
        config = load_config([], info.name)
        section = ""
        for line in text.splitlines():
            if match := re.fullmatch(r"(\w+):", line):
                section = match[1]
            elif (match := re.fullmatch(r"  (\w+): .*", line)) and section != "defaults":
                path = f"{section}.{match[1]}"
                # Lines that a recipe's reader shall see although they are defaults.
                if path not in ("engine.zero_stage", "engine.dtype", "model.num_dense_layers", "moe.top_k"):
                    assert to_plain_dict(config)[section][match[1]] != default[section][match[1]], (
                        f"{info.name}: {path}"
                    )


def test_group_choice_and_value_override_go_together() -> None:
    config = load_config(["backend=cpu", "backend.ops.grouped_gemm=reference"], "tiny")
    assert config.backend.device is DeviceKind.cpu
    assert config.backend.ops.grouped_gemm == "reference"


def test_group_option_sets_what_belongs_together() -> None:
    config = load_config(["moe=bias_balanced"], "tiny")
    assert (config.moe.router, config.moe.balance_scope) == (RouterKind.sigmoid, BalanceScope.sequence)
    assert config.moe.expert_bias_rate == 1e-3


def test_later_override_wins() -> None:
    assert load_config(["moe.top_k=3", "moe.top_k=4"], "tiny").moe.top_k == 4


def test_section_can_be_given_as_a_mapping() -> None:
    config = load_config(["optim={lr: 1e-4, warmup_steps: 3}", "data.sources=[topics]"], "tiny")
    assert (config.optim.lr, config.optim.warmup_steps, config.data.sources) == (1e-4, 3, ["topics"])


def test_double_plus_may_name_a_setting_that_exists() -> None:
    assert load_config(["++moe.top_k=3"], "tiny").moe.top_k == 3


def test_reference_takes_another_settings_value() -> None:
    config = load_config(["moe.moe_intermediate_size=${model.hidden_size}", "model.hidden_size=32"], "tiny")
    assert config.moe.moe_intermediate_size == 32


@pytest.mark.parametrize("name", ["20240101_1200", "1e3", "010", "2024"])
def test_text_that_looks_like_a_number_keeps_its_spelling(name: str, tmp_path: Path) -> None:
    config = load_config([f"run.dir={name}"], "tiny")
    assert config.run.dir == name
    assert from_resolved(Path(write(tmp_path / "config.yaml", to_yaml(config)))).run.dir == name


# --- A41: numbers stay numbers


@pytest.mark.parametrize("text", SPELLINGS)
def test_numbers_are_floats_on_the_command_line(text: str) -> None:
    value = load_config([f"optim.lr={text}"], "tiny").optim.lr
    assert type(value) is float
    assert value == SPELLINGS[text]


@pytest.mark.parametrize("text", SPELLINGS)
def test_numbers_are_floats_in_a_file_and_after_saving(text: str, tmp_path: Path) -> None:
    config = load_config([], write(tmp_path / "mine.yaml", f"optim:\n  lr: {text}\n"))
    again = from_resolved(Path(write(tmp_path / "config.yaml", to_yaml(config))))
    for value in (config.optim.lr, again.optim.lr):
        assert type(value) is float
        assert value == SPELLINGS[text]


@pytest.mark.parametrize("text", SPELLINGS)
def test_numbers_are_floats_in_a_sweep(text: str) -> None:
    for point in expand_sweep([f"optim.lr={text},0.25"]):
        value = load_config(point, "tiny").optim.lr
        assert type(value) is float
        assert value in (SPELLINGS[text], 0.25)


@pytest.mark.parametrize(("text", "value"), [("1e1", 10), ("10.0", 10), ("+10", 10), ("1_0", 10)])
def test_integral_number_is_accepted_for_an_integer(text: str, value: int, tmp_path: Path) -> None:
    from_command_line = load_config([f"trainer.max_steps={text}"], "tiny").trainer.max_steps
    from_file = load_config([], write(tmp_path / "mine.yaml", f"trainer: {{max_steps: {text}}}\n")).trainer.max_steps
    assert from_command_line == from_file == value
    assert type(from_command_line) is type(from_file) is int


def test_1e3_is_an_integer() -> None:
    assert load_config(["trainer.max_steps=1e3"], "tiny").trainer.max_steps == 1000


@settings(max_examples=15, deadline=None)
@given(st.floats(min_value=1e-300, max_value=1e300))
def test_any_float_survives_command_line_and_sweep(value: float) -> None:
    [[override], _] = expand_sweep([f"optim.lr={value!r},1.5"])
    assert load_config([f"optim.lr={value!r}"], "tiny").optim.lr == load_config([override], "tiny").optim.lr == value


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lr=st.floats(min_value=1e-300, max_value=1e300),
    prompt=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85"), max_size=20).filter(
        lambda text: "${" not in text
    ),
    folder=st.text("0123456789_.:-eExonfyNTtrue~", min_size=1, max_size=8).filter(lambda text: text != "None"),
    seed=st.integers(0, 2**63 - 1),
)
def test_saving_and_reading_again_is_exact(tmp_path: Path, lr: float, prompt: str, folder: str, seed: int) -> None:
    config = load_config([], "quickstart")
    config.optim.lr, config.trainer.sample_prompt, config.run.dir, config.trainer.seed = lr, prompt, folder, seed
    again = from_resolved(Path(write(tmp_path / "config.yaml", to_yaml(config))))
    assert again == config
    assert {type(value_at(again, path)) for path in leaf_paths()} == {
        type(value_at(config, path)) for path in leaf_paths()
    }


def test_a_character_that_yaml_loses_is_refused() -> None:
    assert "must not hold the character U+0085" in refusal(["trainer.sample_prompt='a\x85b'"])


# --- what is refused, and how it is said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # unknown names
        ("moe.top_kk=2", r"moe\.top_kk \(2\) is not a setting; did you mean moe\.top_k\?"),
        ("lr=1", r"lr \(1\) is not a setting; did you mean optim\.lr\?"),
        ("trainer.zero_stage=1", r"is not a setting; did you mean engine\.zero_stage\?"),
        ("+unknwon=1", r"unknwon \(1\) is not a setting"),
        ("+moe.topk=1", r"moe\.topk \(1\) is not a setting; did you mean moe\.top_k\?"),
        ("++max_step=1", r"max_step \(1\) is not a setting; did you mean trainer\.max_steps\?"),
        ("+moe.top_k=1", r"moe\.top_k \(1\) is there already and cannot be added; write moe\.top_k=1"),
        ("~moe.top_k", r"~moe\.top_k deletes a setting"),
        ("~moe.top_k=2", r"deletes a setting"),
        ("moe.top_k.x=1", r"moe\.top_k\.x \(1\) is not a setting"),
        ("hydra.run.dir=x", r"hydra\.run\.dir \(x\) is not a setting; did you mean run\.dir\?"),
        ("hydra/launcher=basic", r"names a Hydra package or nested group"),
        ("backend@other=cpu", r"names a Hydra package or nested group"),
        ("moe._target_=os.system", r"is not a setting: YAML here never names code"),
        ("recipe=quickstart", r"recipe \(quickstart\) is chosen by the first argument"),
        ("backend=tpu", r"backend \(tpu\) must be one of auto, cpu, cuda, npu; did you mean npu\?"),
        ("moe=2", r"moe \(2\) must be one of bias_balanced, softmax"),
        ("moe=null", r"moe must be one of bias_balanced, softmax"),
        ("optim=3", r"optim \(3\) is a section, not a value; set one of its keys: lr, "),
        # types
        ("moe.top_k=two", r"moe\.top_k \(two\) must be a whole number"),
        ("trainer.max_steps=8.5", r"trainer\.max_steps \(8\.5\) must be a whole number; choose 8 or 9"),
        ("moe.top_k=010", r"moe\.top_k \(010\) must be .* leading zeros.*ambiguous; write 10"),
        ("optim.lr=010", r"optim\.lr \(010\) must be .* leading zeros.*ambiguous; write 10"),
        ("moe.top_k='2'", r"must be a whole number, not a quoted text; leave the quotes out"),
        ("optim.lr='1e-5'", r"must be a number, not a quoted text; leave the quotes out"),
        ("moe.top_k=true", r"moe\.top_k \(True\) must be a whole number"),
        ("moe.top_k=0x10", r"moe\.top_k \(0x10\) must be a whole number"),
        ("moe.top_k=1e30", r"must fit into 64 bits"),
        ("optim.lr=nan", r"optim\.lr \(nan\) must be a finite number"),
        ("optim.lr=inf", r"optim\.lr \(inf\) must be a finite number"),
        ("optim.lr=-inf", r"must be a finite number"),
        ("optim.lr=1e999", r"must be a finite number"),
        ("optim.lr=false", r"must be a number"),
        ("optim.lr=fast", r"optim\.lr \(fast\) must be a number"),
        ("moe.normalize_topk=yes", r"must be true or false"),
        ("moe.normalize_topk=1", r"must be true or false"),
        ("moe.router=softmx", r"must be one of softmax, sigmoid.*; did you mean softmax\?"),
        ("engine.dtype=BF16", r"must be one of fp32, bf16; did you mean bf16\?"),
        ("run.dir=true", r'run\.dir \(True\) must be a text; quote it: "True"'),
        ("data.sources=stdlib", r"data\.sources \(stdlib\) must be a list; write \[stdlib\]"),
        ("data.sources=[1]", r"must be a text"),
        ("run.dir=None", r'run\.dir \(None\) is the text "None".*; write null for no value'),
        ("model.head_dim=None", r'is the text "None".*; write null for no value'),
        ("optim.lr=None", r'is the text "None".*; give a number'),
        ("optim.lr=null", r"optim\.lr \(null\) must not be null; give a number"),
        # grammar
        ("optim.lr=!!python/object:os.system", r"is not an override"),
        ("moe.top_k=!int 2", r"is not an override"),
        ("moe.top_k", r"moe\.top_k is not an override"),
        ("trainer.sample_prompt=def f(", r"is not an override .*quote text"),
        ("a=" + "[" * 100, r"is too long or too deeply nested"),
        ("run.dir=" + "x" * 5000, r"is too long or too deeply nested"),
        ("data.cache_dir=${oc.env:HOME}", r"must not use \$\{\.\.\.\} except as a whole value"),
        ("data.cache_dir=${data.cache_dir}", r"goes round in a circle"),
        ("run.dir=x${recipe}", r"must not use \$\{\.\.\.\} except as a whole value"),
        ("moe.top_k=${moe.topk}", r"\$\{moe\.topk\}\) must name another setting"),
        ("moe.top_k=${moe}", r"\$\{moe\}\) must name another setting"),
        ("moe.top_k=${optim.schedule}", r"moe\.top_k \(cosine\) must be a whole number"),
        ("moe.top_k=1,2", r"moe\.top_k \(1,2\) is a sweep over values; add -m"),
        ("moe.top_k=range(1,3)", r"is a sweep over values; add -m"),
        # ranges
        ("optim.lr=0", r"optim\.lr \(0\.0\) must be above 0"),
        ("optim.lr=-1e-3", r"optim\.lr \(-0\.001\) must be above 0"),
        ("optim.beta2=1", r"optim\.beta2 \(1\.0\) must be at least 0 and below 1"),
        ("model.hidden_size=-64", r"model\.hidden_size \(-64\) must be at least 1"),
        ("model.num_layers=0", r"must be at least 1"),
        ("model.vocab_size=256", r"model\.vocab_size \(256\) must be at least 300"),
        ("moe.num_experts=0", r"moe\.num_experts \(0\) must be at least 1"),
        ("moe.load_balancing_coef=-1", r"must not be negative"),
        ("engine.zero_stage=4", r"engine\.zero_stage \(4\) must be 0, 1, 2 or 3"),
        ("optim.min_lr_ratio=1.5", r"must lie between 0 and 1"),
        ("trainer.seed=-1", r"trainer\.seed \(-1\) must lie between 0 and"),
        ("trainer.batch_size=0", r"trainer\.batch_size \(0\) must be at least 1"),
        ("data.heldout_fraction=0", r"must lie between 0 and 1, both excluded"),
        ("data.heldout_fraction=1", r"must lie between 0 and 1, both excluded"),
        ("data.seq_len=7", r"data\.seq_len \(7\) must be at least 8"),
        ("data.sources=[]", r"must name one or more different sources"),
        ("data.sources=[stdlib,stdlib]", r"must name one or more different sources"),
        ("data.sources=[stdlb]", r"data\.sources \(stdlb\) is no known source; did you mean stdlib\?"),
        ("data.sources=['text:/nowhere']", r"data\.sources \(text:/nowhere\) does not exist"),
        ("run.dir=''", r"run\.dir \(\) must name a folder; write null"),
        # A42 and its kind: rules between settings, both numbers named
        ("moe.top_k=5", r"moe\.top_k \(5\) must be at most moe\.num_experts \(4\); choose 4 or less"),
        ("parallel.nproc=3", r"parallel\.expert \(2\) must divide .*parallel\.nproc \(3\); choose one of 1, 3"),
        ("trainer.batch_size=9", r"trainer\.batch_size \(9\) must be divisible .*\(2 \* 1 = 2\); choose 8 or 10"),
        ("parallel.sequence=3", r"parallel\.sequence \(3\) must divide .*parallel\.nproc \(2\); choose one of 1, 2"),
        ("parallel.sequence=0", r"parallel\.sequence \(0\) must be at least 1"),
        (
            "parallel={nproc: 8, sequence: 8}",
            r"parallel\.sequence \(8\) must divide model\.num_heads \(\d\): .*choose one of",
        ),
        ("trainer.accumulation=3", r"trainer\.batch_size \(8\) must be divisible .*\(2 \* 3 = 6\); choose 6 or 12"),
        ("model.num_heads=3", r"model\.hidden_size \(64\) must be divisible by model\.num_heads \(3\)"),
        ("model.num_heads=64", r"model\.hidden_size \(64\) must give an even head"),
        ("model.head_dim=15", r"model\.head_dim \(15\) must be even"),
        ("model.num_kv_heads=3", r"model\.num_kv_heads \(3\) must divide model\.num_heads \(2\); choose one of 1, 2"),
        ("model.num_dense_layers=3", r"model\.num_dense_layers \(3\) must be at most model\.num_layers \(2\)"),
        ("dispatch.mode=local", r"dispatch\.mode \(local\) must not be local with parallel\.expert=2"),
        # A10
        ("moe.top_k=1", r"moe\.normalize_topk \(true\) must be false with moe\.top_k=1.*set moe\.normalize_topk=false"),
        # A04: settings without effect
        ("moe.expert_bias_rate=1e-3", r"moe\.expert_bias_rate \(0\.001\) has no effect with moe\.router=softmax"),
        ("model.num_dense_layers=2", r"moe\.load_balancing_coef \(0\.01\) has no effect: all 2 layers are dense"),
        ("trainer.eval_every=1 trainer.eval_batches=0", r"trainer\.eval_every \(1\) has no effect"),
    ],
)
def test_refusal_names_path_value_rule_and_way_out(override: str, message: str) -> None:
    overrides = override.split(" ") if override.startswith("trainer.eval_every") else [override]
    text = refusal(overrides)
    assert re.search(message, text)
    # Every problem is one line with a way out after the rule.
    assert all("; " in line for line in text.splitlines()[1:])


def test_all_problems_are_reported_at_once() -> None:
    text = refusal(
        ["moe.top_kk=1", "optim.lr=nan", "moe.top_k=9", "engine.dtype=fp16", "backend=gpu", "trainer.seed=x"]
    )
    assert text.startswith("6 problems")
    for path in ("moe.top_kk", "optim.lr", "moe.top_k (9)", "engine.dtype", "backend (gpu)", "trainer.seed"):
        assert path in text


def test_no_rule_complains_about_a_default_in_place_of_a_refused_value() -> None:
    text = refusal(["moe.num_experts=many", "moe.top_k=6"])
    assert text.startswith("1 problem")
    assert "moe.num_experts (many)" in text


def test_plain_engine_with_expert_parallel_is_allowed() -> None:
    load_config(["engine.kind=torch"], "tiny")


@pytest.mark.parametrize("expert", [1, 2])
def test_64_experts_on_two_ranks_work(expert: int) -> None:
    """A42: the number of experts is not the group size."""
    load_config(["moe.num_experts=64", f"parallel.expert={expert}"], "tiny")


def test_validate_changes_nothing_and_is_silent_about_a_good_configuration() -> None:
    config = load_config([], "quickstart")
    before = to_plain_dict(config)
    assert validate(config) == []
    assert to_plain_dict(config) == before


def test_every_number_is_checked_against_infinity() -> None:
    for path in leaf_paths():
        if annotation_at(path) is float:
            assert re.search(rf"{re.escape(path)} \(inf\) must be a finite number", refusal([f"{path}=inf"]))


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=40))
def test_any_text_as_an_override_is_accepted_or_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([text, "moe.top_k=9"], "tiny")
    assert caught.value.problems


@settings(max_examples=50, deadline=None)
@given(
    path=st.sampled_from([path for path in known_paths() if "." in path]),
    value=st.one_of(st.integers(), st.floats(), st.booleans(), st.text("0123456789.eE+-_axn", max_size=6)),
)
def test_any_value_for_any_setting_is_right_or_refused(path: str, value: object) -> None:
    try:
        config = load_config([f"{path}={value}"], "tiny")
    except ConfigError:
        return
    stored = value_at(config, path)
    assert not isinstance(stored, float) or math.isfinite(stored)
    assert validate(config) == []


# --- recipes from anywhere


def test_a_file_from_elsewhere_is_read_as_if_it_lay_in_the_recipe_folder(tmp_path: Path) -> None:
    text = "defaults:\n  - tiny\n  - override /backend: cpu\n  - _self_\nmoe:\n  top_k: 3\n"
    config = load_config(["optim.lr=1e-4"], write(tmp_path / "mine.yaml", text))
    assert (config.recipe, config.moe.top_k, config.optim.lr) == ("mine", 3, 1e-4)
    assert config.model.hidden_size == 64
    assert config.backend.device is DeviceKind.cpu


def test_a_file_from_elsewhere_may_have_the_name_of_one_of_ours(tmp_path: Path) -> None:
    assert load_config([], write(tmp_path / "tiny.yaml", "trainer: {max_steps: 77}\n")).trainer.max_steps == 77


def test_command_line_wins_over_the_recipes_choice_of_a_group(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", "defaults:\n  - override /backend: cuda\n")
    assert load_config(["backend=cpu"], recipe).backend.device is DeviceKind.cpu


def test_group_that_the_recipe_overrules_is_refused(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", "moe: {router: softmax}\n")
    assert re.search(
        r"moe \(bias_balanced\) says moe\.router=sigmoid, but the recipe", refusal(["moe=bias_balanced"], recipe)
    )


def test_values_of_an_option_not_chosen_leave_no_trace(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", "defaults:\n  - override /moe: bias_balanced\n")
    assert load_config(["moe=softmax"], recipe).moe.balance_scope is BalanceScope.global_batch


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("moe: {top_k: 010}\n", r"mine\.yaml:1 \(010\) is ambiguous: octal or decimal; write 10"),
        ("moe:\n  top_k: 1:30\n", r"mine\.yaml:2 \(1:30\) is ambiguous"),
        ("moe:\n  top_k: 0x10\n", r"mine\.yaml:2 \(0x10\) must be written in decimal"),
        ("moe:\n  top_k: !!int 2\n", r"mine\.yaml:2 .*is a YAML tag"),
        ("moe:\n  top_k: !!python/object/apply:os.system ['true']\n", r"python/object.*is a YAML tag"),
        ("moe: !mine {top_k: 2}\n", r"\(!mine\) is a YAML tag"),
        ("moe:\n  top_k: &k 2\n  num_experts: *k\n", r"mine\.yaml:2 \(k\) is an anchor or alias"),
        ("moe:\n  top_k: 2\n  top_k: 3\n", r"mine\.yaml:3 \(top_k\) is a duplicate key \(first on line 2\)"),
        ("moe: {top_k: 2}\nmoe: {top_k: 3}\n", r"mine\.yaml:2 \(moe\) is a duplicate key"),
        ("- moe\n", r"must be a mapping at the top"),
        ("moe\n", r"must be a mapping at the top"),
        ("moe: [1\n", r"is not YAML"),
        ("a: 1\n---\nb: 2\n", r"is a second document"),
        ("? {a: 1}\n: 2\n", r"must not use a mapping or list as a key"),
        ("a: " + "{a: " * 40 + "1" + "}" * 40 + "\n", r"is nested deeper than 16 levels"),
        ("a: " + "[" * 20000 + "\n", r"is not YAML|is nested deeper"),
        ("x: " + "y" * 70_000, r"\(70003 bytes\) must be at most 65536 bytes"),
        ("optim: {lr: .nan}\n", r"optim\.lr \(nan\) must be a finite number.*\[.*mine\.yaml\]"),
        ("optim: {lr: '1e-5'}\n", r"must be a number, not a quoted text"),
        ("optim: {lr: null}\n", r"optim\.lr \(null\) must not be null"),
        ("moe: {normalize_topk: 'no'}\n", r"must be true or false"),
        ("trainer: {resume: no}\n", r'trainer\.resume \(False\) must be a text; quote it'),
        ("run: {dir: 20240101}\n", r'run\.dir \(20240101\) must be a text; quote it: "20240101"'),
        ("run: {dir: ~}\nmoe: {top_kk: 1}\n", r"moe\.top_kk \(1\) is not a setting; did you mean moe\.top_k\?.*mine\.yaml"),
        ("moe.top_k: 2\n", r"moe\.top_k \(2\) must not be written with dots inside a file"),
        ("moe:\n  _target_: os.system\n", r"moe\._target_ \(os\.system\) is not a setting: YAML here never names code"),
        ("hydra: {run: {dir: x}}\n", r"hydra .*is not a setting"),
        ("recipe: ../other\n", r"recipe \(\.\./other\) must be the name of a recipe"),
        ("moe: 3\n", r"moe \(3\) is a section, not a value"),
        ("1: 2\n", r"1 \(2\) is not a setting"),
        ("data: {cache_dir: '${oc.env:HOME}'}\n", r"must not use \$\{\.\.\.\}"),
        ("data: {cache_dir: '${'}\n", r"cannot be read"),
        ("defaults: tiny\n", r"defaults \(tiny\) must be a list"),
        ("defaults: [nothing]\n", r"defaults \(nothing\) is not a line that a recipe's defaults list may hold"),
        ("defaults: [{override /backend: tpu}]\n", r"override /backend.*is not a line.*backend: auto, cpu, cuda, npu"),
        ("defaults: [{'override /backend': '${oc.env:HOME}'}]\n", r"is not a line that"),
        ("defaults: [mine]\n", r"defaults \(mine\) is not a line"),
    ],
)  # fmt: skip
def test_file_is_refused_before_anything_is_expanded(text: str, message: str, tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", text)
    started = time.process_time()
    assert re.search(message, refusal([], recipe))
    assert time.process_time() - started < 1


def test_alias_bomb_costs_nothing(tmp_path: Path) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    bomb = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in itertools.pairwise(names))
    recipe = write(tmp_path / "mine.yaml", bomb)
    started = time.process_time()
    assert re.search(r"mine\.yaml:1 \(a\) is an anchor or alias", refusal([], recipe))
    assert time.process_time() - started < 1


def test_problems_of_several_kinds_in_a_file_and_on_the_command_line_come_together(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", "moe: {top_kk: 1, num_experts: 3}\nparallel: {nproc: 4, expert: 4}\n")
    text = refusal(["optim.lr=fast"], recipe)
    assert all(
        part in text
        for part in ("moe.top_kk (1)", "parallel.expert (4) must be at most moe.num_experts (3)", "optim.lr (fast)")
    )


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("quikstart", r"recipe \(quikstart\) must be one of .*; did you mean quickstart\?"),
        ("", r"recipe \(\) must be one of"),
        ("/dev/zero", r"must be a \.yaml file"),
        ("/nowhere/x.yaml", r"/nowhere/x\.yaml must be readable \(No such file"),
        ("../a b.yaml", r"must be a \.yaml file whose name"),
    ],
)
def test_unknown_recipe_is_refused(recipe: str, message: str) -> None:
    assert re.search(message, refusal(["moe.router=x"], recipe))
    assert "moe.router" in refusal(["moe.router=x"], recipe)


def test_a_link_to_itself_is_no_recipe(tmp_path: Path) -> None:
    link = tmp_path / "loop.yaml"
    link.symlink_to(link)
    assert re.search(
        r"recipe \(.*loop\.yaml\) must be a file \(.*; give the path of the file itself", refusal([], str(link))
    )


def test_folder_and_binary_file_are_no_recipes(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert re.search(r"must be a regular file", refusal([], str(tmp_path / "folder.yaml")))
    assert re.search(r"must be UTF-8", refusal([], str(tmp_path / "binary.yaml")))


@pytest.mark.parametrize(
    "text", ["", "moe: {top_k: 2}\n", "recipe: [1]\n", "recipe: tiny\nmoe: {top_k: 99}\n", "a: &a 1\n"]
)
def test_saved_configuration_that_was_spoilt_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        from_resolved(Path(write(tmp_path / "config.yaml", text)))


# --- sweeps


def test_sweep_is_the_product_of_its_axes_in_order() -> None:
    points = expand_sweep(["optim.lr=1e-3,3e-3", "moe.top_k=choice(1,2)", "trainer.seed=range(0,2)", "backend=cpu"])
    assert len(points) == 8
    assert points[0] == ["optim.lr=0.001", "moe.top_k=1", "trainer.seed=0", "backend=cpu"]
    assert points[-1] == ["optim.lr=0.003", "moe.top_k=2", "trainer.seed=1", "backend=cpu"]
    assert [point[2] for point in points[:2]] == ["trainer.seed=0", "trainer.seed=1"]


def test_without_an_axis_there_is_one_run() -> None:
    assert expand_sweep(["moe.top_k=1"]) == [["moe.top_k=1"]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a=range(0,1e9)", r"-m must give 1 to 256 runs"),
        ("a=range(3,1)", r"-m must give 1 to 256 runs"),
        ("a=range(0,1,0)", r"is not a plain sweep"),
        ("a=glob(*)", r"is not a plain sweep"),
        ("a=interval(0,1)", r"is not a plain sweep"),
        ("a", r"is not an override"),
    ],
)
def test_sweep_without_sense_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand_sweep([override])


# --- cost


def test_loading_takes_under_a_second_of_cpu_and_no_torch() -> None:
    code = (
        "import sys, time\n"
        "from moe.config import load_config\n"
        "load_config(['moe.num_experts=16', 'optim.lr=1e-3'], 'quickstart')\n"
        "assert 'torch' not in sys.modules\n"
        "print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert float(done.stdout) < 1


def test_unknown_implementation_of_an_op_is_refused_with_the_nearest_name() -> None:
    assert re.search(
        r"ops\.grouped_gemm \(torch_nativ\) must be auto or one of ascend, reference, torch_native, triton; did you mean",
        refusal(["backend.ops.grouped_gemm=torch_nativ"]),
    )


def test_a_product_that_the_experts_do_not_use_is_refused() -> None:
    """Also at the op's own edge: tests/backends/test_expert_mlp.py."""
    settings = ["backend.ops.grouped_gemm=reference", "backend.ops.expert_mlp=chunked"]
    assert re.search(
        r"backend\.ops\.grouped_gemm \(reference\) has no effect with backend\.ops\.expert_mlp", refusal(settings)
    )
    load_config([settings[0], "backend.ops.expert_mlp=grouped"], "tiny")


def test_the_listed_implementations_are_those_of_the_ops_tables() -> None:
    import importlib

    from backends.config import OP_IMPLEMENTATIONS, OpsConfig

    assert set(OP_IMPLEMENTATIONS) == set(OpsConfig.__dataclass_fields__)
    for op, names in OP_IMPLEMENTATIONS.items():
        assert set(names) == set(importlib.import_module(f"backends.ops.{op}").IMPLEMENTATIONS)


def test_a_saved_configuration_is_a_recipe(tmp_path: Path) -> None:
    """config.yaml of a run, or what --cfg job printed, names its recipe; run again, it is the same configuration."""
    config = load_config(["optim.lr=2e-3", "moe.top_k=1", "moe.normalize_topk=false"], "tiny")
    saved = write(tmp_path / "config.yaml", to_yaml(config))
    assert load_config([], saved) == config
    assert load_config(["optim.lr=1e-3"], saved).optim.lr == 1e-3
    assert "recipe (../x) must be the name of a recipe" in refusal([], write(tmp_path / "bad.yaml", "recipe: ../x\n"))
