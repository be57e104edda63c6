"""All errors as one tree. Catch `FactscopeError` for any of them.

FactscopeError: a run failed (exit code 1)
├── EditDidNotTake (exit code 3)
├── DidNotConverge, UnsafeEdit, OutOfMemory, ServerBusy, RunInterrupted, FolderInUse
└── BadInput: the input or a setting cannot be used (exit code 2)
    ├── BadFact, with SubjectNotFound and PromptTooLong
    ├── BadSetting, DataNotFound, DownloadFailed, HashMismatch
    ├── UnknownModel, UnknownFamily, BadModelFile
    ├── BadEdit, BadEditorWeights, BadRecord, BadRunFolder, BadStats, BadStudy, BadCalibration
    └── LimitExceeded, NotFound, ForbiddenOrigin (of the server)

Every message says what is wrong, shows the value and names the next step. The command line
prints it without a traceback.
"""


class FactscopeError(Exception):
    """A run failed."""

    exit_code = 1


class DidNotConverge(FactscopeError):
    """An edit's optimisation failed, or a training diverged."""


class UnsafeEdit(FactscopeError):
    """An edit failed its checks; it can be forced."""


class EditDidNotTake(FactscopeError):
    """With --require: the new object is not the most likely one after the edit."""

    exit_code = 3


class OutOfMemory(FactscopeError):
    """The smallest batch does not fit on the device."""


class ServerBusy(FactscopeError):
    """The server's job queue is full; try again later."""


class RunInterrupted(FactscopeError):
    """A run cannot continue; the same command resumes it."""


class FolderInUse(FactscopeError):
    """Another process writes to the folder."""


class BadInput(FactscopeError):
    """The input or a setting cannot be used."""

    exit_code = 2


class BadFact(BadInput):
    """A prompt or a fact that cannot be traced or edited."""


class SubjectNotFound(BadFact):
    """The subject does not occur in the prompt."""


class PromptTooLong(BadFact):
    """The prompt does not fit in the model's context."""


class BadSetting(BadInput):
    """A flag or setting outside its range."""


class DataNotFound(BadInput):
    """An unknown data set, or one that is neither local nor downloadable."""


class UnknownModel(BadInput):
    """No such short name, folder, file or hub id."""


class UnknownFamily(BadInput):
    """A model family without an entry in `lm.families.FAMILIES`."""


class BadModelFile(BadInput):
    """A model file that cannot be read or does not fit its family."""


class HashMismatch(BadInput):
    """A file whose SHA-256 is not the expected one."""


class DownloadFailed(BadInput):
    """A download that failed."""


class BadEdit(BadInput):
    """An edit that cannot be read, or belongs to another model."""


class BadRecord(BadInput):
    """A records file that cannot be read."""


class BadStats(BadInput):
    """Unusable statistics, or those of another model or layer."""


class BadStudy(BadInput):
    """Texts that cannot be compared, or answers to another study."""


class BadCalibration(BadInput):
    """A calibration file that cannot be read, or is of another model."""


class BadEditorWeights(BadInput):
    """A trained editor's weights are unreadable or for another model or layers."""


class BadRunFolder(BadInput):
    """An output folder that belongs to another run or cannot be resumed."""


class LimitExceeded(BadInput):
    """A request beyond the server's limits per session."""


class NotFound(BadInput):
    """No such edit, trace or run on the server."""


class ForbiddenOrigin(BadInput):
    """A request from another site or under another host name."""
