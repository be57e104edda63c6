"""Settings of `factscope stats`. No torch: the command line derives its flags from them."""

import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from factscope.errors import BadSetting
from factscope.settings import Seed, check


@dataclass(frozen=True, kw_only=True)
class StatsSettings:
    """Collection of second moments."""

    tokens: Annotated[int, Ge(1)] = 100_000
    """Number of tokens to read."""
    seq_length: Annotated[int | None, Ge(2)] = None
    """Tokens per sequence; by default 256, or the model's context if that is shorter."""
    batch_size: Annotated[int | None, Ge(1)] = None
    """Sequences per forward pass; by default chosen for the device."""
    seed: Seed = 0
    """Seed for the order of the documents, or for generated text."""
    convergence: Annotated[float | None, Gt(0)] = None
    """Stop early once two halves of the text differ by less than this, e.g. 0.05."""
    movement: Annotated[float | None, Gt(0)] = None
    """Stop early once the direction C⁻¹k in which built-in facts are written moves by less than
    this fraction of its length when the text doubles, e.g. 0.1."""
    shard: str = "1/1"
    """Read only one part of the sequences, e.g. 1/4; `factscope stats merge` joins the parts."""
    half_precision: bool = False
    """Store the matrices in half precision: a quarter of the file size."""

    def __post_init__(self) -> None:
        check(self)
        match = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise BadSetting(f"shard is {self.shard!r}; write 1/4 to 4/4 for four shards")

    @property
    def shard_index(self) -> int:
        """The shard to read, counted from 0."""
        return int(self.shard.partition("/")[0]) - 1

    @property
    def n_shards(self) -> int:
        """The number of shards."""
        return int(self.shard.partition("/")[2])
