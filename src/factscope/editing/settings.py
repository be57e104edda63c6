"""Settings of all editing methods: one frozen dataclass per method, one documented field each.

A settings object is the editor: `Rome(layer=5)(lm, facts)` returns an `Edit`. `EDITORS` lists the
presets by method name. Nothing here imports torch; `bind` imports the algorithm when it is needed.

    Rome                      rome.py                 rome, r-rome
    Memit                     memit.py                memit
    FineTune                  finetune.py             ft, ft-l, attn
    KN                        knowledge_neurons.py    kn
    Mend, Ke                  hypernet/editor.py      mend, ke
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Lt

from factscope.editing.editor import Editor
from factscope.errors import BadSetting, FactscopeError
from factscope.facts import SUBJECT_SLOT, Fact
from factscope.progress import Progress, no_progress
from factscope.settings import INTERNAL, Flag, Seed, check

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.editing.finetune import BoundFineTune
    from factscope.editing.hypernet.editor import BoundHypernet
    from factscope.editing.hypernet.model import HypernetWeights
    from factscope.editing.knowledge_neurons import BoundKN
    from factscope.editing.memit import BoundMemit
    from factscope.editing.rome import BoundRome
    from factscope.lm.model import LM
    from factscope.stats.second_moment import SecondMoment

EditToken = Literal["subject-last", "subject-first", "after-subject", "last"]
"""The token at which a fact is written: where its key is read and its value is set."""

KlPosition = Literal["end", "edit-token"]
"""The token of the KL term's prompt after which the next-token distributions are compared."""

Layer = int | Literal["auto"] | None
"""A layer index; "auto" for the layer that a causal trace finds; None for the model's default."""

PrefixLengths = Annotated[tuple[tuple[int, int], ...], Ge(1)]
"""(tokens, number of prefixes) for each length."""

TargetPositions = Literal["each-token", "last-position"]
"""Where the tokens of an object are predicted: each after the tokens before it (teacher forcing),
or all of them at the last position of the prompt."""

SecondMomentSetting: TypeAlias = (
    "SecondMoment | Sequence[SecondMoment] | Sequence[str | Path] | Literal['find', 'identity']"
)
"""C = E[k kᵀ]: a value; one per layer; files or folders to search; "find" to search the usual
folders; "identity" for none (C = I)."""

NeuronSite = Literal["key", "pre-activation"]
"""The input of the MLP's output weight, or the input of its nonlinearity."""

PathRule = Literal["radau", "ends"]
"""Quadrature rules with a node at the start of the path, which the correction of `KN` needs."""

FineTuneMethod = Literal["ft", "ft-l", "attn"]


JOIN = ". "
"""Separates a prefix from the prompt."""


def read_prefixes(file: str | Path) -> tuple[str, ...]:
    """Prefixes from a file, one per line: a text, or a template with {} where the prompt goes."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file cannot be read ({error})") from error
    if not any(line.strip() for line in lines):
        raise ValueError("the file is empty; write one prefix per line, or leave it out")
    prefixes = [
        line.split(SUBJECT_SLOT)[0] if SUBJECT_SLOT in line else line + JOIN
        for line in lines
        if line
    ]
    # "{}" alone is the bare prompt, which is always among the contexts.
    return tuple(prefix for prefix in prefixes if prefix.strip())


def _parse_stats(given: Any) -> Any:
    words = [given] if isinstance(given, str) else list(given)
    if words in (["find"], ["none"]):
        return "find" if words == ["find"] else "identity"
    if "none" in words:
        raise ValueError("give files or folders, or none, not both")
    for word in words:
        if not Path(word).exists():
            raise ValueError(f"{word} does not exist; `factscope stats` collects statistics")
    return tuple(map(Path, words))


STATS = Flag(name="stats", parse=_parse_stats, repeated=True)
"""The flag of `second_moment`."""


@dataclass(frozen=True, kw_only=True)
class PrefixSettings:
    """Context prefixes: short texts before the prompt, so that an edit holds in any context."""

    prefixes: Annotated[tuple[str, ...] | None, Flag(parse=read_prefixes)] = None
    """Texts to put before the prompt (as a flag, a file with one per line); None lets the model
    generate them."""
    prefix_lengths: PrefixLengths = ((10, 5),)
    """Prefixes to generate, as pairs of length and number (as a flag, 5x10,10x10); none for no
    prefixes."""
    prefix_bos_counts: bool = False
    """Count BOS as one of these tokens, as the authors' code does."""
    seed: Annotated[Seed, Flag(name="prefix-seed")] = 0
    """Seed of the prefixes and, for ROME, of the contrast keys and sentences."""


