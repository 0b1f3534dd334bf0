"""``memwall-train`` as a user starts it: two local processes, real text, one run folder; then resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.csv_log import read_csv
from tests.ranks import ROOT
from tests.recipes.test_text import LIBRARY

FILES = ",".join(
    str(LIBRARY / f"{name}.py") for name in ("abc", "argparse", "ast", "cmd", "copy", "csv", "dis", "heapq")
)
TINY = (
    "experiment=gpt_nano", f"data.files=[{FILES}]", "data.val_fraction=0.3", "data.seq_len=64", "data.batch_size=4",
    "model.layers=2", "model.hidden=64", "model.heads=2", "trainer.limit_val_batches=2", "scheduler.warmup_steps=4",
    "optimizer.lr=4e-3",
)  # fmt: skip
TIMEOUT_S = 150


def memwall_train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder``; its ranks die with it when it takes too long."""
    return finish(start(folder, *overrides))


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "memwall_strategy.cli.train", *TINY, *overrides, f"paths.cache_dir={folder}/cache"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"not done after {TIMEOUT_S} s:\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def numbers(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in read_csv(folder / "metrics.csv")[1] if row.get(name)]


@pytest.mark.timeout(2 * TIMEOUT_S + 30)
def test_train_then_resume(tmp_path: Path) -> None:
    done = memwall_train(tmp_path, "trainer.max_steps=30", "trainer.val_check_interval=12")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs" / "gpt_nano").iterdir()

    out = done.stdout
    for once in ("text: files", "memory plan:", "step 1/30 |", "step 20/30 |", f"run folder: {folder}"):
        assert out.count(once) == 1, (once, out)  # one rank prints
    assert re.search(
        r"step 20/30 \| loss \d\.\d+ \| \d+\.\d+ s/step \| [\d,]+ tokens/s \| .*iB a rank \| MFU \d+% \|", out
    )
    assert "\r" not in out and "\x1b" not in out, "a log file gets no bar and no colours"
    assert re.search(r"claim +claimed +measured", out) and re.search(r"param +\S+ KiB +\S+ KiB +\+0\.0%", out)

    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints", "config.yaml", "events.jsonl", "metrics.csv", "plan.json", "summary.json",
    ]  # fmt: skip
    losses = [loss for _, loss in numbers(folder, names.TRAIN_LOSS)]
    assert len(losses) == 30 and losses[0] > 5.3
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert [step for step, _ in numbers(folder, names.VAL_LOSS)] == [12, 24]
    for name in (names.STEP_S, names.TOKENS_PER_S, names.DEVICE_BYTES, names.EXPOSED_S, names.EXPOSED_FRACTION,
                 names.INPUT_EXPOSED_S):  # fmt: skip
        assert [step for step, _ in numbers(folder, name)] == [*range(1, 31)], name
    assert len(numbers(folder, names.MFU)) == 29, "known once the operations of a step were counted"

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["figures"]["train/loss_first"] == pytest.approx(losses[0])
    assert summary["environment"]["ranks"] == 2 and summary["text"]["train_tokens"] > 10_000
    assert len(summary["text"]["sha256"]) == 64
    assert summary["claims"][0]["measured"] == summary["figures"]["run/wall_s"] > 0
    plan = json.loads((folder / "plan.json").read_text())
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        assert summary["memory"]["measured"]["step"][kind] == plan["resident"][kind] > 0, kind
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kinds = [e["kind"] for e in events if e["kind"] != "checkpoint_saved"]
    assert kinds == ["run_started", "state_placed", "plan", "run_ended"]
    assert all(e["rank"] == 0 and e["severity"] == "info" for e in events)
    assert [(Path(e["fields"]["path"]).name, e["step"]) for e in events if e["kind"] == "checkpoint_saved"] == [
        ("best_step_12.ckpt", 12), ("last.ckpt", 12), ("best_step_24.ckpt", 24), ("last.ckpt", 24), ("last.ckpt", 30),
    ]  # fmt: skip
    assert summary["status"] == "success" and summary["events"]["checkpoint_saved"] == 5

    resumed = memwall_train(
        tmp_path, "ckpt_path=last", f"paths.run_folder={folder}", "trainer.max_steps=34", "trainer.val_check_interval=4"
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "step 31/34" in resumed.stdout
    continued = numbers(folder, names.TRAIN_LOSS)
    assert [step for step, _ in continued] == [*range(1, 35)], "each step once"
    assert [loss for _, loss in continued[:30]] == losses
    assert continued[30][1] < 0.85 * losses[0], "not from fresh weights"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [Path(e["fields"]["path"]).name for e in events if e["kind"] == "run_resumed"] == ["last.ckpt"]
    assert sum(e["kind"] == "run_started" for e in events) == 2

    again = memwall_train(tmp_path, "ckpt_path=last", f"paths.run_folder={folder}", "trainer.max_steps=34")
    said = " ".join(again.stderr.split())
    assert again.returncode == 2 and "is at step 34 already" in said and "Raise" in said, again.stderr
    assert sum(1 for _ in (folder / "events.jsonl").open()) == len(events), "and nothing was touched"


@pytest.mark.timeout(2 * TIMEOUT_S + 30)
def test_a_run_and_a_sweep_at_once(tmp_path: Path) -> None:
    """One machine, one cold cache, one second: neither is in the other's way, and a failing job in nobody's."""
    sweep = start(tmp_path, "-m", "debug=fdr", "optimizer.lr=-1,1e-3", "hardware=cpu_2")
    traced = start(tmp_path, "debug=profiler", "trainer.max_steps=3")
    swept, ran = finish(sweep), finish(traced)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert swept.returncode == 1, swept.stdout + swept.stderr
    assert "Invalid learning rate" in swept.stderr and "1 of 2 jobs ended well" in swept.stdout
    folders = sorted((tmp_path / "runs" / "gpt_nano").iterdir())
    assert len(folders) == 2
    (sweep_folder,) = [folder for folder in folders if folder.name.startswith("sweep_")]
    (run_folder,) = [folder for folder in folders if folder is not sweep_folder]
    jobs = json.loads((sweep_folder / "sweep.json").read_text())
    assert [job["result"] for job in jobs] == ["failed (2)", "ok"]
    (tokens,) = [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]  # built once
    texts = [json.loads((folder / "summary.json").read_text())["text"] for folder in (run_folder, sweep_folder / "1")]
    assert texts[0] == texts[1] == json.loads((tokens / "meta.json").read_text())

    events = json.loads((run_folder / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"train", "gather", "reduce"}
    described = json.loads((sweep_folder / "1" / "summary.json").read_text())
    assert described["mfu_peak"] == "described: 1.3e+11 operations/s of hardware cpu_2"
    assert json.loads((sweep_folder / "1" / "plan.json").read_text())["bounds"]["hardware"] == "cpu_2"

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    rerun = subprocess.run(
        [sys.executable, "-m", "memwall_strategy.cli.train", "--config-dir", str(run_folder), "--config-name", "config",
         "trainer.max_steps=2"],
        cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert rerun.returncode == 0, rerun.stdout + rerun.stderr
    (third,) = {*(tmp_path / "runs" / "gpt_nano").iterdir()} - set(folders)
    first, again = numbers(run_folder, names.TRAIN_LOSS), numbers(third, names.TRAIN_LOSS)
    assert again == first[:2] and not [*elsewhere.iterdir()]
