import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from assay.core.catalogue import method
from assay.core.errors import AssayError, InputError, NotApplicable
from assay.trials import Trial, run_trial
from assay.trials._runner import _code
from tests.trials import fake_trials

FAKE = "tests.trials.fake_trials"


def numbers(run):
    return {(c.arm, c.seed): c.metrics for c in run.cells}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "good"
    seen = []
    run = run_trial(fake_trials.GOOD, seeds=3, out=out, progress=lambda *step: seen.append(step))
    return run, out, seen


def test_every_arm_runs_on_every_seed(finished):
    run, _, seen = finished
    assert [(c.arm, c.seed) for c in run.cells] == [(a, s) for a in ("good", "plain") for s in range(3)]
    assert run.verdict.seeds == (0, 1, 2)
    assert run.source == "builtin:nothing"
    assert [s[:2] for s in seen] == [(k, 6) for k in range(7)]


def test_arms_of_one_seed_share_their_data(finished):
    run, _, _ = finished
    found = numbers(run)
    for seed in range(3):
        gap = found["good", seed]["score"] - found["plain", seed]["score"]
        assert gap == pytest.approx(0.1 + seed / 1000)
    c = next(c for c in run.verdict.comparisons if c.metric == "score")
    assert c.word == "better"
    assert c.difference.mean == pytest.approx(0.101)


def test_time_and_memory_are_measured(finished):
    for cell in finished[0].cells:
        assert cell.seconds > 0
        assert cell.peak_rss_mib > 5


def test_files_hold_what_was_found(finished):
    run, out, _ = finished
    assert json.loads((out / "verdict.json").read_text()) == run.to_dict()
    lines = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    assert lines[0]["trial"] == "fake"
    assert {(x["arm"], x["seed"]) for x in lines[1:]} == set(numbers(run))


def test_workers_do_not_change_the_numbers(finished):
    run = run_trial(f"{FAKE}:GOOD", seeds=3, workers=3)
    assert numbers(run) == numbers(finished[0])
    assert run.verdict.comparisons == finished[0].verdict.comparisons
    assert run.workers == 3


def test_budget_gives_settings_and_seeds():
    run = run_trial(fake_trials.GOOD, budget="full", seeds=1)
    assert run.cells[0].metrics["size"] == 9
    assert fake_trials.GOOD.budgets["quick"]["seeds"] == 2


def test_a_failing_arm_is_shown_and_does_not_end_the_trial():
    run = run_trial(fake_trials.FAILING, workers=2)
    failures = {(c.arm, c.seed): c.failure for c in run.cells}
    assert failures["good", 1] is None
    assert failures["failing", 0] is None
    assert failures["failing", 1].startswith("ZeroDivisionError: no luck with this one (fake_trials.py, line ")
    assert failures["short", 0].startswith("ValueError: the arm returned no size and no error")
    assert failures["refusing", 0] == "this arm wants more data"
    assert failures["dying", 0] == "the process ended with status 7: about to go"
    words = {(c.metric, c.baseline): c.word for c in run.verdict.comparisons}
    assert all(words["score", b] == "not measured" for b in ("failing", "nan", "short", "refusing", "dying"))
    assert words["error", "nan"] == "no difference shown"
    assert "no luck" in str(run.verdict.arms_table())
    json.dumps(run.to_dict(), allow_nan=False)


def test_preparing_is_not_charged_to_the_arm():
    run = run_trial(fake_trials.HUNGRY, seeds=1)
    hungry, plain = run.cells
    assert 60 < hungry.peak_mib < 80
    assert plain.peak_mib < 10
    assert plain.seconds < 0.25


def test_an_arm_has_one_thread_and_an_empty_standard_input():
    assert run_trial(fake_trials.READING, seeds=1).cells[0].metrics["size"] == 1


def test_what_an_arm_registers_for_its_end_is_run(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("a,b\n1,2\n")
    assert run_trial(fake_trials.LEAVING, on=table, seeds=1).cells[0].failure is None
    assert (tmp_path / "left").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BAD_PREPARE", "builtin:nothing could not be prepared (seed 0): KeyError: 'column'"),
        ("REFUSING_PREPARE", "builtin:nothing has no rows"),
    ],
)
def test_data_that_cannot_be_prepared_end_the_trial(name, message):
    with pytest.raises(AssayError) as caught:
        run_trial(f"{FAKE}:{name}", seeds=1)
    assert str(caught.value).startswith(message)


def _start_pausing(tmp_path, *more):
    """A runner in a process of its own, whose second seed waits."""
    gate = tmp_path / "gate.csv"
    gate.write_text("a,b\n1,2\n")
    code = f"from assay.trials import run_trial; run_trial('{FAKE}:PAUSING', on={str(gate)!r}, seeds=2, out={str(tmp_path / 'out')!r})"
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE, text=True)


