import pickle

import pytest

from headrace import errors
from headrace.errors import HeadraceError

FAMILY = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HeadraceError)]


def test_an_error_says_what_was_expected_what_was_found_and_what_to_do() -> None:
    error = HeadraceError("a folder", "a file", "make a folder")
    assert str(error) == "expected a folder, found a file\n\nhint: make a folder"


@pytest.mark.parametrize("kind", FAMILY)
def test_an_error_survives_pickling_between_processes(kind: type[HeadraceError]) -> None:
    back = pickle.loads(pickle.dumps(kind("a", "b", "c")))
    assert type(back) is kind
    assert str(back) == str(kind("a", "b", "c"))


def test_every_branch_has_an_exit_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in FAMILY]
    assert len(set(codes)) == len(codes) == 13
    assert all(0 < code < 126 for code in codes)  # 0 is success, 126 and up belong to the shell


@pytest.mark.parametrize("kind", FAMILY)
def test_every_error_is_documented_and_in_the_family(kind: type[HeadraceError]) -> None:
    assert kind.__doc__
    assert kind is HeadraceError or kind.__base__ is HeadraceError
