"""The results of checking contracts, as a table: contract, number of checks, worst error, limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from everyformer.network.network import Output

LIMITS = {"pattern": 0.0, "future": 0.0, "store": 0.0, "gradient": 1e-5, "overfit": 0.1}
LIMIT = 1e-9  # for all other contracts


class BrokenContract(Exception):
    """A contract does not hold; the message is the reason."""


@dataclass(frozen=True)
class Result:
    """One contract on one model: the measured error and the largest allowed one."""

    contract: str
    model: str
    error: float
    limit: float
    reason: str = ""  # why it failed, if there is more to say than the error

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN


@dataclass
class Report:
    """The results of all checks. Prints as a table."""

    results: list[Result] = field(default_factory=list)
    refused: int = 0  # illegal combinations, which were not built
    not_applicable: list[str] = field(default_factory=list)  # requested contracts that do not apply to the model

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if not result.passed]

    @property
    def ok(self) -> bool:
        """Whether every requested contract was checked and passed."""
        return not self.failures and not self.not_applicable

    def rows(self) -> Iterator[tuple[str, int, float, float, bool]]:
        """Yields contract, number of checks, worst error, limit, and whether all passed."""
        for name in dict.fromkeys(result.contract for result in self.results):
            results = [result for result in self.results if result.contract == name]
            worst = max(results, key=lambda result: (not result.passed, result.error))
            yield name, len(results), worst.error, worst.limit, all(result.passed for result in results)

    def __str__(self) -> str:
        lines = [f"{'contract':<12}{'checks':>7}{'worst error':>14}{'limit':>9}"]
        for name, checks, error, limit, passed in self.rows():
            lines.append(f"{name:<12}{checks:>7}{error:>14.1e}{limit:>9.0e}  {'passed' if passed else 'FAILED'}")
        lines += [f"{name:<12}does not apply to this model; nothing was checked" for name in self.not_applicable]
        for result in self.failures[:10]:
            why = result.reason or f"by {result.error:.1e}"
            lines.append(f"FAILED: {result.contract} in {result.model}: {why}")
        if len(self.failures) > 10:
            lines.append(f"and {len(self.failures) - 10} more")
        return "\n".join(lines)


def distance(one: Tensor, two: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest number of the second where that is above 1."""
    if not one.numel():
        return 0.0
    return float((one - two).detach().abs().max() / two.detach().abs().max().clamp(min=1))


def logits_of(output: Output) -> tuple[Tensor, ...]:
    """The logits of all output heads."""
    if output.logits is None:
        return ()
    return output.logits if isinstance(output.logits, tuple) else (output.logits,)
