import json
import sys
from dataclasses import replace

import pytest

import lightning_cyclic
from lightning_cyclic.planner import to_json
from tests.planner.test_search import profile

from .test_main import run


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.json"
    path.write_text(to_json([profile()]))
    return "net.json"


def test_a_profile(capsys, file):
    status, out, err = run(
        capsys, "plan", file, "--workers", "2", "--memory", "1GB", "--bandwidth", "1Gbit/s"
    )
    assert (status, err) == (0, "")
    title, _, header, *_ = out.splitlines()
    assert title == "net: 8 samples per update, 2 workers of 1 GB, 50 µs latency, 125 MB/s"
    assert header.split()[:2] == ["preset", "w"]
    assert "1: CyclicStrategy(" in out or "1: PipelineStrategy(" in out


def test_all_options(capsys, file):
    status, out, _ = run(
        capsys, "plan", file, "--workers", "4", "--memory", "100MB", "--bandwidth", "10Gbit/s",
        "--latency", "1ms", "--batch", "32", "--preset", "gpipe", "--preset", "gpipe",
        "--activation-checkpointing", "always", "--state", "0", "--rows", "3", "--slack", "1",
        "--json",
    )  # fmt: skip
    plans = json.loads(out)
    assert status == 0
    assert len(plans) == 3
    assert {(plan["preset"], plan["remat"]) for plan in plans} == {("gpipe", True)}
    assert all(plan["num_microbatches"] * plan["micro_size"] == 32 for plan in plans)
    assert {worker["optimizer"] for plan in plans for worker in plan["memory"]} == {0}


def test_activations_on_a_disk(capsys, file):
    given = "--workers", "4", "--memory", "100MB", "--batch", "64", "--preset", "gpipe", "--json"
    plans = {}
    for how in ("never", "offload"):
        _, out, _ = run(capsys, "plan", file, *given, "--activation-checkpointing", how)
        plans[how] = next(x for x in json.loads(out) if x["replicas"] == 1)
    never, away = plans.values()
    assert 'activation_checkpointing="offload", disk="/tmp")' in away["strategy"]
    kept = [max(w["activations"] for w in plan["memory"]) for plan in (never, away)]
    assert kept[1] * 16 == kept[0] * 3  # three of sixteen micro-batches
    assert away["step_s"] >= never["step_s"]
    slow = "--activation-checkpointing", "offload", "--disk-bandwidth", "1kB/s"
    _, out, _ = run(capsys, "plan", file, *given, *slow)
    slower = next(x for x in json.loads(out) if x["replicas"] == 1)
    assert slower["step_s"] > away["step_s"]


def test_what_a_limit_has_no_room_for_runs_again(capsys, file):
    given = "plan", file, "--workers", "2", "--memory", "33MB", "--preset", "1f1b", "--batch", "16"
    found = {}
    for how in ("all", "both", "optimal"):
        _, out, _ = run(capsys, *given, "--json", "--activation-checkpointing", how)
        found[how] = json.loads(out)
    kinds = [{plan["checkpointing"] for plan in plans} for plans in found.values()]
    assert kinds == [{"never", "always", "optimal"}, {"never", "always"}, {"never", "optimal"}]
    chosen = next(plan for plan in found["all"] if plan["checkpointing"] == "optimal")
    assert 0 < sum(chosen["again_s"]) < 0.04  # seconds of a forward
    assert 'activation_checkpointing="optimal", memory_limit_bytes=' in chosen["strategy"]
    assert chosen["strategy"] in {plan["strategy"] for plan in found["optimal"]}
    _, text, _ = run(capsys, *given, "--activation-checkpointing", "optimal")
    assert any("some" in line.split() for line in text.splitlines())


def test_profiles_of_several_sizes(capsys, file, tmp_path):
    (tmp_path / "more.json").write_text(to_json([replace(profile(), micro_size=8)]))
    arguments = "--workers", "1", "--memory", "1GB", "--batch", "8", "--json"
    _, out, _ = run(capsys, "plan", file, "more.json", "--preset", "1f1b", *arguments)
    assert {plan["micro_size"] for plan in json.loads(out)} == {4, 8}


