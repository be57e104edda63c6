"""The second moment that an edit needs: given, found, or collected where there is none yet."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from factscope.errors import BadSetting
from factscope.stats.find import moment_for
from factscope.stats.moment import SecondMoment

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Moment", "settle_moment", "told"]

log = logging.getLogger(__name__)

Moment = SecondMoment | Sequence[SecondMoment] | Sequence[Path] | Literal["find", "identity"]
"""C: as it is, of several layers, in files or folders, wherever it is found, or none (C = I)."""


def settle_moment(lm: "LM", layer: int, moment: Moment) -> SecondMoment | None:
    """C of a layer; None for the identity."""
    if moment == "identity":
        log.warning("C is left out: this is not the paper's method, and disturbs other facts more")
        return None
    if isinstance(moment, SecondMoment):
        moment.check(lm, layer)
        return moment
    for given in () if isinstance(moment, str) else moment:
        if isinstance(given, SecondMoment) and given.layer == layer:
            return settle_moment(lm, layer, given)
    paths = [] if isinstance(moment, str) else [x for x in moment if isinstance(x, Path)]
    found = moment_for(lm, layer, paths)
    if found is None:
        raise BadSetting(
            f"there are no statistics of layer {layer} of {lm.name} yet; collect them once with "
            f"`factscope stats --model {lm.name} --layer {layer}` (--text FILE for your own text)"
        )
    return found


def told(moment: Moment | None) -> Any:
    """What an edit's settings say of it."""
    if isinstance(moment, SecondMoment):
        return {"layer": moment.layer, "tokens": moment.tokens, "corpus": moment.corpus}
    if moment is None or isinstance(moment, str):
        return moment or "identity"
    return [told(x) if isinstance(x, SecondMoment) else str(x) for x in moment]