# ---- ROME and MEMIT


@dataclass(frozen=True, kw_only=True)
class ValueSearch:
    """How v* is found: Adam on δ, which is added to the value at the edit token."""

    steps: Annotated[int | None, Ge(1)] = None
    """Loss evaluations at most; δ is updated after each but the last. None for the model's
    default, mostly 20."""
    lr: Annotated[float | None, Gt(0)] = None
    """Learning rate of Adam: the length of its first step, as a multiple of the norm that `unit`
    names. None for the model's default, mostly 0.5 for ROME and 0.1 for MEMIT."""
    lr_form: Literal["relative", "paper"] = "relative"
    """"relative" as above; or, as in the paper's code, how far a step moves each entry of δ, which
    depends on the scale of the model."""
    unit: Literal["layer", "fact"] = "layer"
    """The norm that `lr`, `clamp` and `weight_decay` are relative to: the usual norm of values at
    this layer (the median over built-in facts); or, as in the paper's code, ‖v₀‖, the norm of the
    fact's own value after the bare prompt."""
    stop_loss: float = 0.05
    """Stop as soon as the loss is below this."""
    stop_probability: Annotated[float | None, Gt(0), Lt(1)] = None
    """Stop also as soon as every token of the new object has at least this probability in every
    context; None never does."""
    retry: bool = True
    """If the new object is not the most likely one after the edit, continue the search once, for
    as many steps again. --no-retry does not, as in the paper's code."""
    clamp: Annotated[float | Literal["inf"] | None, Gt(0)] = None
    """Largest ‖δ‖, as a multiple of the norm that `unit` names; "inf" for no limit. None for the
    model's default, mostly 4 for ROME (1 without published settings) and 0.75 for MEMIT."""
    kl_weight: Annotated[float, Ge(0)] = 0.0625
    """Weight of the KL term, KL(edited ‖ unedited) after "{subject} is a"."""
    kl_position: KlPosition = "end"
    """Where the KL term is computed: at the end of that prompt, or, as in the paper's code, at the
    edit token."""
    weight_decay: Annotated[float | None, Ge(0)] = None
    """Weight of the term that keeps δ small. None for the model's default, mostly 0.01."""
    weight_decay_form: Literal["relative", "paper"] = "relative"
    """‖δ‖ divided by the norm that `unit` names, which does not depend on the scale of the model;
    or, as in the paper's code, by its square, which does."""

    def __post_init__(self) -> None:
        if self.clamp == math.inf:  # text, because JSON has no infinity
            object.__setattr__(self, "clamp", "inf")
        check(self)

    @property
    def max_steps(self) -> int:
        """`steps`, or its usual default."""
        return 20 if self.steps is None else self.steps

    @property
    def max_norm(self) -> float:
        """`clamp`, or its usual default."""
        return 4.0 if self.clamp is None else float(self.clamp)

    def step_size(self, norm: Any, width: int) -> Any:
        """How far Adam's first step moves each entry of δ, given the norm that `unit` names."""
        lr = 0.5 if self.lr is None else self.lr
        return norm * (lr / width**0.5) if self.lr_form == "relative" else norm * 0 + lr

    @property
    def decay_weight(self) -> float:
        """`weight_decay`, or its usual default."""
        return 0.01 if self.weight_decay is None else self.weight_decay

    def resolve(
        self, *, steps: int = 20, clamp: float = 4.0, lr: float = 0.5, weight_decay: float = 0.01
    ) -> "ValueSearch":
        """The same with a model's defaults where nothing was given."""
        return replace(
            self,
            steps=self.steps or steps,
            clamp=self.clamp or clamp,
            lr=self.lr or lr,
            weight_decay=weight_decay if self.weight_decay is None else self.weight_decay,
        )


