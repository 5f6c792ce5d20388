"""MiniGrid: levels, worker processes, runs in folders, tests of agents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riglstm.lab.minigrid.ppo import PPO

pytest.importorskip("minigrid", reason="needs the extra riglstm[rl]")
import gymnasium

from riglstm.lab.minigrid import training
from riglstm.lab.minigrid.envs import SKIP, Environments, WorkerDied, solved
from riglstm.lab.minigrid.levels import FAMILIES, SHOWN, chosen_levels
from riglstm.lab.minigrid.task import MiniGrid
from riglstm.lab.tables.agents import plan, spec_of
from riglstm.lab.tables.plan import RunSpec
from riglstm.lab.tables.recipes import MEMORIES
from riglstm.lab.tables.reproduce import reproduce
from riglstm.lab.tables.run import build, evaluate, export, load, run
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.stopping import Deadline, Interrupted, OutOfTime

pytestmark = pytest.mark.slow

EMPTY, DOORKEY = "MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0"
LEFT, RIGHT, FORWARD = 0, 1, 2
TINY = PPO(
    frames=256, envs=4, steps=16, window=8, minibatch=32, epochs=1, workers=1,
    device="cpu", checkpoint_every=100, tensorboard=False,
)  # fmt: skip


def spec(model: str = "riglstm", ppo: PPO = TINY, episodes: int = 1) -> RunSpec:
    return spec_of(MiniGrid("lavagap", episodes), MEMORIES[model], ppo, seed=0)


def short(frames: int) -> RunSpec:
    """An LSTM that is trained for so many frames."""
    return spec("lstm", replace(TINY, frames=frames))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def played(envs: Environments, actions: Any) -> list[Any]:
    """The images after each of these steps."""
    return [(envs.step(own), envs.images.copy())[1] for own in actions]


LIMITS = {
    **{"MiniGrid-Empty-16x16-v0": 1024, "MiniGrid-MultiRoom-N4-S5-v1": 80},
    **{"MiniGrid-PutNear-8x8-N3-v0": 40, "MiniGrid-ObstructedMaze-Full-v1": 3600},
}
"""Steps of an episode at the most, of some levels (P34)."""


@pytest.mark.parametrize("name", FAMILIES)
def test_levels_are_registered_with_their_actions(name):
    of = FAMILIES[name]
    for level in of.levels.values():
        env: Any = gymnasium.make(level, disable_env_checker=True).unwrapped
        assert env.action_space.n == of.actions, level
        assert env.observation_space["image"].shape == (7, 7, 3)
        assert env.max_steps == LIMITS.get(level, env.max_steps) > 0


def test_levels_and_families_by_name():
    assert len(FAMILIES) == 16
    assert set(FAMILIES) - set(SHOWN) == {"fetch", "gotodoor", "gotoobject", "putnear"}
    of = FAMILIES["doorkey"]
    assert list(chosen_levels(of, ("8x8", "5x5"))) == ["5x5", "8x8"]
    with pytest.raises(ValueError, match=r"levels of DoorKey must be .* 5x5, .*got 5x5, 7x7"):
        chosen_levels(of, ("5x5", "7x7"))


def test_reward_is_one_where_a_recorded_episode_is_solved():
    """Two forward, a turn, two forward: the environment's own reward falls with time."""
    actions = (FORWARD, FORWARD, RIGHT, FORWARD, FORWARD)
    env = gymnasium.make(EMPTY)
    env.reset(seed=0)
    own = [env.step(action)[1:3] for action in actions]
    assert own[-1] == (pytest.approx(1 - 0.9 * 5 / 100), True)
    with Environments([EMPTY], 0, workers=1) as envs:
        ours = []
        for action in actions:
            envs.step(np.array([action]))
            ours.append((int(envs.rewards[0]), bool(envs.dones[0])))
        assert ours == [(0, False)] * 4 + [(1, True)]
        assert envs.steps[0] == 5
        for _ in range(100):
            envs.step(np.array([LEFT]))
        assert (envs.rewards[0], envs.dones[0], envs.steps[0]) == (0, 1, 100), "no time-out"
    assert [solved(r) for r in (-1, 0, 0.1, 1)] == [0, 0, 1, 1]