def _wait_for(condition):
    for _ in range(1000):
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("waited for too long")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupt_and_resume(tmp_path, how):
    runner = _start_pausing(tmp_path)
    begun = _wait_for(lambda: list(tmp_path.glob("begun-1-*")))
    child = int(begun[0].name.rpartition("-")[2])
    runner.send_signal(how)
    assert runner.wait(10) != 0
    runner.stderr.close()
    _wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    out = tmp_path / "out"
    cells = out / "cells.jsonl"
    kept = [json.loads(line) for line in cells.read_text().splitlines()][1:]
    assert [(c["arm"], c["seed"]) for c in kept] == [("good", 0), ("pausing", 0), ("good", 1)]
    assert not (out / "verdict.json").exists()

    # A kill in the middle of a write leaves part of a line.
    with cells.open("a") as stream:
        stream.write('{"arm": "pausing", "se')
    gate = tmp_path / "gate.csv"
    with pytest.raises(InputError, match="holds an unfinished trial of fake: resume it"):
        run_trial(fake_trials.PAUSING, on=gate, seeds=2, out=out)
    (tmp_path / "open").touch()
    seen = []
    run = run_trial(
        fake_trials.PAUSING, on=gate, seeds=2, out=out, resume=True, progress=lambda *step: seen.append(step)
    )
    assert [s[:2] for s in seen] == [(3, 4), (4, 4)]
    assert len(list(tmp_path.glob("begun-0-*"))) == 1
    assert [c.seconds for c in run.cells if c.seed == 0] == [c["seconds"] for c in kept if c["seed"] == 0]
    assert all(c.failure is None for c in run.cells)
    assert [json.loads(line) for line in cells.read_text().splitlines()][-1]["arm"] == "pausing"


def test_resume_takes_more_seeds_and_runs_failed_cells_again(tmp_path):
    out = tmp_path / "out"
    run_trial(fake_trials.GOOD, seeds=1, out=out)
    lines = (out / "cells.jsonl").read_text().splitlines()
    broken = json.loads(lines[2]) | {"metrics": {}, "seconds": None, "failure": "out of memory"}
    (out / "cells.jsonl").write_text("\n".join([*lines[:2], json.dumps(broken)]) + "\n")
    run = run_trial(fake_trials.GOOD, seeds=2, out=out, resume=True)
    assert run.cells[0].seconds == json.loads(lines[1])["seconds"]
    assert all(c.failure is None for c in run.cells)
    assert len(run.cells) == 4


def test_without_resume_a_finished_trial_is_run_anew(tmp_path):
    out = tmp_path / "out"
    first = run_trial(fake_trials.GOOD, seeds=1, out=out)
    second = run_trial(fake_trials.GOOD, seeds=1, out=out)
    assert first.cells[0].seconds != second.cells[0].seconds
    assert len((out / "cells.jsonl").read_text().splitlines()) == 3


def test_cells_of_another_trial_subject_or_budget_are_refused(tmp_path):
    out = tmp_path / "out"
    table = tmp_path / "table.csv"
    table.write_text("a,b\n1,2\n")
    run_trial(fake_trials.GOOD, seeds=1, out=out, on=table)
    with pytest.raises(InputError, match="holds the trial of fake, not of other"):
        run_trial(fake_trials.OTHER, seeds=1, out=out)
    with pytest.raises(InputError, match="with another subject"):
        run_trial(fake_trials.GOOD, seeds=1, out=out, resume=True)
    with pytest.raises(InputError, match="with another budget and settings"):
        run_trial(fake_trials.GOOD, seeds=1, out=out, on=table, budget="full", resume=True)
    os.utime(table, (1, 1))
    with pytest.raises(InputError, match="with another subject"):
        run_trial(fake_trials.GOOD, seeds=1, out=out, on=table, resume=True)
    assert (out / "verdict.json").exists()


def test_a_second_trial_into_the_same_directory_is_refused_while_the_first_runs(tmp_path):
    out = tmp_path / "out"
    refused = []

    def second(done, total, what):
        with pytest.raises(InputError, match=f"another trial is running into {out}: wait for its end, or") as caught:
            run_trial(fake_trials.GOOD, seeds=1, out=out, resume=done > 0)
        refused.append(str(caught.value))

    run = run_trial(fake_trials.GOOD, seeds=1, out=out, progress=second)
    assert len(refused) == 3
    assert not any("\n" in message for message in refused)
    lines = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    assert [(x["arm"], x["seed"]) for x in lines[1:]] == [("good", 0), ("plain", 0)]
    assert json.loads((out / "verdict.json").read_text()) == run.to_dict()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    runner = _start_pausing(tmp_path)
    _wait_for(lambda: list(tmp_path.glob("begun-1-*")))
    out, gate = tmp_path / "out", tmp_path / "gate.csv"
    before = (out / "cells.jsonl").read_bytes()
    with pytest.raises(InputError, match="another trial is running into"):
        run_trial(fake_trials.PAUSING, on=gate, seeds=2, out=out, resume=True)
    assert (out / "cells.jsonl").read_bytes() == before
    runner.kill()
    runner.wait(10)
    runner.stderr.close()
    (tmp_path / "open").touch()
    run = run_trial(fake_trials.PAUSING, on=gate, seeds=2, out=out, resume=True)
    assert all(c.failure is None for c in run.cells)


