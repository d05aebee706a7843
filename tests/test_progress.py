"""Silent shows nothing and fits the protocol."""

from headrace.progress import Progress, Silent


def test_silent_is_a_progress(capsys) -> None:  # type: ignore[no-untyped-def]
    progress: Progress = Silent()
    progress.start("x", None, "samples")
    progress.advance(1, loss=1.0)
    progress.note("y")
    progress.end()
    assert capsys.readouterr() == ("", "")
