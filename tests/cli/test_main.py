import json
import os
import re
import subprocess
import sys

import pytest

from lightning_cyclic.cli.main import main

DRAWN = """\
slot     0     1     2     3     4     5     6     7     8     9
w0   0F0@0 1F0@0 1B0@0 0B0@0 0F0@0 1F0@1 1B0@1 0B0@0     .     .
w1       .     . 0F1@0 1F1@0 1B1@0 0B1@0 0F1@1 1F1@1 1B1@1 0B1@1
"""

WIDE = """\
slot     0     1     2     3     4     5
w0   0F0@0 0F2@0     . 0B0@0     . 0B2@0
w1       . 1F0@0 1B0@0 1F2@0 1B2@0     .
w2   0F1@0 0F3@0     . 0B1@0     . 0B3@0
w3       . 1F1@0 1B1@0 1F3@0 1B3@0     .
"""


@pytest.fixture(autouse=True)
def _terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys, *arguments):
    """Run the command line; return its exit status, stdout and stderr."""
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_draw(capsys):
    assert run(capsys, "draw", "cyclic_dp", "--workers", "2") == (0, DRAWN, "")


def test_draw_is_as_wide_as_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    narrow = run(capsys, "draw", "cyclic_dp", "--workers", "2")[1]
    assert narrow.splitlines()[0] == "slot     0     1     2 ..."
    whole = run(capsys, "draw", "cyclic_dp", "--workers", "2", "--columns", "0")[1]
    assert whole == DRAWN


def test_draw_into_a_file(capsys, tmp_path):
    path = tmp_path / "timetable.svg"
    arguments = "draw", "cyclic_dp", "--workers", "2", "--from", "1", "--out", str(path)
    assert run(capsys, *arguments) == (0, f"wrote {path}\n", "")
    text = path.read_text()
    assert "cyclic_dp: 2 workers" in text
    assert ">F1<" in text
    assert text.count(">F0<") == 3  # that of worker 0 in slot 0 is not shown


KEPT = """\
slot      0      1    2      3      4     5
w0    14.5k    25k  25k    15k  14.5k  4.5k
w1       4k  14.5k   4k  14.5k     4k    4k

"""


def test_draw_memory(capsys, tmp_path):
    given = "draw 1f1b --workers 2 --steps 1 --memory --model-bytes 2kB --activation-bytes 20kB"
    status, out, err = run(capsys, *given.split(), "--cut-bytes", "500")
    assert (status, err) == (0, "")
    assert out.startswith(KEPT)
    kept = "activations 20 kB, optimizer 2 kB, parameters 1 kB, gradients 1 kB, inputs 1 kB"
    assert f"w0: 25 kB at most, in slot 1: {kept}\n" in out
    _, less, _ = run(capsys, *given.split(), "--cut-bytes", "500", "--remat", "--state", "0")
    assert "w0: 13 kB at most" in less
    four = given.replace("--workers 2", "--workers 4 --num-microbatches 8")
    _, less, _ = run(capsys, *four.split(), "--offload")
    assert "w0: 17 kB at most, in slot 3: activations 15 kB" in less  # of three micro-batches
    path = tmp_path / "kept.svg"
    assert run(capsys, *given.split(), "--out", str(path)) == (0, f"wrote {path}\n", "")
    assert "the most that the plan counts" in path.read_text()


@pytest.mark.parametrize(
    ("no_color", "is_terminal", "coloured"),
    [("", True, True), ("1", True, False), ("", False, False)],
)
def test_colours_are_for_terminals_whose_user_wants_them(
    capsys, monkeypatch, no_color, is_terminal, coloured
):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    for command in ("draw", "simulate"):
        _, out, _ = run(capsys, command, "cyclic_dp", "--workers", "2")
        assert ("\033[" in out) == coloured


def test_all_numbers_of_a_plan(capsys):
    status, out, _ = run(
        capsys, "draw", "cyclic_dp", "--workers", "2", "--stages", "4", "--slack", "100",
        "--steps", "3", "--num-microbatches", "2", "--columns", "0",
    )  # fmt: skip
    assert status == 0
    assert "3F1@1" in out  # of step 2: so much slack delays every read
    assert "@2" not in out