@dataclass(frozen=True, kw_only=True)
class Rome(PrefixSettings, Editor):
    """ROME: one fact, one layer, a rank-one update (Meng et al., 2022)."""

    layer: Layer = None
    """Layer whose MLP output weight is edited: an index, None for the model's default, or "auto"
    for the layer that a causal trace of the fact's old object finds (of several facts in one edit,
    the median); a fact without a clear effect is refused. It does not edit better than the
    default layer."""
    token: EditToken = "subject-last"
    """Token at which the fact is written."""
    prefix_lengths: PrefixLengths = ((5, 10), (10, 10))
    key: Literal["mean-and-bare", "mean", "bare"] = "mean-and-bare"
    """Keys whose values change by exactly δ: the mean over contexts and the bare prompt's, only the
    mean, or only the bare prompt's, in the direction of the mean, as in the paper's code, where
    that mismatch sometimes gives an update that breaks the model."""
    contrast_tolerance: Annotated[float | Literal["inf"] | None, Gt(0)] = None
    """Spare other subjects with the same last token, and first tokens of texts, which C does not
    protect enough: keys of the edit token after other beginnings of the subject, and of first
    tokens, are added to C with a weight of 1/ε. The smaller this ε, the less they change, and the
    more the edit depends on the context. "inf" for none. None for the model's default, mostly
    "inf"."""
    context_tolerance: Annotated[float | Literal["inf"] | None, Gt(0)] = None
    """Make the value change by about δ in every context: the differences of the fact's keys, after
    the prefixes and 30 sentences, from their mean are added to C with a weight of 1/ε. "inf" for
    none. None for 0.3 with contrast keys, otherwise "inf"."""
    scale_delta: bool = True
    """Search with the fraction of δ that the edit will add in each context. --no-scale-delta adds
    the whole δ in every context, as in the paper's code."""
    value: Literal["mean", "bare"] = "mean"
    """Value that δ is added to: the mean over contexts, or that of the bare prompt."""
    second_moment: Annotated[SecondMomentSetting, STATS] = "find"
    """C (as a flag: files or folders of `factscope stats`, repeatable, or none for C = I, which is
    not the paper's method)."""
    ridge: Annotated[float, Ge(0)] = 1e-3
    """Added to the diagonal of C, as a fraction of its mean."""
    search: ValueSearch = field(default_factory=ValueSearch)
    """How v* is found."""
    many: Literal["jointly", "sequentially"] = "jointly"
    """Several facts in one edit: one update with Ŵ k = v for all of them, or one update after the
    other, each computed on the model with those before it, as in the paper's code."""
    facts_per_pass: Annotated[int | None, Ge(1)] = None
    """Facts per batch of the value search; None for what fits into memory."""

    @property
    def method(self) -> str:
        """`r-rome` where the mean key is used everywhere and δ is added to the bare value."""
        return "r-rome" if (self.key, self.value) == ("mean", "bare") else "rome"

    def bind(self, lm: "LM", facts: Sequence[Fact]) -> "BoundRome":
        """ROME on this model; the facts choose the layer where it is "auto"."""
        from factscope.editing.rome import BoundRome

        return BoundRome(self, lm, facts)

    def resolve(self, lm: "LM") -> "Rome":
        """The same with prefixes, layer and C filled in; of layer "auto" only the prefixes."""
        if self.layer == "auto":
            from factscope.editing.contexts import resolve_prefixes

            return replace(self, prefixes=resolve_prefixes(lm, self))
        return replace(self.bind(lm, ()).settings, search=self.search)

    def attempt(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = no_progress
    ) -> "list[Edit | FactscopeError]":
        """An edit for each fact on its own, with layer "auto" each in its own layer."""
        if self.layer != "auto":
            return super().attempt(lm, facts, progress=progress)
        from factscope.editing.defaults import traced_layers

        layers = traced_layers(lm, facts, self.second_moment)
        results: dict[int, Edit | FactscopeError] = {
            i: x for i, x in enumerate(layers) if isinstance(x, FactscopeError)
        }
        for layer in dict.fromkeys(x for x in layers if isinstance(x, int)):
            group = [i for i, x in enumerate(layers) if x == layer]

            def part(fraction: float, count: int = len(group)) -> None:
                progress(fraction * count / len(facts))

            chosen = [facts[i] for i in group]
            edits = replace(self, layer=layer).attempt(lm, chosen, progress=part)
            results |= zip(group, edits, strict=True)
        return [results[i] for i in range(len(facts))]

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        second_moment = describe_second_moment(self.second_moment)
        return {**vars(self), "second_moment": second_moment, "search": asdict(self.search)}


PAPER_SEARCH = ValueSearch(
    lr=0.5,
    lr_form="paper",
    unit="fact",
    retry=False,
    kl_position="edit-token",
    weight_decay=0.5,
    weight_decay_form="paper",
)

