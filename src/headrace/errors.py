"""One family of errors: what was expected, what was found, what to do.

In: three short sentences from the place that noticed. Out: one message that a person can act on.
Every branch has an exit code of its own, so that scripts can tell a wrong run file from a sick store.
"""


class HeadraceError(Exception):
    """Root of everything headrace raises on purpose."""

    exit_code = 1

    def __init__(self, expected: str, found: str, hint: str) -> None:
        super().__init__(expected, found, hint)  # plain args survive pickling between processes

    def __str__(self) -> str:
        return "expected {}, found {}\n\nhint: {}".format(*self.args)


class ConfigError(HeadraceError):
    """A run file, a flag or a combination of settings cannot be used."""

    exit_code = 2


class PlanError(HeadraceError):
    """A plan cannot be computed from what was given."""

    exit_code = 3


class PrepareError(HeadraceError):
    """Chats cannot be turned into token ids and loss masks."""

    exit_code = 4


class TargetError(HeadraceError):
    """A target model cannot be loaded, or does not offer what was asked of it."""

    exit_code = 5


class CaptureError(HeadraceError):
    """States came back wrong, or could not be captured."""

    exit_code = 6


class CodecError(HeadraceError):
    """States cannot be encoded, or bytes do not decode."""

    exit_code = 7


class StoreError(HeadraceError):
    """A states folder is missing, damaged, locked or of another identity."""

    exit_code = 8


class DrafterError(HeadraceError):
    """A drafter cannot be built, loaded or used with this target."""

    exit_code = 9


class TrainError(HeadraceError):
    """Training cannot start or cannot go on."""

    exit_code = 10


class EvaluateError(HeadraceError):
    """An evaluation cannot be made, or its outputs are not the target's."""

    exit_code = 11


class ExportError(HeadraceError):
    """A drafter cannot be written in, or read from, another program's layout."""

    exit_code = 12


class StreamError(HeadraceError):
    """A server cannot be reached, refuses, or cannot serve as it was asked to."""

    exit_code = 13