def test_replicas_of_a_pipeline(capsys):
    arguments = "1f1b", "--workers", "4", "--replicas", "2", "--steps", "1"
    status, out, _ = run(capsys, "draw", *arguments)
    assert (status, out) == (0, WIDE)
    status, out, _ = run(capsys, "simulate", *arguments[:-1], "6", "--json")
    got = json.loads(out)
    assert (got["num_stages"], got["plan"]["num_microbatches"]) == (2, 4)


def test_simulate_prints_a_table(capsys):
    status, out, err = run(capsys, "simulate", "cyclic_dp", "--workers", "4")
    assert (status, err) == (0, "")
    assert out.startswith("4 workers, 4 stages, 50 µs latency, 1.25 GB/s\n")
    assert "100 MB of parameters, 25 MB per stage; 0 B of activations per cut" in out
    assert "100 ms per micro-batch, 33.33 ms forward and 66.67 ms backward (2 times" in out
    *rows, last = out.splitlines()[7:]
    assert last.startswith("lockstep: ")
    rows = [line.split("  ")[1] for line in rows]
    assert rows == [
        "time per step", "micro-batches per step", "micro-batches per second", "bubble",
        "bytes sent per worker and step", "messages sent per worker and step",
        "NCCL communicators of a worker, if GPUs", "weight versions read",
        "stage-activations kept per worker", "stage-activations kept by all workers",
        "memory of the worker with the most", "", "", "", "", "", "speed",
    ]  # fmt: skip
    kinds = [line.split("  ")[3] for line in out.splitlines() if line.startswith("      ")][1:]
    assert kinds == [
        "parameters", "further versions of them", "gradients", "optimizer state",
        "gradients in buffers of messages",
    ]  # fmt: skip


def test_simulate_prints_json_of_the_given_cluster(capsys):
    status, out, _ = run(
        capsys, "simulate", "cyclic_dp", "--workers", "16", "--model-bytes", "300MB",
        "--step-s", "1", "--latency-s", "2ms", "--bandwidth", "8Gbit/s", "--bucket-bytes", "0",
        "--cut-bytes", "5kB", "--json",
    )  # fmt: skip
    got = json.loads(out)
    assert status == 0
    assert got["network"] == {"latency_s": 0.002, "bandwidth_bytes_per_s": 1e9}
    assert got["plan"]["step_s"] == pytest.approx(1.00, abs=0.01)
    assert got["lockstep"]["step_s"] == pytest.approx(1.90, abs=0.01)
    costs = got["costs"]
    assert sum(costs["forward_s"]) == pytest.approx(1 / 3)
    assert (sum(costs["param_bytes"]), costs["cut_bytes"]) == (3e8, [5e3] * 16)


@pytest.mark.parametrize(
    ("codec", "of_a_stage"),
    [("bf16", 5e6), ("int8", 9766 * 260), ("topk:0.01", 2e5), ("powersgd:4", 85_856)],
)
def test_simulate_counts_what_a_codec_sends(capsys, codec, of_a_stage):
    given = "simulate", "cyclic_dp", "--workers", "8", "--bandwidth", "100Mbit/s", "--json"
    size = "--model-bytes", "80MB"
    plain = json.loads(run(capsys, *given, *size)[1])
    coded = json.loads(run(capsys, *given, *size, "--compress", codec)[1])
    assert coded["costs"]["sent_sum_bytes"] == [of_a_stage] * 8
    assert coded["costs"]["param_bytes"] == plain["costs"]["param_bytes"] == [1e7] * 8
    assert coded["plan"]["step_s"] < 0.9 * plain["plan"]["step_s"]
    assert coded["lockstep"] == plain["lockstep"]


