"""Laws of loading: precedence, origins, every setting from file and command line, and all problems at once."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config.check import check_config
from trainer.config.load import CONFIGS, ConfigError, Loaded, load_config
from trainer.config.schema import Config, get, settings
from trainer.config.values import Setting, kind_of, write_value

SETTINGS = settings(Config)


def legal_value(setting: Setting) -> Any:
    """Return a legal value other than the default, made from what the setting declares."""
    kind, facts = kind_of(setting), setting.metadata
    if facts["choices"]:
        other = next((choice for choice in facts["choices"] if choice != setting.default), facts["choices"][0])
        return (other,) if kind.is_list else other
    if kind.element is bool:
        return not setting.default
    if kind.element is str:
        return ("tok_embeddings.*", "*.wq.*") if kind.is_list else "some text"
    low = next((facts[name] for name in ("above", "minimum") if facts[name] is not None), 0)
    value = low + 0.25 if kind.element is float else low + 2
    return kind.element(value if facts["maximum"] is None else min(value, facts["maximum"]))


def write(folder: Path, text: str, name: str = "run.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(*argv: str, **options: Any) -> Loaded:
    return load_config(argv, **options)


def problems_of(*argv: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, **options)
    return caught.value.problems


def only_problem_of(*argv: str) -> str:
    problems = problems_of(*argv)
    assert len(problems) == 1, problems
    return problems[0]


def test_every_setting_has_a_meaning_a_half_and_a_legal_default() -> None:
    assert len(SETTINGS) > 70
    for name, setting in SETTINGS.items():
        assert len(setting.metadata["doc"]) > 10, name
        assert setting.metadata["half"] in ("experiment", "machine"), name
        kind_of(setting)
        section, _, key = name.rpartition(".")
        value = write_value(setting.default)
        assert get(load(f"--{section}.{key}={_as_argument(setting.default)}").config, name) == setting.default, value


def _as_argument(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(str(element) for element in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_given_in_a_file_and_on_the_command_line(name: str, tmp_path: Path) -> None:
    value = legal_value(SETTINGS[name])
    assert value != SETTINGS[name].default
    section, _, key = name.rpartition(".")
    file = write(tmp_path, f"[{section}]\n{key} = {write_value(value)}\n")
    argument = _as_argument(value)
    spellings = [
        ["--config", file],
        [f"--{name}", argument],
        [f"--{name}={argument}"],
        [f"--{name.replace('_', '-')}", argument],
    ]
    for argv in spellings:
        loaded = load(*argv)
        assert get(loaded.config, name) == value, argv
        assert type(get(loaded.config, name)) is type(value)
        changed = [other for other in SETTINGS if loaded.origins[other] != "default"]
        assert changed == [name]


@pytest.mark.parametrize("name", [name for name, s in SETTINGS.items() if s.metadata["minimum"] is not None])
def test_every_minimum_holds(name: str) -> None:
    below = SETTINGS[name].metadata["minimum"] - 1
    problem = only_problem_of(f"--{name}", str(below))
    assert problem.startswith(f"{name} = {below} (command line)\nIt must be at least")


def test_command_line_wins_over_file_over_what_it_extends_over_default(tmp_path: Path) -> None:
    write(tmp_path, "[training]\nsteps = 1\nseq_len = 1\ngc_freq = 1\n", "base.toml")
    write(tmp_path, 'extends = "base.toml"\n[training]\nsteps = 2\nseq_len = 2\n', "middle.toml")
    file = write(tmp_path, '# a comment\nextends = "middle.toml"\n[training]\nsteps = 3\n')
    loaded = load("--config", file, "--training.local_batch_size", "4")
    training = loaded.config.training
    assert (training.gc_freq, training.seq_len, training.steps, training.local_batch_size) == (1, 2, 3, 4)
    assert loaded.origins["training.gc_freq"].endswith("base.toml:4")
    assert loaded.origins["training.seq_len"].endswith("middle.toml:4")
    assert loaded.origins["training.steps"].endswith("run.toml:4")
    assert loaded.origins["training.local_batch_size"] == "command line"
    assert loaded.origins["training.max_norm"] == "default"
    assert load("--config", file, "--training.steps=9").config.training.steps == 9


def test_extends_finds_a_name_in_the_folder_of_configs(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    write(configs, "[training]\nsteps = 7\n", "llama3_8b.toml")
    file = write(tmp_path, 'extends = "llama3_8b"\n')
    assert load("--config", file, folder=configs).config.training.steps == 7


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, 'extends = "other.toml"\n')
    write(tmp_path, '\nextends = "run.toml"\n', "other.toml")
    problem = only_problem_of("--config", file)
    assert "other.toml:2" in problem
    assert "extend each other" in problem


def test_an_optional_setting_can_be_unset_again(tmp_path: Path) -> None:
    write(tmp_path, "[lr_scheduler]\ntotal_steps = 5\n", "base.toml")
    file = write(tmp_path, 'extends = "base.toml"\n[lr_scheduler]\ntotal_steps = "none"\n')
    assert load("--config", file).config.lr_scheduler.total_steps is None
    base = str(tmp_path / "base.toml")
    assert load("--config", base, "--lr_scheduler.total_steps", "none").config.lr_scheduler.total_steps is None


def test_config_takes_a_path_or_a_name(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 7\n", "llama3_8b.toml")
    for argv in (["--config", file], ["--config=llama3_8b"], ["--job.config_file", "llama3_8b.toml"]):
        loaded = load(*argv, folder=tmp_path)
        assert loaded.config.training.steps == 7
        assert loaded.origins["training.steps"].endswith("llama3_8b.toml:2")
    assert load("--job.config-file", file).config.training.steps == 7


def test_a_missing_config_lists_the_names_nearest_first(tmp_path: Path) -> None:
    for name in ("llama2_7b", "llama3_8b", "a_first"):
        write(tmp_path, "", f"{name}.toml")
    (problem,) = problems_of("--config", "llama3-8b.toml", folder=tmp_path)
    assert problem.startswith("--config llama3-8b.toml\n")
    assert "llama3_8b, llama2_7b and a_first" in problem


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--compile.enable"], True),
        (["--compile.enable", "true"], True),
        (["--compile.enable=True"], True),
        (["--compile.enable", "--training.steps=3"], True),
        (["--compile.enable", "false"], False),
        (["--compile.enable=False"], False),
        (["--compile.no_enable"], False),
        (["--compile.no-enable", "--training.steps=3"], False),
    ],
)
def test_switches_take_every_usual_form(argv: list[str], value: bool) -> None:
    opposite = "--compile.no_enable" if value else "--compile.enable"
    assert load(opposite, *argv).config.compile.enable is value


@pytest.mark.parametrize("text", ["a,b", "a, b", '["a","b"]', "['a', 'b']", "[a,b]"])
def test_lists_are_one_token(text: str) -> None:
    assert load("--optimizer.no_decay", text).config.optimizer.no_decay == ("a", "b")


@pytest.mark.parametrize("text", ["", "[]"])
def test_lists_can_be_empty(text: str) -> None:
    assert load(f"--optimizer.no_decay={text}").config.optimizer.no_decay == ()


@pytest.mark.parametrize("argv", [["--training.global_batch_size", "-1"], ["--training.global_batch_size=-1"]])
def test_values_may_begin_with_a_minus(argv: list[str]) -> None:
    assert load("--training.global_batch_size=8", *argv).config.training.global_batch_size == -1
    assert load("--job.description=--x").config.job.description == "--x"


def test_flags_of_the_doors() -> None:
    flags = load("--print-config", "--dry_run", "--world-size", "8").flags
    assert (flags.print_config, flags.dry_run, flags.world_size, flags.help) == (True, True, 8, False)
    assert load("--job.print_config").flags.print_config
    for argv in (["-h"], ["--help", "--training.stps", "x", "--config"]):
        assert load(*argv).flags.help


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--training.step", "3"], ["training.step = 3 (command line)", "training.steps"]),
        (["--training.lr", "3"], ["optimizer.lr"]),
        (["--steps", "3"], ["training.steps"]),
        (["--print-confg"], ["--print-config"]),
        (["--model.tokeniser_path=x"], ["model.tokenizer_path"]),
        (["--compile.no_enabel"], ["compile.enable"]),
        (["--training", "3"], ["section", "--training.KEY"]),
        (["--training.steps"], ["missing", "--training.steps VALUE"]),
        (["--training.steps", "--compile.enable"], ["missing"]),
        (["--training.steps", "1e4"], ["whole number", "10000"]),
        (["--compile.enable", "maybe"], ["compile.enable = maybe", "true or false"]),
        (["--compile.backend", "inducter"], ['"inductor" or "aot_eager"', 'Did you mean "inductor"?']),
        (["--optimizer.implementation", "foreach"], ["fused kernels", "finite", 'only "fused" is accepted']),
        (["--training.dataset", "c4"], ["'en/c4-train.0000*", "hf download allenai/c4", "--training.dataset jsonl"]),
        (["--training.dataset=c4_validation"], ["'en/c4-validation.0000*"]),
        (["--compile.components", "model,los"], ["los", 'Did you mean "loss"?']),
        (["--optimizer.lr", "nan"], ["finite"]),
        (["--optimizer.beta1", "1.5"], ["at most 1"]),
        (["--training.max_norm", "0"], ["above 0"]),
        (["--training.seq_len", "none"], ["whole number"]),
        (["--job.description=\udcff"], ["Unicode"]),
        (["--world-size", "0"], ["at least 1"]),
        (["--world-size", "9" * 5000], ["at least 1"]),
        (["--config", "9" * 5000], ["No such file"]),
        (["--debug.seed", "9" * 5000], ["whole number"]),
        (["--dry-run=maybe"], ["true or false"]),
        (["--config"], ["--config FILE"]),
        (["llama3_8b.toml"], ["--config llama3_8b.toml"]),
        (["-x"], ["-x"]),
        (["--training.seed", "1", "--debug.seed", "2"], ["debug.seed = 2", "training.seed = 1"]),
    ],
)
def test_a_wrong_argument_is_one_problem_that_names_the_way_out(argv: list[str], parts: list[str]) -> None:
    problem = only_problem_of(*argv)
    for part in parts:
        assert part in problem


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('[training]\nsteps = "3"', ["run.toml:2", "a whole number, not text. Write 3."]),
        ("[training]\nsteps = true", ["true or false"]),
        ("[training]\nsteps = 3.0", ["fraction. Write 3."]),
        ("[training]\nsteps = 1979-05-27", ["date"]),
        ("[training]\nsteps = [3]", ["a list"]),
        ("[training]\nsteps = 0xffffffffffffffffffff", ["64 bits"]),
        ("[training]\nsteps = 0x" + "f" * 5000, ["64 bits"]),
        ("[training]\nmax_norm = 0x" + "f" * 5000, ["a number"]),
        ("[training]\nmax_norm = inf", ["finite"]),
        ("[optimizer]\nlr = true", ["a number, not true or false"]),
        ("[compile]\nenable = 1", ["Write true."]),
        ("[activation_checkpoint]\nselective_ac_option = 2", ['in quotes: "2"']),
        ("[job]\ndescription = 3", ['in quotes: "3"']),
        ('[optimizer]\nno_decay = "a"', ['Write ["a"].']),
        ("[optimizer]\nno_decay = [1]", ["a list of texts"]),
        ("[optimzer]\nlr = 1.0\neps = 1.0", ["[optimzer] with lr and eps", "[optimizer]"]),
        ("[optimzer]", ["[optimizer]"]),
        ("training = 3", ["This is a section"]),
        ("[training.steps]\nx = 1", ["training.steps"]),
        ("[model]\nargs = {dims = 3}", ["model.args.dims", "run.toml:2", "model.args.dim?"]),
        ("extends = 3", ["extends"]),
        ('extends = "nothing.toml"', ["No such file"]),
        ("x = True", ["run.toml:1", "not TOML", "x = True"]),
        ('[job]\ndescription = "', ["not TOML"]),
        ("[a]\n[a]", ["run.toml:2", "not TOML"]),
    ],
)
def test_a_wrong_line_is_one_problem_that_names_file_and_way_out(line: str, parts: list[str], tmp_path: Path) -> None:
    problem = only_problem_of("--config", write(tmp_path, line))
    for part in ["run.toml", *parts]:
        assert part in problem


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    assert "UTF-8" in only_problem_of("--config", str(path))
    assert "folder" in only_problem_of("--config", str(tmp_path))


def test_a_whole_number_is_a_number(tmp_path: Path) -> None:
    lr = load("--config", write(tmp_path, "[optimizer]\nlr = 1\n")).config.optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    file = write(
        tmp_path, '[training]\nstep = 3\nseq_len = "x"\n[optimizer]\nname = "Adm"\n[model]\nconverters = ["mx"]'
    )
    argv = ["--config", file, "--training.gc_freq", "0", "--foo", "1", "stray"]

    def check(config: Config, flags: Any) -> list[str]:
        return ["debug.seed = 0\nIt is impossible with this mesh."]

    problems = problems_of(*argv, check=check)
    wanted = ["step = 3", "seq_len", "optimizer.name", "model.converters", "gc_freq", "foo", "stray", "mesh"]
    assert len(problems) == len(wanted)
    for part in wanted:
        assert any(part in problem for problem in problems), part
    text = str(ConfigError(problems))
    assert text.startswith("The configuration has 8 problems:\n")
    assert all(problem.splitlines()[0] in text for problem in problems)


def test_problems_between_settings_name_origins_and_spare_settings_already_wrong(tmp_path: Path) -> None:
    def check(config: Config, flags: Any) -> list[str]:
        return ["training.steps = 1, lr_scheduler.total_steps = 2\nToo long."]

    problem = problems_of("--training.steps", "1", check=check)[0]
    assert problem.endswith("Given: training.steps (command line).")
    for argv in (["--training.step", "1"], ["--training.steps", "x"], ["--training.steps"]):
        assert not any("Too long" in problem for problem in problems_of(*argv, check=check)), argv
    file = write(tmp_path, "[trainig]\nsteps = 1\n")
    assert len(problems_of("--config", file, check=check)) == 1
    assert len(problems_of("--config", "nothing", folder=tmp_path, check=check)) == 1


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    ranks = 4 if path.stem == "llama3_debug" else 64
    loaded = load("--config", path.stem, check=lambda config, flags: check_config(config, ranks))
    assert any(origin.startswith(f"configs/{path.name}:") for origin in loaded.origins.values())


def test_loading_needs_no_torch_and_little_time() -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from trainer.config.check import check_config\n"
        "from trainer.config.load import load_config\n"
        "from trainer.config.text import format_help\n"
        "assert load_config(['--help']).flags.help and len(format_help()) > 5000\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONFIGS.parent, check=True)
    assert float(done.stdout) < 1.0


def test_the_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().config.training.steps = 3  # type: ignore[misc]
