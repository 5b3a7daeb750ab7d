"""What README and docs/ say is so: commands run, code runs, links and names exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir

from benchmarks.__main__ import INDEX
from lightning_cyclic import PRESETS, CyclicStrategy, PipelineStrategy
from lightning_cyclic import __all__ as public_names
from lightning_cyclic.cli.main import _parser, main
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plan.presets import AXES
from tests.harness.commands import Command, Commands

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
MOST_LINES = {"README.md": 120, "figures.md": 250}  # figures: tables that were measured
GENERATED = ("api.md", "conformance.md")
CODE = (".py", ".yaml", ".sbatch", ".sh")
DOORS = (CyclicStrategy, PipelineStrategy)
# what a reader has of their own before they paste the lines of README
BEFORE = """\
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch import nn


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 2))
        self.example_input_array = torch.zeros(8, 32)

    def on_train_epoch_end(self):
        self.trainer.should_stop = True  # a thousand epochs are too many here


model, datamodule = Model(), BoringDataModule()
"""
WIDE = """\
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))


model, datamodule = Model(), BoringDataModule()
"""
BEHIND = """
assert trainer.strategy.plan.preset == "cyclic_dp", trainer.strategy.plan
assert trainer.global_step == 32, trainer.global_step
import sys
sys.stdout.write(f"rank {trainer.global_rank} has trained" + chr(10))  # in one piece
"""


class Block(NamedTuple):
    """Hold a block of code of a page."""

    page: str
    language: str
    text: str


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fenced(page: Path) -> list[Block]:
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", read(page), flags=re.M | re.S)
    return [Block(page.name, language, text) for language, text in found]


BLOCKS = [block for page in PAGES for block in fenced(page)]


def commands(program: str) -> Iterator[tuple[str, str]]:
    """Yield page and arguments of each command for a program, long lines put together."""
    for block in BLOCKS:
        if block.language not in ("bash", "console"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            typed = line.removeprefix("$ ")
            if block.language == "console" and typed == line:
                continue  # what the command printed
            for start in (program, f"python {program}", f".venv/bin/python {program}"):
                if f"{typed.strip()} ".startswith(f"{start} "):
                    yield block.page, typed.strip().removeprefix(start).partition(" #")[0].strip()


def cyclic_commands(*pages: str) -> list[str]:
    found = [text for page, text in commands("lightning-cyclic") if page in (pages or {page})]
    return list(dict.fromkeys(found))


# ---------------------------------------------------------------------- README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_short(page):
    if page.name not in GENERATED:
        assert len(read(page).splitlines()) <= MOST_LINES.get(page.name, 200)


@pytest.mark.multi
def test_python_of_readme_trains(tmp_path):
    (code,) = [block.text for block in fenced(README) if block.language == "python"]
    assert len([line for line in code.splitlines() if line.strip()]) == 4
    script = tmp_path / "script.py"
    script.write_text(BEFORE + code + BEHIND)
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    command = Command(
        arguments=[sys.executable, str(script)], is_forked=True, env=env, folder=tmp_path
    )
    with Commands({"readme": command}) as running:
        output = running.output("readme")
    assert "rank 0 has trained" in output
    assert "rank 1 has trained" in output


@pytest.mark.parametrize("text", cyclic_commands("README.md"))
def test_command_of_readme_runs(text, tmp_path, monkeypatch, capsys):
    arguments = shlex.split(text)
    if arguments[0] == "selftest":  # half a minute: tests/cli/test_selftest.py runs it
        assert _parser().parse_args(arguments).preset == []
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("model.py").write_text(BEFORE)
    status = main(arguments)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    assert len(out.splitlines()) >= 5


def test_readme_runs_every_command_there_is():
    (subcommands,) = [a.choices for a in _parser()._actions if isinstance(a.choices, dict)]
    assert {text.split()[0] for text in cyclic_commands("README.md")} == set(subcommands)


# ---------------------------------------------------------------------- tutorials


def model() -> str:
    """Return the module that the tutorials train."""
    return next(b.text for b in fenced(DOCS / "index.md") if b.text.startswith("# model.py"))


def tutorial(page: str) -> tuple[str, dict[str, list[str]]]:
    """Return a page's script, and what it shows for each of its arguments."""
    blocks = fenced(DOCS / page)
    (script,) = [b.text for b in blocks if b.text.startswith("# train.py\n")]
    shown = {}
    for block in blocks:
        if block.text.startswith("$ python train.py"):
            typed, _, printed = block.text.partition("\n")
            shown[typed.split()[-1]] = printed.splitlines()
    return script, shown


TUTORIALS = ["slow_network.md", "big_model.md", "one_device.md", "sparse_states.md"]


