"""What can go wrong, as one tree. Catch `FactscopeError` for all of it.

FactscopeError            a run failed (exit code 1)
├── NoProgress            a search that did not find what it looked for
├── UnsafeEdit            an edit beyond the guard rails
├── OutOfMemory           more than the device holds, even in the smallest pieces
├── Busy                  a server that has as much to do as it takes on
├── RunStopped            a run that could not go on, as when the disk is full; it can be taken up
└── BadInput              what was asked for cannot be done as asked (exit code 2)
    ├── BadFact           empty prompt, no place for the subject, a broken line in a facts file
    │   ├── SubjectNotFound
    │   └── PromptTooLong
    ├── BadSetting        a flag or setting outside its range
    ├── NoData            no such data set, or none here and none that can be fetched
    ├── UnknownModel      no such short name, folder, file or hub id
    ├── UnknownFamily     no row for this model family in `lm.arch.ARCHS`
    ├── BadModelFile      a GGUF or checkpoint that cannot be read, or is not what its row says
    ├── WrongHash         a download that is not the expected file
    ├── NoNetwork         a download that could not be made
    ├── BadEdit           an edit file that cannot be read, or is for another model
    ├── BadRecord         a records file that cannot be read
    ├── BadStats          statistics of another model or layer, or that cannot be used
    ├── BadStudy          texts that cannot be compared, or answers that are not of the study
    ├── BadWeights        a trained editor's weights for another model or layers, or unreadable
    ├── WrongRun          an output folder that belongs to another run
    ├── TooMuch           more than a server does for one visitor
    ├── NotHere           an edit, a trace or a run that a server does not have
    └── Foreign           a request that another site made

Each message says what was wrong, shows the value and names the next step; the command line
prints it without a traceback.
"""

__all__ = [
    "BadEdit",
    "BadFact",
    "BadInput",
    "BadModelFile",
    "BadRecord",
    "BadSetting",
    "BadStats",
    "BadStudy",
    "BadWeights",
    "Busy",
    "FactscopeError",
    "Foreign",
    "NoData",
    "NoNetwork",
    "NoProgress",
    "NotHere",
    "OutOfMemory",
    "PromptTooLong",
    "RunStopped",
    "SubjectNotFound",
    "TooMuch",
    "UnknownFamily",
    "UnknownModel",
    "UnsafeEdit",
    "WrongHash",
    "WrongRun",
]


class FactscopeError(Exception):
    """A run that failed."""

    exit_code = 1


class NoProgress(FactscopeError):
    """A search that did not find what it looked for."""


class UnsafeEdit(FactscopeError):
    """An edit beyond the guard rails; it can be forced."""


class OutOfMemory(FactscopeError):
    """More than the device holds, even in the smallest pieces."""


class Busy(FactscopeError):
    """A server that has as much to do as it takes on; ask again later."""


class RunStopped(FactscopeError):
    """A run that could not go on; the same command takes it up again."""


class BadInput(FactscopeError):
    """Something the user gave cannot be used as it is."""

    exit_code = 2


class BadFact(BadInput):
    """A prompt or a fact that cannot be traced or edited."""


class SubjectNotFound(BadFact):
    """The subject does not occur in the prompt."""


class PromptTooLong(BadFact):
    """The prompt does not fit in the model's context."""


class BadSetting(BadInput):
    """A flag or setting outside its range."""


class NoData(BadInput):
    """A data set that does not exist, or is not here and cannot be fetched."""


class UnknownModel(BadInput):
    """No such short name, folder, file or hub id."""


class UnknownFamily(BadInput):
    """A model family without a row in the table of architectures."""


class BadModelFile(BadInput):
    """A model file that cannot be read or does not hold what it should."""


class WrongHash(BadInput):
    """A file whose SHA-256 is not the expected one."""


class NoNetwork(BadInput):
    """A file that could not be fetched."""


class BadEdit(BadInput):
    """An edit that cannot be read, or does not belong to this model."""


class BadRecord(BadInput):
    """A records file that cannot be read."""


class BadStats(BadInput):
    """Statistics of another model or layer, or that cannot be used."""


class BadStudy(BadInput):
    """Texts that people cannot be asked to compare, or answers that do not belong to the study."""


class BadWeights(BadInput):
    """Weights of a trained editor that are for another model or layers, or cannot be read."""


class WrongRun(BadInput):
    """An output folder that belongs to another run."""


class TooMuch(BadInput):
    """More than a server does for one visitor."""


class NotHere(BadInput):
    """An edit, a trace or a run that a server does not have."""


class Foreign(BadInput):
    """A request that another site made, or that came under another name."""