def test_workers_give_what_the_environments_give():
    levels = [DOORKEY, EMPTY, DOORKEY]
    actions = np.random.default_rng(0).integers(0, 7, (120, 3))
    seen: list[Any] = []
    for workers in (1, 2):
        with Environments(levels, 5, workers=workers) as envs:
            first = envs.images.copy()
            seen.append(np.array([first, *played(envs, actions)]))
    np.testing.assert_array_equal(*seen)

    def begin(env: Any, i: int, episode: int) -> Any:
        state = np.random.SeedSequence((5, i, episode)).generate_state(1)
        return env.reset(seed=int(state[0]))[0]["image"]

    for i, level in enumerate(levels):
        env, episode = gymnasium.make(level), 0
        expected = [begin(env, i, 0)]
        for action in actions[:, i]:
            found, _, terminated, truncated, _ = env.step(int(action))
            if terminated or truncated:
                episode += 1
                found["image"] = begin(env, i, episode)
            expected.append(found["image"])
        np.testing.assert_array_equal(seen[0][:, i], np.array(expected))


def test_environments_go_back_to_where_they_stood():
    rng = np.random.default_rng(1)
    with Environments([DOORKEY, EMPTY], 0, workers=1) as envs:
        played(envs, rng.integers(0, 7, (130, 2)))
        there, images = envs.history(), envs.images.copy()
        actions = rng.integers(0, 7, (30, 2))
        first = played(envs, actions)
        envs.restore(json.loads(json.dumps(there)))
        np.testing.assert_array_equal(envs.images, images)
        again = played(envs, actions)
    assert there[1][0] > 0, "no episode has ended before"
    np.testing.assert_array_equal(first, again)


def test_an_environment_can_be_left_out():
    with Environments([EMPTY, EMPTY], 0, workers=1, numbers=[3, 3]) as envs:
        np.testing.assert_array_equal(*envs.images)
        before = envs.images.copy()
        envs.step(np.array([SKIP, LEFT]))
        np.testing.assert_array_equal(envs.images[0], before[0])
        assert not np.array_equal(envs.images[1], before[1])