@pytest.mark.parametrize(
    ("codec", "of_gradients", "of_weights"),
    [("dct:0.01+topk:0.01", 2e5, 2e5), ("bf16+int8", 5e6, 9766 * 260), ("+topk:0.01", 1e7, 2e5)],
)
def test_simulate_counts_what_a_codec_sends_of_new_weights(
    capsys, codec, of_gradients, of_weights
):
    given = "simulate", "cyclic_dp", "--workers", "8", "--bandwidth", "100Mbit/s", "--json"
    size, fast = ("--model-bytes", "80MB"), ("--encode-bandwidth", "1TB/s")
    gradients = codec.partition("+")[0]
    alone = ["--compress", gradients, *fast] if gradients else []
    without = json.loads(run(capsys, *given, *size, *alone)[1])
    coded = json.loads(run(capsys, *given, *size, "--compress", codec, *fast)[1])
    assert coded["costs"]["sent_sum_bytes"] == [of_gradients] * 8
    assert coded["costs"]["sent_param_bytes"] == [of_weights] * 8
    assert without["costs"]["sent_param_bytes"] == without["costs"]["param_bytes"] == [1e7] * 8
    assert coded["plan"]["step_s"] < 0.7 * without["plan"]["step_s"]
    assert coded["lockstep"] == without["lockstep"]


def test_new_weights_are_encoded_in_the_update_of_their_owner(capsys):
    given = "simulate", "lockstep_dp", "--workers", "2", "--compress", "+int8", "--json"
    slow = json.loads(run(capsys, *given, "--encode-bandwidth", "10MB/s")[1])
    assert slow["costs"]["publish_s"] == [10.0, 10.0]  # 50 MB, encoded and decoded
    assert max(slow["costs"]["encode_s"] + slow["costs"]["update_s"]) == 0
    usual = json.loads(run(capsys, *given)[1])
    assert 0 < max(usual["costs"]["publish_s"]) < 1
    assert slow["plan"]["step_s"] > usual["plan"]["step_s"] + 9
    assert slow["lockstep"] == usual["lockstep"]


def test_simulate_knows_how_fast_gradients_are_encoded(capsys):
    given = "simulate", "lockstep_dp", "--workers", "2", "--compress", "dct:0.01", "--json"
    slow = json.loads(run(capsys, *given, "--encode-bandwidth", "10MB/s")[1])
    assert slow["costs"]["encode_s"] == slow["costs"]["decode_s"] == [5.0, 5.0]
    usual = json.loads(run(capsys, *given)[1])
    assert 0 < max(usual["costs"]["encode_s"]) < 5
    assert slow["plan"]["step_s"] > 10


def test_simulate_says_what_a_codec_is_taken_for(capsys):
    out = run(capsys, "simulate", "cyclic_dp", "--workers", "2", "--compress", "dct:0.01")[1]
    assert "assumed codec: 1 MB per stage of a gradient, " in out
    assert "each worker keeps 100 MB of what was not sent besides, which is not counted" in out
    out = run(capsys, "simulate", "cyclic_dp", "--workers", "2", "--compress", "int8")[1]
    assert "each worker keeps" not in out
    given = "simulate", "cyclic_dp", "--workers", "2", "--compress"
    out = run(capsys, *given, "dct:0.01+topk:0.01")[1]
    assert "assumed codec: 1 MB per stage of a gradient, " in out
    assert "assumed codec: 1 MB per stage of new weights, " in out
    assert "keeps 100 MB of what was not sent and 100 MB for new weights besides, which" in out
    out = run(capsys, *given, "+int8")[1]
    assert "of a gradient" not in out
    assert "each worker keeps 100 MB for new weights besides, which is not counted" in out


def test_simulate_knows_hosts_of_several_workers(capsys):
    given = ["cyclic_dp", "--workers", "4", "--workers-per-host", "2", "--inside-latency-s", "1us"]
    status, out, _ = run(capsys, "simulate", *given)
    assert status == 0
    first = out.splitlines()[0]
    assert first.endswith("1.25 GB/s; on 2 hosts, inside of them 1 µs latency, 12.5 GB/s")
    steps = []
    for distribution, hosts in [("block", [0, 0, 1, 1]), ("cyclic", [0, 1, 0, 1])]:
        _, out, _ = run(capsys, "simulate", *given, "--distribution", distribution, "--json")
        got = json.loads(out)
        assert got["network"]["hosts"] == hosts
        assert got["network"]["inside"]["latency_s"] == 1e-6
        steps.append(got["plan"]["step_s"])
    assert steps[0] < steps[1]


