"""A rank dies: it is named, the others end, nothing is left, and the run starts again as often as it may."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest


def test_all_ranks_end_well_is_exit_code_0_and_leaves_no_hidden_directory(ground, capfd):
    code = ground.launch("print('hello from', rank)\nall_started()\ntime.sleep(0.3 * rank)")

    assert code == 0
    assert capfd.readouterr().out == "hello from 0\n"
    assert not ground.run.parent.exists()


def test_each_rank_finds_its_place_in_the_environment(ground):
    ground.launch("""
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS TOKENIZERS_PARALLELISM"
        names += " HF_HUB_DISABLE_TELEMETRY DO_NOT_TRACK"
        (here / f"env-{rank}").write_text(" ".join(os.environ[name] for name in names.split()))
        (here / f"store-{rank}").write_text(os.environ["HOLDFAST_STORE"])
        assert launch.is_dir() and launch.parent == run.parent
    """)

    assert (ground.path / "env-0").read_text() == "0 0 2 2 1 false 1 1"
    assert (ground.path / "env-1").read_text() == "1 1 2 2 1 false 1 1"
    assert (ground.path / "store-0").read_text() == (ground.path / "store-1").read_text()


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_others_are_gone_within_10_seconds(ground):
    launcher = subprocess.Popen(
        ground.driver(
            """
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (launch / "step").write_text("12")
            (launch / f"phase-rank-{rank}").write_text("update")
            make_run() if rank == 0 else None
            all_started()
            print("last words of", rank, flush=True)
            (here / f"ready-{rank}").touch()
            time.sleep(600)
            """,
            ranks=3,
        ),
        env=ground.environ,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    ground.wait_for(lambda: all((ground.path / f"ready-{rank}").exists() for rank in range(3)))
    ground.wait_for((ground.run / "logs").exists)
    victim = next(pid for pid in ground.pids() if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())

    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    _, shown = launcher.communicate(timeout=20)

    assert time.monotonic() - began < 10
    assert launcher.returncode == 3
    assert "Rank 1 was killed by SIGKILL in phase 'update' at step 12." in shown
    assert "    last words of 1" in shown
    assert str(ground.run / "logs" / "rank-1.log") in shown
    assert ground.alive() == []


def test_a_python_exception_is_shown_with_its_place_and_exit_code_3(ground, capfd):
    code = ground.launch("""
        all_started()
        if rank == 1:
            raise ValueError("the third row\\nis empty")
        time.sleep(600)
    """)

    shown = capfd.readouterr().err
    assert code == 3
    assert "Rank 1 ended with exit code 1." in shown
    assert "ValueError: the third row\n    is empty" in shown
    assert 'File "<string>", line' in shown
    assert ground.alive() == []


def test_a_crash_before_the_run_directory_exists_keeps_its_logs_until_the_next_start(ground):
    ground.launch("sys.exit(7 if rank == 1 else 0)")

    assert not ground.run.exists()
    assert len(ground.hidden()) == 1
    assert (ground.hidden()[0] / "logs" / "rank-1.log").exists()

    ground.launch("pass")

    assert ground.hidden() == []


def test_a_crash_of_a_run_that_has_a_directory_leaves_no_hidden_one(ground):
    code = ground.launch("make_run()\nsys.exit(7)", ranks=1)

    assert code == 3
    assert ground.hidden() == []
    assert (ground.run / "logs" / "rank-0.log").exists()


def test_the_first_cause_is_named_when_survivors_die_of_it(ground, capfd):
    ground.launch("""
        import json
        def last_words(kind, type_, message, at):
            words = dict(rank=rank, kind=kind, phase="update", type=type_, message=message, step=4, time=at)
            (launch / f"failure-rank-{rank}.json").write_text(json.dumps(words))
        all_started()
        if rank == 0:
            last_words("peer", "RuntimeError", "connection closed", time.time())
            sys.exit(3)
        time.sleep(0.3)
        last_words("error", "OutOfMemoryError", "no room for 3 GiB", time.time())
        sys.exit(1)
    """)

    shown = capfd.readouterr().err
    assert "Rank 1 ended with exit code 1 in phase 'update': OutOfMemoryError: no room for 3 GiB" in shown
    assert "Rank 0" not in shown


def test_survivors_can_read_who_died_without_a_word(ground):
    ground.patience = type(ground.patience)(settle_seconds=5.0)

    ground.launch("""
        all_started()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while not (launch / "failure-rank-1.json").exists():
            time.sleep(0.02)
        (here / "seen").write_text((launch / "failure-rank-1.json").read_text())
        sys.exit(3)
    """)

    assert '"message": "it was killed by SIGKILL"' in (ground.path / "seen").read_text()


def test_a_rank_that_is_seen_dead_after_a_survivor_said_that_it_lost_it_is_named_too(ground):
    """A killed rank's sockets close before the launcher can see it dead, and its survivor may be heard in between."""
    ground.patience = type(ground.patience)(settle_seconds=5.0)

    ground.launch("""
        import json
        all_started()
        if rank == 1:
            time.sleep(0.7)  # longer than the launcher looks away
            os.kill(os.getpid(), signal.SIGKILL)
        words = dict(rank=0, kind="peer", phase="update", type="RuntimeError", message="closed", step=4, time=1.0)
        (launch / "failure-rank-0.staging").write_text(json.dumps(words))
        (launch / "failure-rank-0.staging").rename(launch / "failure-rank-0.json")
        while not (launch / "failure-rank-1.json").exists():
            time.sleep(0.02)
        (here / "seen").write_text((launch / "failure-rank-1.json").read_text())
        sys.exit(3)
    """)

    assert '"message": "it was killed by SIGKILL"' in (ground.path / "seen").read_text()