@pytest.mark.parametrize("name", ["REFUSING_PREPARE", "BAD_PREPARE"])
def test_a_trial_that_is_refused_for_its_data_writes_nothing(tmp_path, name):
    with pytest.raises(AssayError):
        run_trial(f"{FAKE}:{name}", seeds=1, out=tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(AssayError):
        run_trial(f"{FAKE}:{name}", seeds=1, out=empty)
    assert not list(empty.iterdir())


def test_a_trial_that_is_refused_for_its_data_leaves_an_earlier_one_as_it_was(tmp_path):
    out = tmp_path / "out"
    run_trial(fake_trials.GOOD, seeds=1, out=out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(AssayError, match="has no rows"):
        run_trial(fake_trials.REFUSING_PREPARE, seeds=1, out=out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def _module(tmp_path, monkeypatch, text):
    """A trial in a module of its own, as it stands in the file now."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_trial.py").write_text(text)
    sys.modules.pop("edited_trial", None)
    return "edited_trial:GOOD"


def test_resume_is_refused_after_an_edit_of_the_trial(tmp_path, monkeypatch):
    text = Path(fake_trials.__file__).read_text()
    out = tmp_path / "out"
    name = _module(tmp_path, monkeypatch, text)
    run_trial(name, seeds=1, out=out)
    run_trial(name, seeds=1, out=out, resume=True)
    name = _module(tmp_path, monkeypatch, text.replace('"error": 1.0', '"error": 2.0'))
    with pytest.raises(InputError, match="holds a trial with another version of its code: choose") as caught:
        run_trial(name, seeds=1, out=out, resume=True)
    assert "\n" not in str(caught.value)
    assert run_trial(name, seeds=1, out=out).cells[0].metrics["error"] == 2.0


def test_the_fingerprint_follows_the_method_and_what_it_takes_from_its_family(monkeypatch):
    row = method("bof4")
    taken = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: taken.append(path) or real(path))
    first = _code(row.slug, row.trial_module)
    assert [p.name for p in taken] == ["_blockwise.py", "_bof4.py", "bof4.py"]
    for changed in range(3):
        edited = taken[changed]
        monkeypatch.setattr(Path, "read_bytes", lambda p, edited=edited: real(p) + b"#" * (p == edited))
        assert _code(row.slug, row.trial_module) != first


def test_a_damaged_cells_file_is_refused(tmp_path):
    out = tmp_path / "out"
    run_trial(fake_trials.GOOD, seeds=1, out=out)
    lines = (out / "cells.jsonl").read_text().splitlines()
    (out / "cells.jsonl").write_text("\n".join([lines[0], "{", lines[2]]) + "\n")
    with pytest.raises(InputError, match="is damaged in line 2"):
        run_trial(fake_trials.GOOD, seeds=1, out=out, resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": -1}, "seeds is -1"),
        ({"seeds": 1.5}, "seeds is 1.5"),
        ({"seeds": True}, "seeds is True"),
        ({"workers": 0}, "workers is 0"),
        ({"budget": "huge"}, "no budget is called 'huge': choose quick or full"),
        ({"resume": True}, "resume needs the directory"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError) as caught:
        run_trial(fake_trials.GOOD, **options)
    assert message in str(caught.value)


def test_an_unknown_method_or_one_without_a_trial(monkeypatch):
    with pytest.raises(InputError, match="no method is called 'nothing-such'"):
        run_trial("nothing-such")
    monkeypatch.setattr("assay.core.catalogue.Method.trial_module", "assay.trials.lens.nothing_such")
    with pytest.raises(InputError, match="nerve has no trial yet"):
        run_trial("nerve")
    monkeypatch.setattr("assay.core.catalogue.Method.trial_module", "assay.trials.no_family.nothing_such")
    with pytest.raises(InputError, match="nerve has no trial yet"):
        run_trial("nerve")
    with pytest.raises(AssayError, match="has no trial called NOTHING"):
        run_trial(f"{FAKE}:NOTHING")


def test_a_trial_must_be_importable():
    loose = Trial(**vars(fake_trials.GOOD))
    with pytest.raises(InputError, match="must stand at the top of the module"):
        run_trial(loose)


def test_a_subject_of_another_kind_is_refused(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("words\n")
    with pytest.raises(NotApplicable, match=r"fake is tried on table; .* is texts"):
        run_trial(fake_trials.GOOD, on=text)
    with pytest.raises(InputError, match="does not exist"):
        run_trial(fake_trials.GOOD, on=tmp_path / "nothing")
    with pytest.raises(InputError, match="no built-in subject"):
        run_trial(fake_trials.GOOD, on="builtin:no-such")