PAPER_ROME = Rome(
    prefix_bos_counts=True,
    key="bare",
    contrast_tolerance="inf",
    scale_delta=False,
    value="bare",
    ridge=0.0,
    many="sequentially",
    search=PAPER_SEARCH,
)
"""What the paper's code computes; `Rome()` is the corrected method."""

R_ROME = replace(PAPER_ROME, key="mean")
"""r-ROME: the paper's code with the mean key everywhere (Gupta et al., 2024)."""


@dataclass(frozen=True, kw_only=True)
class Memit(PrefixSettings, Editor):
    """MEMIT: many facts at once, spread over several layers (Meng et al., 2023)."""

    layers: tuple[int, ...] | None = None
    """Layers that are edited, in ascending order; None for the model's default."""
    covariance_weight: Annotated[float | None, Gt(0)] = None
    """λ: weight of C against the facts' keys; None for the model's default."""
    token: EditToken = "subject-last"
    """Token at which the facts are written."""
    key: Literal["mean", "half-bare"] = "mean"
    """Key of a fact: the mean over all contexts; or, as in the authors' code, the mean of the bare
    prompt's key and of the mean after the prefixes."""
    second_moment: Annotated[SecondMomentSetting, STATS] = "find"
    """C of every layer (as a flag: files or folders of `factscope stats`, repeatable, or none for
    C = I)."""
    ridge: Annotated[float, Ge(0)] = 1e-3
    """Added to the diagonal of C, as a fraction of its mean."""
    search: ValueSearch = field(default_factory=ValueSearch)
    """How the states z are found."""
    facts_per_pass: Annotated[int | None, Ge(1)] = None
    """Facts per batch of the value search; None for what fits into memory."""

    @property
    def method(self) -> str:
        """`memit`"""
        return "memit"

    def bind(self, lm: "LM", facts: Sequence[Fact] = ()) -> "BoundMemit":
        """MEMIT on this model, every default resolved."""
        from factscope.editing.memit import BoundMemit

        return BoundMemit(self, lm)

    def resolve(self, lm: "LM") -> "Memit":
        """The same with layers, prefixes and C filled in."""
        resolved = self.bind(lm).settings
        return replace(resolved, search=self.search, covariance_weight=self.covariance_weight)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        second_moment = describe_second_moment(self.second_moment)
        return {**vars(self), "second_moment": second_moment, "search": asdict(self.search)}


PAPER_MEMIT = Memit(
    prefix_bos_counts=True,
    key="half-bare",
    ridge=0.0,
    search=PAPER_SEARCH,
)
"""What the authors' code computes."""


def describe_second_moment(moment: "SecondMomentSetting | None") -> Any:
    """C in the settings of an edit: what it was computed from, not its entries."""
    if moment is None or isinstance(moment, str):
        return moment or "identity"
    if isinstance(moment, Sequence):
        return [str(x) if isinstance(x, Path) else describe_second_moment(x) for x in moment]
    return {"layer": moment.layer, "tokens": moment.tokens, "corpus": moment.corpus}


# ---- fine-tuning


@dataclass(frozen=True, kw_only=True)
class FineTune(Editor):
    """FT, FT+L and AttnEdit: Adam on the weights of one layer."""

    layer: int | None = None
    """Layer that is trained; None for the model's default."""
    weights: Annotated[Literal["mlp", "attn"], INTERNAL] = "mlp"
    """What is trained: the MLP's output weight, or the query, key and value projections."""
    max_change: Annotated[float | Literal["default"] | None, Gt(0)] = None
    """Largest change of an entry (the paper's ε); None for no limit, "default" for the model's."""
    steps: Annotated[int, Ge(1)] = 25
    """Optimiser steps at most."""
    lr: Annotated[float, Gt(0)] = 5e-4
    """Learning rate of Adam."""
    stop_loss: float = 0.01
    """Stop as soon as the loss is below this: 0.01 in the paper's code; its text says 0.03."""
    objective: TargetPositions = "each-token"
    """Loss: mean of -log P over the tokens of the object, each after the tokens before it; or, as
    in the paper's code, all at the last position of the prompt, wrong for objects of several
    tokens."""
    bias: bool = False
    """Train the biases of these modules too, as the paper's code does."""
    facts_per_pass: Annotated[int | None, Ge(1)] = None
    """Facts per batch; None for what fits into memory."""

    @property
    def method(self) -> FineTuneMethod:
        """`attn` for attention weights, otherwise `ft` without and `ft-l` with a limit."""
        if self.weights == "attn":
            return "attn"
        return "ft" if self.max_change is None else "ft-l"

    def bind(self, lm: "LM", facts: Sequence[Fact] = ()) -> "BoundFineTune":
        """Fine-tuning on this model, every default resolved."""
        from factscope.editing.finetune import BoundFineTune

        return BoundFineTune(self, lm)

    def resolve(self, lm: "LM") -> "FineTune":
        """The same with the model's layer and limit filled in."""
        return self.bind(lm).settings