@pytest.mark.multi
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", TUTORIALS)
def test_tutorial_prints_what_it_shows(page, tmp_path):
    script, shown = tutorial(page)
    assert len(shown) >= 2
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    runs = {}
    for argument in shown:
        folder = tmp_path / argument
        folder.mkdir()
        (folder / "model.py").write_text(model())
        (folder / "train.py").write_text(script)
        arguments = [sys.executable, "train.py", argument]
        runs[argument] = Command(arguments=arguments, env=env, folder=folder, limit_s=350)
    with Commands(runs) as running:
        for argument, lines in shown.items():
            printed = [masked(line) for line in running.output(argument).splitlines()]
            assert [line for line in map(masked, lines) if line not in printed] == []


def masked(line: str) -> str:
    """Leave out what differs with the processor: digits, and how many."""
    return re.sub(r"\d+(?:[.,]\d+)+|\d+(?= MiB)", "0", line).strip()


def test_bits_of_the_pipeline_tutorial_are_those_of_one_device():
    _, shown = tutorial("big_model.md")
    assert shown["plain"][-1] in shown["1f1b"]


@pytest.mark.filterwarnings("ignore")  # what Lightning says about small runs
def test_python_of_sparse_states_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = [b.text for b in fenced(DOCS / "sparse_states.md") if b.language == "python"]
    names: dict[str, Any] = {}
    for code in blocks:
        if not code.startswith("# train.py"):
            exec(WIDE, names)  # a new model for each
            exec(code, names)
    masks = names["plugin"].masks
    kept, numel = (sum(map(f, masks.values())) for f in (torch.sum, torch.numel))
    assert int(kept) == numel - round(0.9 * numel)
    assert list(tmp_path.glob("*.pt"))


# ---------------------------------------------------------------------- commands in docs/


@pytest.mark.parametrize("text", cyclic_commands())
def test_command_is_understood(text):
    _parser().parse_args(shlex.split(text))  # PlanError, if it is not


def test_benchmarks_that_pages_name_exist():
    named = {n for page in PAGES for n in re.findall(r"python -m benchmarks (\w+)", read(page))}
    assert len(named) > 5
    assert named - {"NAME"} <= INDEX.keys()


SHOWN = [
    (text.partition("\n")[0].removeprefix("$ lightning-cyclic "), text.partition("\n")[2])
    for _, language, text in BLOCKS
    if language == "console" and re.match(r"\$ lightning-cyclic (draw|simulate) ", text)
]


@pytest.mark.parametrize(("text", "shown"), SHOWN)
def test_output_is_what_the_page_shows(text, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(shlex.split(text)) == 0
    assert lines_of(capsys.readouterr().out) == lines_of(shown)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


RECIPES = [
    text
    for program in ("recipes/train.py", "recipes/evaluate.py")
    for _, text in commands(program)
    if "-m" not in shlex.split(text) and "=NAME" not in text  # sweeps and blanks
]


@pytest.mark.parametrize("text", dict.fromkeys(RECIPES))
def test_recipe_composes(text):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        compose("train", shlex.split(text))


def test_recipes_page_names_every_choice():
    text = read(DOCS / "recipes.md")
    names = [p.stem for p in (ROOT / "conf").glob("*/*.yaml") if not p.stem.startswith("_")]
    assert len(names) > 40
    assert [name for name in names if f"`{name}`" not in text] == []


# ---------------------------------------------------------------------- links and paths


def prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", read(page), flags=re.M | re.S)


LINKS = [
    (page, target)
    for page in PAGES
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))
    if not re.match(r"https?://", target)
]


@pytest.mark.parametrize(
    ("page", "target"), LINKS, ids=lambda x: x.name if isinstance(x, Path) else x
)
def test_link_points_at_something(page, target):
    path, _, anchor = target.partition("#")
    linked = page.parent / path if path else page
    assert linked.exists()
    if anchor:
        assert anchor in anchors(linked)


@cache
def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles}


def test_paths_in_backticks_exist():
    folders = "lightning_cyclic|benchmarks|tests|conf|recipes|docs"
    named = {
        (page.name, path)
        for page in PAGES
        for path in re.findall(rf"`((?:{folders})/[\w./]*)`", prose(page))
    }
    assert len(named) > 10
    assert sorted((page, path) for page, path in named if not (ROOT / path).exists()) == []


def test_every_page_is_in_the_menu():
    config = yaml.safe_load(read(ROOT / "mkdocs.yml"))
    assert sorted(menu(config["nav"])) == sorted(page.name for page in DOCS.glob("*.md"))


def menu(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for each in below for page in menu(each)]


# ---------------------------------------------------------------------- names


def test_every_preset_is_documented():
    rows = re.findall(r"^\| `(\w+)` \|", read(DOCS / "options.md"), flags=re.M)
    assert [name for name in PRESETS if name not in rows] == []


