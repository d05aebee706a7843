import os
import signal
import threading

import pytest

from headrace.train.stop import StopRequest, leave


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_second_finds_the_old_handler(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda n, _: seen.append(n))
    try:
        with StopRequest() as stop:
            assert stop.signal is None
            os.kill(os.getpid(), number)
            assert stop.signal is number
            assert seen == []
            os.kill(os.getpid(), number)
            assert seen == [number]
        os.kill(os.getpid(), number)
        assert seen == [number, number]
    finally:
        signal.signal(number, before)


def test_leaving_says_which_signal_it_was() -> None:
    with pytest.raises(KeyboardInterrupt):
        leave(signal.SIGINT)
    with pytest.raises(SystemExit) as left:
        leave(signal.SIGTERM)
    assert left.value.code == 143


def test_outside_the_main_thread_nothing_is_watched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    during: list[object] = []

    def work() -> None:
        with StopRequest():
            during.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert during == [before]