def test_a_plan_under_a_codec_and_what_codecs_would_gain(capsys, file):
    given = "plan", file, "--workers", "2", "--memory", "1GB", "--bandwidth", "10Mbit/s"
    out = run(capsys, *given, "--preset", "cyclic_dp")[1]
    assert "plan 1 waits for the network" in out
    assert 'CyclicStrategy("cyclic_dp", compress=Dct(density=0.01))' in out
    weights = '{"gradients": Dct(density=0.01), "weights": TopK(density=0.01)}'
    assert f'CyclicStrategy("cyclic_dp", compress={weights})' in out
    assert 'compress={"gradients": "int8", "weights": "int8"})' in out
    assert "compress" not in out.partition("plan 1 waits")[0]
    (first, *_) = json.loads(run(capsys, *given, "--preset", "cyclic_dp", "--json")[1])
    assert first["gains"]["ways"]
    assert all(x["strategy"] in out and x["risk"] in out for x in first["gains"]["ways"])
    coded = run(capsys, *given, "--compress", "topk:0.01", "--json")[1]
    plans = json.loads(coded)
    assert {p["preset"] for p in plans} <= {
        "cyclic_dp",
        "cyclic_dp_v1",
        "cyclic_zero",
        "lockstep_dp",
    }
    assert plans[0]["strategy"].endswith(", compress=TopK(density=0.01))")
    assert plans[0]["gains"] is None
    both = json.loads(run(capsys, *given, "--compress", "topk:0.01+topk:0.01", "--json")[1])
    assert {p["preset"] for p in both} <= {"cyclic_dp", "cyclic_dp_v1", "lockstep_dp"}
    assert both[0]["step_s"] < 0.5 * plans[0]["step_s"]
    slow = run(capsys, *given, "--compress", "topk:0.01", "--json", "--encode-bandwidth", "1MB/s")
    assert json.loads(slow[1])[0]["step_s"] > plans[0]["step_s"] + 1


