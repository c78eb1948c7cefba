import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation

from assay.core.progress import Progress, silent


def test_silent_takes_notice_and_says_nothing(capsys):
    watcher: Progress = silent
    assert watcher(1, None, "step") is None
    assert capsys.readouterr() == ("", "")


def test_it_can_be_checked_at_run_time():
    @beartype
    def work(progress: Progress = silent) -> None:
        progress(1, 2, "step")

    seen = []
    work(lambda *step: seen.append(step))
    work()
    assert seen == [(1, 2, "step")]
    assert isinstance(silent, Progress)
    with pytest.raises(BeartypeCallHintParamViolation):
        work(5)