def test_a_rank_that_reports_and_then_hangs_is_ended(ground, capfd):
    code = ground.launch("""
        import json
        all_started()
        if rank == 1:
            words = dict(rank=1, kind="error", phase="save", type="OSError", message="disk full", step=4, time=1.0)
            (launch / "failure-rank-1.json").write_text(json.dumps(words))
        time.sleep(600)
    """)

    assert code == 3
    assert "Rank 1 failed in phase 'save': OSError: disk full" in capfd.readouterr().err


def test_a_rank_that_ends_well_early_is_no_death(ground):
    code = ground.launch("""
        if rank == 0:
            sys.exit(0)
        time.sleep(1.5)
        (here / "finished").touch()
    """)

    assert code == 0
    assert (ground.path / "finished").exists()


def test_ranks_that_stop_in_good_order_are_waited_for_and_not_restarted(ground, capfd):
    code = ground.launch("attempt()\ntime.sleep(1.5 * rank)\nsys.exit(3)", max_restarts=2)

    assert code == 3
    assert (ground.path / "attempts-1").read_text() == "x"
    assert capfd.readouterr().err == ""


def test_a_user_error_is_exit_code_2_said_once_and_leaves_nothing(ground, capfd):
    code = ground.launch("print('optim.lr=-1 is negative', file=sys.stderr)\nattempt()\nsys.exit(2)", max_restarts=3)

    assert code == 2
    assert capfd.readouterr().err == "optim.lr=-1 is negative\n"
    assert (ground.path / "attempts-0").read_text() == "x"
    assert not ground.run.parent.exists()


def test_a_user_error_of_one_rank_is_told_when_rank_0_is_silent(ground, capfd):
    code = ground.launch("""
        all_started()
        if rank == 1:
            print("noise\\n\\nrow 7 has no 'text'.\\nName the column.", file=sys.stderr)
            sys.exit(2)
        time.sleep(600)
    """)

    assert code == 2
    assert capfd.readouterr().err == "row 7 has no 'text'.\nName the column.\n"


def test_a_refused_launch_keeps_a_run_dir_that_was_there_before(ground):
    ground.run.parent.mkdir()

    ground.launch("sys.exit(2)")

    assert list(ground.run.parent.iterdir()) == []


@pytest.mark.parametrize("new_session", [False, True], ids=["same session", "own session"])
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"], ids=["killed", "done"])
def test_grandchildren_do_not_outlive_the_launch(ground, new_session, end):
    ground.launch(f"child({new_session})\n{end}", ranks=1)

    assert len(ground.pids()) == 2
    assert ground.alive() == []


def test_ranks_and_grandchildren_go_when_the_launcher_is_killed(ground):
    launcher = subprocess.Popen(
        ground.driver("child(True)\n(here / f'ready-{rank}').touch()\ntime.sleep(600)"), env=ground.environ
    )
    ground.wait_for(lambda: all((ground.path / f"ready-{rank}").exists() for rank in range(2)))

    launcher.kill()
    launcher.wait()

    ground.wait_for(lambda: ground.alive() == [], seconds=10)
    assert len(ground.pids()) == 4


def test_a_run_starts_again_up_to_max_restarts(ground, capfd):
    code = ground.launch(
        """
        (launch / "step").write_text(str(attempt()))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        ranks=1,
        max_restarts=2,
    )

    shown = capfd.readouterr().err
    assert code == 3
    assert (ground.path / "attempts-0").read_text() == "xxx"
    assert "Restart 2 of at most 2" in shown
    assert shown.endswith("The same command starts the run again, from its newest verified checkpoint.\n")


def test_a_run_that_made_no_step_is_not_sent_round_in_a_circle(ground, capfd):
    code = ground.launch("sys.exit(9)", ranks=1, max_restarts=0)

    assert code == 3
    assert capfd.readouterr().err.endswith(
        "It made no step: once the cause is mended, the same command starts the run.\n"
    )


def test_a_restarted_run_that_ends_well_is_exit_code_0(ground):
    code = ground.launch("sys.exit(9 if attempt() == 1 else 0)", ranks=1, max_restarts=1)

    assert code == 0


def test_two_deaths_at_one_step_end_the_run(ground, capfd):
    code = ground.launch(
        """
        (launch / "step").write_text(["5", "7", "5"][attempt() - 1])
        sys.exit(1)
        """,
        ranks=1,
        max_restarts=9,
    )

    assert code == 3
    assert (ground.path / "attempts-0").read_text() == "xxx"
    assert "The run died at step 5 twice, so it is not started again" in capfd.readouterr().err


def test_a_launcher_imports_nothing_heavy(ground):
    """DRIVER looks in every test that torch is not imported; this one names what else a launcher has no use for."""
    environ = ground.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(ground.driver("pass", ranks=1), env=environ, check=True, capture_output=True, text=True)

    imports = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "holdfast.launch.local" in imports
    assert not {"numpy", "transformers", "datasets", "typer", "yaml"} & imports