FT = FineTune()
"""FT: fine-tuning without a limit."""
FT_L = FineTune(max_change="default")
"""FT+L: fine-tuning with a limit on the change of every entry."""
ATTN_EDIT = FineTune(weights="attn", max_change="default", lr=1e-3)
"""AttnEdit: the same on attention weights."""


def _as_in_paper(settings: FineTune) -> FineTune:
    """What the paper's code does, though its text mentions neither."""
    return replace(settings, objective="last-position", bias=True)


# ---- knowledge neurons


@dataclass(frozen=True, kw_only=True)
class KN(PrefixSettings, Editor):
    """Knowledge Neurons: edit the MLP neurons that the old object is attributed to."""

    steps: Annotated[int, Ge(2), Flag(name="integration-steps")] = 4
    """Quadrature nodes on each interval of the attribution path."""
    rule: PathRule = "radau"
    """Quadrature rule: Radau, or, as in the paper's code, equally spaced nodes with equal weights,
    which gives the ends of the path too much weight."""
    tolerance: Annotated[float | None, Gt(0)] = 0.02
    """Halve the interval where the attributions of a layer differ from the change of the
    probability by more than this fraction; None never does, as in the paper's code."""
    site: NeuronSite = "key"
    """What is attributed: the input of the MLP's output weight, whose columns the edit changes; or,
    as in the paper's code, the input of the nonlinearity."""
    objective: TargetPositions = "each-token"
    """An answer of several tokens: each after the tokens before it, or, as in the paper's code, all
    at the last position of the prompt. Their attributions are averaged."""
    leading_space: bool = True
    """Tokenize objects with the space before them. --no-leading-space tokenizes them without it, as
    in the paper's code, which gives other tokens."""
    threshold: Annotated[float, Ge(0), Lt(1)] = 0.2
    """Coarse selection: neurons whose attribution exceeds this fraction of the highest one in a
    context."""
    context_fraction: Annotated[float, Ge(0), Lt(1)] = 0.7
    """Fine selection: neurons selected in more than this fraction of the contexts; if there are
    none, those selected in the most contexts."""
    max_neurons: Annotated[int | None, Ge(1)] = 10
    """Neurons to edit at most; None for all."""
    new_weight: float = 0.5
    """How much of the new object's embedding is added. 0.5 moved as many of 16 CounterFact cases as
    1 on the default model, with less effect on neighbours and within the check limits."""
    old_weight: float = 0.5
    """How much of the old object's embedding is subtracted."""
    old: Literal["answer", "predicted"] = "answer"
    """Which embedding is subtracted: that of the attributed object, or, as in the paper's code,
    that of the most likely next token."""
    unit: Annotated[Literal["column", "embedding"], Flag(name="weight-unit")] = "column"
    """Length of a weight of 1: that of the neuron's own column, which suits a model of any scale,
    as Dai et al. did; or, as in the paper's code, that of the embedding."""
    signed: bool = True
    """Negate the change of a neuron whose activation is negative, as are half of the neurons of a
    gated MLP. --no-signed does not, as in the paper's code, and such a neuron then works against
    the new object."""
    pooling: Literal["mean", "sum"] = "mean"
    """Embedding of an object of several tokens: their mean, or, as in the paper's code, their
    sum."""
    embedding: Literal["output", "input"] = "output"
    """Which embeddings: the output embeddings, or, as in the paper's code, the input embeddings. In
    many models they are the same."""
    facts_per_pass: Annotated[int | None, Ge(1)] = None
    """Facts per batch; None for what fits into memory."""

    @property
    def method(self) -> str:
        """`kn`"""
        return "kn"

    def bind(self, lm: "LM", facts: Sequence[Fact] = ()) -> "BoundKN":
        """Knowledge Neurons on this model, every default resolved."""
        from factscope.editing.knowledge_neurons import BoundKN

        return BoundKN(self, lm)

    def resolve(self, lm: "LM") -> "KN":
        """The same with the prefixes filled in."""
        return replace(self, prefixes=self.bind(lm).prefixes)


