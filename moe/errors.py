"""How a run may end: exit codes, and the errors that carry them. At the bottom of the import order, and torch-free.

An error raised for one of these reasons ends the process with its code, so that a scheduler or a script can tell a
wrong recipe (do not try again) from a stop on request (start again, go on from the checkpoint).
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What `switchyard` hands to the shell. 1 is left to errors that nobody foresaw."""

    done = 0
    """The run came to its last step."""
    unforeseen = 1
    """An error without a class of its own: a fault of ours."""
    bad_config = 2
    """A recipe, an override or the command line is wrong."""
    bad_data = 3
    """Text, tokens or their cache cannot be used."""
    bad_checkpoint = 4
    """A checkpoint is missing, damaged or of another model."""
    numeric_stop = 5
    """Loss or gradients are not finite any more."""
    environment = 6
    """The machine, its devices or the other processes: memory, ports, a killed rank, missing hardware."""
    restart = 75
    """Stopped on request with a good checkpoint: start again to go on (EX_TEMPFAIL of sysexits.h)."""


class SwitchyardError(Exception):
    """Base of the errors that end a run with a known code. The message names path, value, rule and a way out."""

    exit_code: ExitCode = ExitCode.unforeseen


class DataError(SwitchyardError):
    """Text, tokens or their cache cannot be used."""

    exit_code = ExitCode.bad_data


class CheckpointError(SwitchyardError):
    """A checkpoint is missing, damaged or of another model."""

    exit_code = ExitCode.bad_checkpoint


class NumericError(SwitchyardError):
    """Loss or gradients are not finite any more."""

    exit_code = ExitCode.numeric_stop


class EnvironmentProblem(SwitchyardError):
    """The machine, its devices or the launcher's variables do not allow the run."""

    exit_code = ExitCode.environment


class StopRun(SwitchyardError):
    """Not a fault: the run was asked to stop, has saved, and should be started again."""

    exit_code = ExitCode.restart


_STEP_ATTRIBUTE = "switchyard_step"


def note_step(error: BaseException, step: int) -> None:
    """Remember on an error the optimizer step (from 1) at which it arose, for its crash record; a first note stays."""
    if not hasattr(error, _STEP_ATTRIBUTE):
        setattr(error, _STEP_ATTRIBUTE, step)


def step_of(error: BaseException) -> int | None:
    """The step that `note_step` left on an error, or None."""
    return getattr(error, _STEP_ATTRIBUTE, None)