def test_there_are_as_many_workers_as_cores_that_may_be_used(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    with Environments([EMPTY] * 4, 0) as envs:
        assert len(envs.workers) == 1


def test_a_killed_worker_is_reported_and_none_is_left():
    envs = Environments([DOORKEY] * 3, 0, workers=2)
    processes = [worker.process for worker in envs.workers]
    os.kill(processes[1].pid, signal.SIGKILL)
    said = r"environments 1 to 2 \(MiniGrid-DoorKey-5x5-v0\) ended with exit code -9; .* --resume"
    processes[1].wait()
    with envs, pytest.raises(WorkerDied, match=said):
        envs.step(np.zeros(3, int))
    assert [process.poll() for process in processes] == [0, -9]


def test_a_worker_that_fails_is_reported(capfd):
    with pytest.raises(WorkerDied, match=r"\(MiniGrid-Nowhere-v0\) ended with exit code 1"):
        Environments(["MiniGrid-Nowhere-v0"], 0)
    assert "MiniGrid-Nowhere" in capfd.readouterr().err


def test_workers_do_not_outlive_a_killed_run():
    script = (
        "import sys, time\n"
        "from riglstm.lab.minigrid.envs import Environments\n"
        f"envs = Environments(['{EMPTY}'] * 2, 0, workers=2)\n"
        "print(*(w.process.pid for w in envs.workers), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        assert not any("libtorch" in text for text in maps), "a worker waits for torch to load"
        run.kill()
        run.wait()
    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_a_run_is_tested_on_every_level_and_again_from_its_folder(tmp_path):
    result = run(spec(episodes=3), tmp_path / "a")
    levels = list(FAMILIES["lavagap"].levels)
    assert [r["condition"] for r in result["rows"] if r["metric"] == "success"] == levels
    shares = [row["value"] for row in result["rows"] if row["metric"] != "steps"]
    assert all(0 <= value <= 1 for value in shares)
    assert {(row["chosen_on"], row["step"]) for row in result["rows"]} == {("last", 4)}
    assert (result["updates"], result["trained_on"]) == (4, "S5")
    assert RunFolder(tmp_path / "a").state == "done"
    file = export(tmp_path / "a", tmp_path / "a.safetensors")
    for path in (tmp_path / "a", file):
        assert evaluate(path, "cpu", conditions=("S5",))["rows"] == result["rows"][:3]
    loaded, _, _ = load(tmp_path / "a", "cpu")
    assert loaded.name == "riglstm"
    assert loaded.digest() == spec(episodes=3).digest()
    with pytest.raises(ValueError, match="levels of LavaGap must be some of S5, S6, S7, got 5x5"):
        evaluate(tmp_path / "a", "cpu", conditions=("5x5",))
    (tmp_path / "a" / "weights" / "step-4.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected weights in .*step-4.safetensors, got no such"):
        evaluate(tmp_path / "a", "cpu")


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(short(256), whole)

    def stop(self: Any, frames: int, said: str) -> None:
        if frames == 128:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(training.Progress, "move", stop)
        with pytest.raises(Interrupted, match="update 2; go on with: the same"):
            run(short(256), parts, again="the same")
    assert RunFolder(parts).state == "partial"
    run(short(256), parts, resume=True)
    assert (whole / "metrics.csv").read_bytes() == (parts / "metrics.csv").read_bytes()
    weights = "weights/step-4.safetensors"
    assert (whole / weights).read_bytes() == (parts / weights).read_bytes()


def test_a_run_stops_before_its_deadline_and_goes_on(tmp_path):
    soon = Deadline.after(0.01)
    with pytest.raises(OutOfTime, match="stopped, and saved; the last checkpoint is of update 1"):
        run(short(128), tmp_path, deadline=soon)
    with pytest.raises(OutOfTime, match="trained to the end, and saved; not tested yet"):
        run(short(128), tmp_path, resume=True, deadline=soon)
    assert run(short(128), tmp_path, resume=True, deadline=soon)["updates"] == 2


def test_no_more_frames_are_used_than_were_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "SECONDS", 0.0)
    assert run(short(127), tmp_path / "a")["updates"] == 1
    said = capsys.readouterr().err
    assert "testing on S5, S6, S7 with the weights of update 1" in said
    assert "tested 6 of 6 episodes" in said


def test_a_second_signal_in_the_last_save_ends_the_run(tmp_path, monkeypatch):
    save = training.Checkpoints.save

    def stopped(self: Any, *args: Any) -> None:
        save(self, *args)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(training.Checkpoints, "save", stopped)
    with pytest.raises(Interrupted, match=r"stopped at once, without saving; .*go on with: again"):
        run(short(64), tmp_path / "a", again="again")


def test_runs_that_diverge_are_counted_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_finite", lambda *_: False)
    runs = plan(["lavagap"], ["lstm"], 1, tmp_path, replace(TINY, frames=64), 1)
    made = reproduce("minigrid", runs, "paper", tmp_path)
    assert (made.failed, made.left) == (1, 0)
    said = "a loss or a weight is not a number after update 1; there is no checkpoint yet; try a "
    assert f"Failed: {runs[0].folder.name}: {said}" in made.rendered.markdown
    assert "**MiniGrid, LavaGap: episodes solved in %**" in made.rendered.markdown
    assert made.rendered.markdown.count("1 failed") == 6


def test_trials_depend_on_the_agent_alone():
    _, net = build(spec())
    levels = chosen_levels(FAMILIES["lavagap"], ("S5", "S6"))
    scores = training.trials(net, levels, 3, workers=1)
    assert training.trials(net, levels, 3, workers=2) == scores
    assert training.trials(net, {"S6": levels["S6"]}, 3, workers=1) == {"S6": scores["S6"]}
    assert 0 < scores["S5"]["steps"] <= 100


def test_a_memory_of_other_sizes_has_another_name():
    """So that no table takes it for the paper's."""
    assert [spec(name).name for name in MEMORIES] == list(MEMORIES)
    assert replace(spec(), hidden_size=128).name == "riglstm-other"
    assert replace(spec(), model_options={"num_cells": 4}).name == "riglstm-other"
    options = {**MEMORIES["riglstm"].options, "backend": "batched"}
    assert replace(spec(), model_options=options).name == "riglstm"
    sizes = {k: v for k, v in MEMORIES["riglstm"].options.items() if k != "soft_update"}
    learns = replace(spec(), model_options=sizes)
    assert learns.name == "riglstm-other"
    assert learns.digest() != spec().digest()
    said = learns.resolved()["model_options"]
    assert (said["update_scale"], said["update_bias"]) == (1 / 16, 4.0)
    assert RunSpec.from_json(learns.resolved()).digest() == learns.digest()
    in_numbers = replace(spec(), model_options={**sizes, "update_scale": 1, "update_bias": None})
    assert (in_numbers.name, in_numbers.digest()) == ("riglstm", spec().digest())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_options": {"family": "mazes"}}, "family must be one of empty, .*got 'mazes'"),
        ({"task_options": {"episodes": 0}}, "episodes must be a whole number from 1 on, got 0"),
        ({"seed": 2**31}, "seed must be a whole number from 0 to 2,147,483,647, got 2147483648"),
        ({"fit": Fit()}, "minigrid must be learned by PPO, got Fit"),
        ({"fit": PPO()}, "an agent's run must say its frames, got None"),
        ({"model_options": {"cells": 3, "depth": 1}}, "'depth' is no model option of 'riglstm'"),
    ],
)
def test_runs_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(spec(), **changes).task_config()
