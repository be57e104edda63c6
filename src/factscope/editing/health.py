"""Guard rails: figures that tell an edit which would break the model."""

from dataclasses import asdict, dataclass
from typing import Any

from factscope.errors import UnsafeEdit

__all__ = ["Health", "Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far an edit may go."""

    division_factor: float = 0.02
    """At least: the cosine between the key and C⁻¹k, by which the update is divided. Where it is
    near 0 the update is huge; docs/results.md says what is usual."""
    update_norm: float = 0.5
    """At most: ‖ΔW‖ / ‖W‖ of the weight that changes most."""
    perplexity: float = 1.5
    """At most: by what factor the perplexity of a plain text may grow."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What the guard rails saw of an edit."""

    division_factor: float | None
    """The smallest cosine between a key and the direction it is divided by; None without one."""
    update_norm: float
    """The largest ‖ΔW‖ / ‖W‖ over the changed weights."""
    perplexity_before: float
    perplexity_after: float

    @property
    def perplexity_growth(self) -> float:
        """By what factor the plain text's perplexity grew."""
        return self.perplexity_after / self.perplexity_before

    def complaints(self, limits: Limits | None = None) -> list[str]:
        """Each limit that the edit breaks, by name and with its value."""
        limits = limits or Limits()
        found = []
        if self.division_factor is not None and not self.division_factor >= limits.division_factor:
            found.append(
                f"division factor {self.division_factor:.3g} below {limits.division_factor:g}"
            )
        if not self.update_norm <= limits.update_norm:
            found.append(
                f"update norm {self.update_norm:.3g} of the weight's, above {limits.update_norm:g}"
            )
        if not self.perplexity_growth <= limits.perplexity:
            found.append(
                f"perplexity of a plain text from {self.perplexity_before:.4g} to "
                f"{self.perplexity_after:.4g}, above {limits.perplexity:g} times"
            )
        return found

    def refuse(self, limits: Limits | None = None) -> None:
        """Raise by name where a limit is broken."""
        complaints = self.complaints(limits)
        if complaints:
            raise UnsafeEdit(
                f"the edit is beyond the guard rails: {'; '.join(complaints)}. Try another layer "
                "or prompt; force it to have it all the same"
            )

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)