def test_values_of_axes_are_documented():
    text = read(DOCS / "options.md")
    assert [v for axis in AXES.values() for v in axis if f"`{v}`" not in text] == []


def test_python_of_compression_runs(capsys):
    blocks = [b.text for b in fenced(DOCS / "compression.md") if b.language == "python"]
    of_dct, of_both, of_activations, of_signs = blocks
    gains = fenced(DOCS / "codec_gains.md")
    simulated = [b.text for b in gains if b.language == "python"]
    names: dict[str, Any] = {}
    exec(of_dct, names)
    assert names["strategy"]._chosen.codec == names["Dct"](density=0.01, threshold_every=1000)
    exec(of_both, names)
    assert names["strategy"]._chosen.weight_codec == names["TopK"](density=0.01)
    exec(of_signs, names)
    codec, state = names["strategy"]._chosen.codec, {}
    grad, like = torch.tensor([1.0, -5.0, 3.0]), torch.empty(3, device="meta")
    assert codec.decode(codec.encode(grad, state), like).tolist() == [3, -3, 3]
    assert state["left"].tolist() == [-2, -2, 0]
    exec(of_activations, names)
    assert names["strategy"]._chosen.compress == {"activations": names["TopK"](density=0.025)}
    for code in simulated:
        exec(code, names)
        (said,) = re.findall(r"# (.*)$", code, flags=re.M)
        assert capsys.readouterr().out.strip() == said
    assert len(simulated) == 2


def test_python_of_options_makes_a_strategy():
    (code,) = [b.text for b in fenced(DOCS / "options.md") if b.language == "python"]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["strategy"].preset == "cyclic_mp"


OPTIONS = re.findall(
    r"^\| `(\w+)` \| ([^|]+) \| (both|`\w+`) \|", read(DOCS / "options.md"), flags=re.M
)


def test_options_are_those_of_the_strategies_each_once():
    listed = {name: of for name, _, of in OPTIONS} | {"inherited": "both"}
    assert len(listed) == len(OPTIONS) + 1
    assert listed.pop("timeout") == "both"  # of DDPStrategy
    doors = {f"`{door.__name__}`": set(signature(door).parameters) for door in DOORS}
    everywhere = set.intersection(*doors.values())
    assert {name for name, of in listed.items() if of == "both"} == everywhere
    for door, options in doors.items():
        assert {name for name, of in listed.items() if of == door} == options - everywhere


@pytest.mark.parametrize(("name", "shown", "_of"), [row for row in OPTIONS if row[0] != "timeout"])
def test_default_of_option(name, shown, _of):
    parameters = [signature(door).parameters for door in DOORS]
    defaults = [each[name].default for each in parameters if name in each]
    assert shown == ", ".join(dict.fromkeys(f"`{quoted(value)}`" for value in defaults))


def quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def test_readme_names_the_presets_that_train():
    named = set(re.findall(r"`(\w+)`", read(README)))
    assert named >= PRESETS.keys()


def test_letters_of_messages_are_in_the_glossary():
    rows = re.findall(r"^\| ([A-Z](?:, [A-Z])*) \|", read(DOCS / "contributing.md"), flags=re.M)
    assert sorted(x for row in rows for x in row.split(", ")) == sorted(Payload)


def test_every_error_is_documented():
    page, api = read(DOCS / "limits.md"), read(DOCS / "api.md")
    errors = [name for name in public_names if name.endswith("Error")]
    assert len(errors) == 9
    assert [name for name in errors if f"| `{name}` |" not in page] == []
    assert [name for name in errors if f"::: lightning_cyclic.errors.{name}\n" not in api] == []


def test_pages_that_the_package_names_exist():
    sources = [p for f in ("lightning_cyclic", "recipes", "benchmarks", ".ci", "conf")
               for p in (ROOT / f).rglob("*") if p.is_file() and p.suffix in CODE]  # fmt: skip
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in sources
        for page in re.findall(r"\bdocs/([\w/]+\.md)", read(path))
    }
    assert named
    assert sorted((path, page) for path, page in named if not (DOCS / page).exists()) == []


# ---------------------------------------------------------------------- pictures


def pictures() -> Any:
    spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_of_the_plans(tmp_path):
    pictures().main(tmp_path)
    made = {path.name: read(path) for path in tmp_path.iterdir()}
    assert len(made) == 7
    stale = [name for name, text in made.items() if read(DOCS / "images" / name) != text]
    assert stale == [], "run: python docs/make_pictures.py"


def test_every_picture_is_shown():
    shown = {name for page in PAGES for name in re.findall(r"images/([\w.]+)\)", read(page))}
    assert shown == {path.name for path in (DOCS / "images").iterdir()}
