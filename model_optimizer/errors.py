"""The whole error tree. A class exists only where some caller decides differently.

A message says what is wrong, the value seen, what is allowed and what to do. The command line
prints it as one line and ends with `exit_code`; a traceback appears only with `--debug`.
"""

from pathlib import Path


class ModelOptimizerError(Exception):
    """Base of every error that a user can meet; `exit_code` is the command's exit status."""

    exit_code = 1


class ConfigError(ModelOptimizerError):
    """The input is wrong and the user can mend it."""

    exit_code = 2


class StorageError(ModelOptimizerError):
    """A folder cannot take what must be written: full, read-only, or no folder; what was finished before stays finished.

    Like a wrong input, the user mends it (frees space, names another folder) and calls again. It is a class of its own
    because nothing that was being written may count as done.
    """

    exit_code = 2


class GateFailed(ModelOptimizerError):
    """A finished run was not accepted; the report exists at `report`."""

    exit_code = 3

    def __init__(self, message: str, report: Path):
        super().__init__(message)
        self.report = report


class Inconclusive(GateFailed):
    """No gate failed, but one could not be decided with the samples at hand."""

    exit_code = 5


class HealthCheckFailed(ModelOptimizerError):
    """A release does not give the outputs that it was signed with; exit code 3, as for any rejection."""

    exit_code = 3


class UnsupportedError(ModelOptimizerError):
    """The hardware, the runtime or physics cannot do what was asked here."""

    exit_code = 4


class CompileError(ModelOptimizerError):
    """An engine build failed; `reproduce` is the script that repeats it alone."""

    exit_code = 4

    def __init__(self, message: str, reproduce: Path):
        super().__init__(message)
        self.reproduce = reproduce


class MeasurementUnstable(ModelOptimizerError):
    """A measurement never became stable; trying again on a calmer machine may heal it."""

    exit_code = 5


class IntegrityError(ModelOptimizerError):
    """A digest, a signature or a stored entry does not match its content."""

    exit_code = 6


class AwaitingSignOff(ModelOptimizerError):
    """A finished run waits for a reviewer; its bundle is published and not to be deployed."""

    exit_code = 7