@pytest.mark.parametrize(("is_terminal", "coloured"), [(True, True), (False, False)])
def test_colours_are_for_terminals(capsys, monkeypatch, file, is_terminal, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    _, out, _ = run(capsys, "plan", file, "--workers", "1", "--memory", "1GB", "--preset", "1f1b")
    assert ("\033[" in out) == coloured


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("net.json --memory 1GB", ["--workers"]),
        ("net.json --workers 2", ["--memory"]),
        ("net.json --workers 0 --memory 1GB", ["'0' does not fit; allowed: whole numbers from 1"]),
        ("net.json --workers two --memory 1GB", ["'two' does not fit"]),
        ("net.json --workers 2 --memory 1Gbit", ["'1Gbit' is not a number of bytes", "25MB"]),
        ("net.json --workers 2 --memory 0GB", ["memory_bytes=0", "above 0"]),
        ("net.json --workers 2 --memory 1GB --state -1", ["'-1' does not fit; allowed: numbers"]),
        ("net.json --workers 2 --memory 1GB --preset cdp", ["preset 'cdp' is unknown"]),
        (
            "net.json --workers 2 --memory 1MB",
            ["no plan fits", "1 MB", "give workers more memory"],
        ),
        (
            "net.json --workers 2 --memory 1GB --save-profile a.json",
            ["--save-profile, --data and --arg"],
        ),
        ("net.json --workers 2 --memory 1GB --save a.json", ["'a.json' is no YAML", "--save-pr"]),
        ("net.json net.json --workers 2 --memory 1GB", ["[4, 4] samples"]),
        ("a.py:A b.py:B --workers 2 --memory 1GB", ["more than one model"]),
        ("none.json --workers 2 --memory 1GB", ["none.json cannot be read"]),
        ("bad.json --workers 2 --memory 1GB", ["unit 0 of profile 'net' has no backward_s"]),
        ("negative.json --workers 2 --memory 1GB", ["forward_s=-1 of unit 0 ('h.0')"]),
        ("net.json --workers 2 --memory 1GB --batch 7", ["batch_size=7"]),
        (
            "net.json --workers 2 --memory 1GB --preset 1f1b --compress int8",
            ["compress=Int8() with preset '1f1b'", "of their own stages"],
        ),
        (
            "net.json --workers 2 --memory 1GB --sparsity 0.5 --compress int8",
            ['compress="int8" with sparsity=0.5', "leave sparsity out"],
        ),
        (
            "net.json --workers 2 --memory 1GB --sparsity 1",
            ["sparsity=1.0; allowed: from 0 to bel"],
        ),
    ],
)
def test_errors_are_one_line_and_exit_status_two(capsys, file, tmp_path, arguments, parts):
    bad = json.loads(to_json([profile()]))
    (tmp_path / "negative.json").write_text(
        json.dumps(bad | {"units": [bad["units"][0] | {"forward_s": -1}]})
    )
    del bad["units"][0]["backward_s"]
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    status, out, err = run(capsys, "plan", *arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith("lightning-cyclic: error: ")
    assert err.count("\n") == 1
    assert [part for part in parts if part not in err] == []


PIPELINE = "plan", "net.json", "--workers", "2", "--memory", "1GB", "--preset", "1f1b"
FILLED = (
    *PIPELINE[:4], "--memory", "33MB", *PIPELINE[6:], "--batch", "16",
    "--activation-checkpointing", "optimal",
)  # fmt: skip
CODED = (*PIPELINE[:-1], "cyclic_dp", "--compress", "int8+topk:0.01")


@pytest.mark.filterwarnings("ignore")  # of LightningCLI and jsonargparse
@pytest.mark.parametrize("given", [PIPELINE, CODED, FILLED])
def test_lightning_cli_takes_the_strategy_that_is_saved(capsys, file, monkeypatch, given):
    from lightning.pytorch import LightningModule
    from lightning.pytorch.cli import LightningCLI

    status, out, _ = run(capsys, *given, "--save", "strategy.yaml")
    assert status == 0
    assert "--trainer.strategy strategy.yaml" in out
    monkeypatch.setattr(sys, "argv", ["train.py"])
    options = ["accelerator=cpu", "devices=1", "logger=false", "enable_checkpointing=false"]
    args = ["--trainer.strategy", "strategy.yaml", *(f"--trainer.{x}" for x in options)]
    cli = LightningCLI(LightningModule, args=args, run=False, seed_everything_default=False)
    assert_is_printed(cli.trainer.strategy, out)


@pytest.mark.parametrize("given", [PIPELINE, CODED, FILLED])
def test_hydra_instantiates_the_strategy_that_is_saved(capsys, file, given):
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    status, out, _ = run(capsys, *given, "--save", "a.yaml", "--layout", "hydra")
    assert status == 0
    assert_is_printed(instantiate(OmegaConf.load("a.yaml")), out)


DOORS = ("CyclicStrategy", "PipelineStrategy", "TopK")


def assert_is_printed(strategy, out):
    """Compare a strategy with the line to paste."""
    line = next(line for line in out.splitlines() if line.startswith("1: "))
    pasted = eval(
        line.removeprefix("1: "), {name: getattr(lightning_cyclic, name) for name in DOORS}
    )
    assert strategy._chosen.lines == pasted._chosen.lines


def test_hosts_of_several_workers_may_be_groups(capsys, file):
    arguments = "--workers", "4", "--memory", "1GB", "--preset", "cyclic_dp_v1", "--json"
    slow = "--bandwidth", "1Mbit/s", "--latency", "1s"
    found = [
        json.loads(run(capsys, "plan", file, *arguments, *slow, *more)[1])[0]["strategy"]
        for more in ((), ("--workers-per-host", "2"))
    ]
    assert ["group_size=2" in text for text in found] == [False, True]


def test_pruned_training_below_break_even_is_said(capsys, file):
    arguments = "--workers", "4", "--memory", "30MB", "--preset", "1f1b", "--sparsity", "0.1"
    _, out, _ = run(capsys, "plan", file, *arguments, "--precision", "bf16-true")
    assert "of index" in out
    assert "sparsity=0.1 is below break-even: of bf16-true with f > 0.818 kept" in out
