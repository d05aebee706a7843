import threading
import time

from headrace.stream.window import Window


def test_answers_wait_for_room_first_come_first_served() -> None:
    window = Window(100, 60.0)
    a, b, c = (window.begin(lambda: None) for _ in range(3))
    assert a.grow(80, 0.0)
    order: list[str] = []

    def take(name: str, size: int) -> None:
        if (b if name == "b" else c).grow(size, 5.0):
            order.append(name)

    first = threading.Thread(target=take, args=("b", 90))
    first.start()
    time.sleep(0.1)
    second = threading.Thread(target=take, args=("c", 10))  # would fit, but b came first
    second.start()
    time.sleep(0.2)
    assert order == []
    a.sent(80)
    first.join(5)
    second.join(5)
    assert order == ["b", "c"]
    assert window.num_bytes == 100
    for answer in (a, b, c):
        answer.end()
        answer.end()
    assert window.num_bytes == 0


def test_what_is_larger_than_the_window_gets_it_alone() -> None:
    window = Window(100, 60.0)
    a, b = window.begin(lambda: None), window.begin(lambda: None)
    assert a.grow(10, 0.0)
    assert not b.grow(500, 0.1)
    a.end()
    assert b.grow(500, 0.1)
    assert not window.begin(lambda: None).grow(1, 0.1)


def test_who_takes_nothing_is_cut_off_when_others_wait_and_the_slowest_first() -> None:
    window = Window(100, 60.0)
    cut: list[str] = []
    slow = window.begin(lambda: cut.append("slow"))
    assert slow.grow(50, 0.0)
    time.sleep(0.3)
    other = window.begin(lambda: cut.append("other"))
    assert other.grow(50, 0.0)
    time.sleep(1.2)
    lively = window.begin(lambda: cut.append("lively"))
    waiting = threading.Thread(target=lambda: lively.grow(40, 3.0))
    waiting.start()
    time.sleep(0.05)
    assert cut == ["slow"]
    slow.end()
    waiting.join(5)
    assert lively.num_bytes == 40
    assert cut == ["slow"]
    assert window.num_cut == 1


def test_who_takes_nothing_for_too_long_is_cut_off_anyway() -> None:
    window = Window(100, 0.2)
    cut: list[str] = []
    idle, slow = window.begin(lambda: cut.append("idle")), window.begin(lambda: cut.append("slow"))
    assert slow.grow(5, 0.0)
    window.cut_stalled()
    assert cut == []
    time.sleep(0.3)
    window.cut_stalled()
    window.cut_stalled()
    assert cut == ["slow"]
    idle.end()