def test_what_runs_again_takes_time_and_spares_memory(capsys):
    given = "simulate 1f1b --workers 2 --num-microbatches 4 --step-s 1200ms --model-bytes 0B "
    given += "--activation-bytes 2400MB --cut-bytes 10MB --bandwidth 1000GB/s --latency-s 0s "
    given += "--json --activation-checkpointing "

    def simulated(how):
        status, out, err = run(capsys, *(given + how).split())
        return json.loads(out) if status == 0 else err

    never, always = simulated("never"), simulated("always")
    assert never["again_s"] == []
    assert always["again_s"] == pytest.approx([0.2, 0.2])
    assert always["lockstep"] == never["lockstep"]
    slots = 2 * 4 + 2  # of a forward or a backward each, of the first stage and both ways
    assert never["plan"]["step_s"] == pytest.approx(slots * 0.3, rel=1e-3)
    assert always["plan"]["step_s"] == pytest.approx(slots * 0.4, rel=1e-3)
    roomy = simulated("optimal --memory 3GB")
    assert roomy["again_s"] == [0, 0]
    # of twelve units of 100 MB two micro-batches keep nine each, and 10 MB in front of the fourth;
    # with ten it would be 2020 MB, beside inputs and a gradient of 10 MB each
    tight = simulated("optimal --memory 2GB")
    assert [round(s / (0.2 / 12), 6) for s in tight["again_s"]] == [3, 0]
    kept = tight["plan"]["memory"]
    assert sum(kept.values()) <= 2e9
    assert never["plan"]["step_s"] < tight["plan"]["step_s"] < always["plan"]["step_s"]
    assert (
        "of its stage again: " in run(capsys, *given.replace("--json ", "").split(), "always")[1]
    )
    refused = simulated("optimal --memory 100MB --units 4")
    least = int(re.search(r"use --memory (\d+)", refused)[1])
    assert simulated(f"optimal --memory {least}B --units 4")["again_s"][0] > 0
    assert "is kept by no choice" in simulated(f"optimal --memory {least - 1}B --units 4")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("", ["COMMAND", "see lightning-cyclic --help"]),
        ("paint", ["'paint'", "draw", "simulate"]),
        ("draw cyclic_dp", ["--workers", "see lightning-cyclic draw --help"]),
        ("draw cdp --workers 2", ["preset 'cdp' is unknown", "cyclic_dp", "use preset="]),
        ("draw cyclic_dp --workers two", ["--workers", "'two'", "whole numbers from 1 on"]),
        ("draw cyclic_dp --workers 0", ["--workers", "'0'", "whole numbers from 1 on"]),
        ("draw cyclic_dp --workers 2 --slack -1", ["--slack"]),
        ("draw 1f1b --workers 4 --replicas 0", ["--replicas", "'0'", "whole numbers from 1 on"]),
        (
            "draw 1f1b --workers 5 --replicas 2",
            ["num_workers=5 with replicas=2", "use num_workers=6"],
        ),
        ("simulate cyclic_dp --workers 4 --replicas 2", ["replicas=2", "use replicas=1"]),
        (
            "simulate cyclic_dp --workers 4 --state -1",
            ["'-1' is not a number from 0 on; use 2 for"],
        ),
        ("draw cyclic_dp --workers 2 --from 99", ["slot 99", "begin at an earlier slot"]),
        ("draw 1f1b --workers 2 --out x.pdf", ["'x.pdf'", ".svg, .png, .json", "like x.svg"]),
        ("draw 1f1b --workers 2 --out x.svg --columns 9", ["--columns 9", "leave --columns out"]),
        ("draw 1f1b --workers 2 --memory --out x.json", ["'x.json'", "allowed: .svg, .png;"]),
        ("draw 1f1b --workers 2 --memory --from 99", ["slot 99", "slots below 12"]),
        ("draw 1f1b --workers 2 --state 1 --remat", ["--state, --remat of", "add --memory"]),
        ("draw 1f1b --workers 2 --offload", ["--offload of", "add --memory"]),
        ("simulate cyclic_dp --workers 2 --offload", ["'replicated'", "use offloads=False"]),
        (
            "simulate cyclic_dp --workers 2 --activation-checkpointing always",
            ["preset 'cyclic_dp', whose workers run whole micro-batches", "use preset 1f1b"],
        ),
        (
            "simulate spectrain --workers 2 --activation-checkpointing optimal --memory 9GB",
            ["preset 'spectrain', whose predicted weights are gone", "use always"],
        ),
        (
            "simulate 1f1b --workers 2 --activation-checkpointing optimal",
            ["optimal without --memory", "add --memory 24GB"],
        ),
        (
            "simulate 1f1b --workers 2 --memory 9GB",
            ["--memory with --activation-checkpointing never", "leave --memory out"],
        ),
        (
            "simulate 1f1b --workers 2 --activation-checkpointing always --units 9",
            ["--units with --activation-checkpointing always", "leave --units out"],
        ),
        (
            "simulate 1f1b --workers 2 --activation-checkpointing always --offload",
            ["and --offload, by which nothing runs again", "leave --offload out"],
        ),
        ("draw 1f1b --workers 99 --out x.svg", ["99 workers", "up to 32 workers", "fewer steps"]),
        (
            "draw pipedream_2bw --workers 4 --num-microbatches 2",
            ["num_microbatches=2", "use num_microbatches=3"],
        ),
        (
            "simulate cyclic_dp --workers 2 --compress topk",
            ["'topk' is no codec", "topk:DENSITY", "write it like int8, topk:0.01"],
        ),
        ("simulate cyclic_dp --workers 2 --compress int8:4", ["'int8:4' is no codec"]),
        ("simulate cyclic_dp --workers 2 --compress dct:x", ["no density", "dct:0.01"]),
        ("simulate cyclic_dp --workers 2 --compress powersgd:0.5", ["no rank", "powersgd:4"]),
        ("simulate cyclic_dp --workers 2 --compress topk:2", ["density=2.0", "use density"]),
        (
            "simulate cyclic_dp --workers 2 --encode-bandwidth 1GB/s",
            ["--encode-bandwidth", "add --compress int8"],
        ),
        (
            "simulate cyclic_dp --workers 2 --compress int8+dct:0.01",
            [
                "'dct:0.01', behind the + of 'int8+dct:0.01', is no codec of new weights;",
                "allowed: int8, topk:DENSITY, ",
                "like int8+int8 or ",
            ],
        ),
        ("simulate cyclic_dp --workers 2 --compress int8+", ["'', behind the + of 'int8+'"]),
        ("simulate cyclic_dp --workers 2 --compress +topk", ["'topk', behind the + of '+topk'"]),
        ("simulate cyclic_dp --workers 2 --compress foo+int8", ["'foo' is no codec; allowed: bf"]),
        ("simulate cyclic_dp --workers 2 --compress +topk:2", ["density=2.0", "use density"]),
        *(
            (
                f"simulate {preset} --workers 2 --compress int8+int8",
                [f"preset {preset!r}, ", parts],
            )
            for preset, parts in [
                ("cyclic_zero", "do not all have the weights"),
                ("diloco", "do not all have the weights"),
                ("1f1b", "of their own stages"),
            ]
        ),
        ("simulate 1f1b --workers 2 --compress topk:0.1", ["of their own stages"]),
        ("simulate 1f1b --workers 2 --compress bf16", ["use replicas=2"]),
        ("simulate cyclic --workers 2 --compress bf16", ["preset 'cyclic' is unknown"]),
        ("simulate gpipe --workers 2 --bandwidth 1GB", ["'1GB'", "Gbit/s", "write it like"]),
        ("simulate gpipe --workers 2 --bandwidth 0", ["bandwidth > 0"]),
        ("simulate gpipe --workers 2 --distribution cyclic", ["use --workers-per-host 2"]),
        ("simulate gpipe --workers 2 --inside-bandwidth 0", ["use --workers-per-host 2"]),
    ],
)
def test_errors_are_one_line_and_exit_status_two(capsys, arguments, parts):
    status, out, err = run(capsys, *arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith("lightning-cyclic: error: ")
    assert err.count("\n") == 1
    assert [part for part in parts if part not in err] == []


def command(*arguments):
    return [sys.executable, "-m", "lightning_cyclic.cli.main", *arguments]


def test_the_process():
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(
        command("draw", "cyclic_dp", "--workers", "2"),
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, DRAWN, "")
    wrong = command("draw", "cyclic_dp", "--workers", "2", "--from", "99")
    failed = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (2, "")


def test_a_reader_that_leaves_early_is_no_error():
    arguments = command("draw", "cyclic_dp", "--workers", "300", "--columns", "4000")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
