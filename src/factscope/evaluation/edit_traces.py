"""Trace a fact before and after an edit: where did the edit move the effect?

The noise is the same in all traces. With the metric logit-difference, the old and the new object
are compared with each other.
"""

from dataclasses import replace
from functools import partial

from factscope.editing.edit import Edit
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.progress import Progress, shown, split
from factscope.records import EditTraces
from factscope.tracing.corruption import default_noise_scale
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import trace


def trace_edit(
    lm: LM,
    edit: Edit,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    old: str | None = None,
    new: str | None = None,
    name: str | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> EditTraces:
    """Trace the fact in the unedited model, and both answers in the edited one.

    `old` is by default what the unedited model predicts; `new` the target of the edited fact with
    the same subject, or what the edited model predicts. `name` is that of the edited model in the
    records. The checks of the edit are not repeated: a broken model can be traced too.
    """
    settings = settings or Tracing()
    scale = default_noise_scale(lm, settings.corruption, [fact])
    targets = [own.target for own in edit.facts if own.subject == fact.subject]
    new, predicted = new or next(iter(targets), None), old is None
    run = partial(trace, fact=fact, settings=settings, scale=scale, memory=memory)
    edited = replace(lm, name=name or f"{lm.name} + edit")
    with shown(progress) as report:
        first, second, third = split(report, [1, 1, 1])
        before = run(lm, answer=old, foil=new, progress=first)
        old = before.answer
        with edit.applied(edited, force=True):
            after = run(edited, answer=new, foil=old, progress=second)
            # The token itself where it is predicted: its text may be tokenized differently.
            same = [before.answer_id] if predicted else old
            old_after = run(edited, answer=same, foil=new, progress=third)
    return EditTraces(before=before, after=after, old_after=old_after)