PAPER_KN = KN(
    steps=20,
    rule="ends",
    tolerance=None,
    site="pre-activation",
    objective="last-position",
    leading_space=False,
    context_fraction=0.0,
    max_neurons=None,
    prefix_lengths=(),
    new_weight=1.0,
    old_weight=2.0,
    old="predicted",
    unit="embedding",
    signed=False,
    pooling="sum",
    embedding="input",
)
"""What the paper's code computes: one prompt, no fine selection; it adds the new object's embedding
once and subtracts that of the model's prediction twice."""


# ---- hypernetworks

H = TypeVar("H", bound="HypernetEditor")


@dataclass(frozen=True, kw_only=True)
class HypernetEditor(Editor):
    """An editor with a trained network: MEND or KE."""

    weights: "HypernetWeights | str | Path | None" = None
    """Trained network: a file written by `factscope train`, or its loaded content."""
    scale: float = 1.0
    """Factor that every edit is multiplied by."""
    facts_per_pass: Annotated[int | None, Ge(1)] = None
    """Facts per batch; None for what suits the device."""

    def __post_init__(self) -> None:
        if isinstance(self.weights, str | Path):
            from factscope.editing.hypernet.model import load_weights

            object.__setattr__(self, "weights", load_weights(Path(self.weights), self.method))
        super().__post_init__()

    @classmethod
    def load(cls: type[H], path: str | Path, **settings: Any) -> H:
        """The editor with the weights of a file."""
        return cls(weights=Path(path), **settings)

    @property
    def trained(self) -> "HypernetWeights":
        """The weights; an error where none were given."""
        if self.weights is None:
            raise BadSetting(
                f"{self.method} needs trained weights: give a file (--weights FILE), which "
                f"`factscope train {self.method}` writes"
            )
        assert not isinstance(self.weights, str | Path)
        return self.weights

    @property
    def row(self) -> str:
        """Name in the paper's tables, which depends on the training data."""
        return self.trained.row

    def bind(self, lm: "LM", facts: Sequence[Fact] = ()) -> "BoundHypernet":
        """The network on this model."""
        from factscope.editing.hypernet.editor import BoundHypernet

        return BoundHypernet(self, lm)

    def resolve(self: H, lm: "LM") -> H:
        """The same; an error where the weights are for another model."""
        self.bind(lm)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; the weights by their hash."""
        return {"weights_sha256": self.trained.sha256, "scale": self.scale, "method": self.method}


@dataclass(frozen=True, kw_only=True)
class Mend(HypernetEditor):
    """MEND: a network transforms the factors of the gradient (Mitchell et al., 2022)."""

    @property
    def method(self) -> str:
        """`mend`"""
        return "mend"


@dataclass(frozen=True, kw_only=True)
class Ke(HypernetEditor):
    """KE: an LSTM reads the fact and gates the gradient (De Cao et al., 2021)."""

    @property
    def method(self) -> str:
        """`ke`"""
        return "ke"


# ---- by name

EDITORS: dict[str, dict[str, Any]] = {
    "rome": {"default": Rome(), "paper": PAPER_ROME},
    "r-rome": {"default": R_ROME, "paper": R_ROME},
    "ft": {"default": FT, "paper": _as_in_paper(FT)},
    "ft-l": {"default": FT_L, "paper": _as_in_paper(FT_L)},
    "attn": {"default": ATTN_EDIT, "paper": _as_in_paper(ATTN_EDIT)},
    "kn": {"default": KN(), "paper": PAPER_KN},
    "memit": {"default": Memit(), "paper": PAPER_MEMIT},
    "mend": {"default": Mend(), "paper": Mend()},
    "ke": {"default": Ke(), "paper": Ke()},
}
"""Method → preset → editor. `paper` is what the authors' code computes."""


def editor(method: str, preset: str = "default", **settings: Any) -> Editor:
    """The editor of a method and preset with some settings changed; None leaves one unchanged."""
    if method not in EDITORS:
        raise BadSetting(f"method is {method!r}; choose from {', '.join(EDITORS)}")
    presets = EDITORS[method]
    if preset not in presets:
        raise BadSetting(f"preset is {preset!r}; {method} has {', '.join(presets)}")
    base = presets[preset]
    changed = {name: value for name, value in settings.items() if value is not None}
    known = {item.name for item in fields(base)}
    unknown = [name for name in changed if name not in known]
    if unknown:
        raise BadSetting(
            f"{method} has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}"
        )
    return replace(base, **changed)
