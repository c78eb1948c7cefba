from assay.core.progress import Progress, silent


def test_silent_takes_notice_and_says_nothing(capsys):
    watcher: Progress = silent
    assert watcher(1, None, "step") is None
    assert capsys.readouterr() == ("", "")
