"""What a trial declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Budget = Mapping[str, Any]
Measured = dict[str, float]


@dataclass(frozen=True)
class Metric:
    """One number that every arm returns.

    Args:
        name: the key in what an arm returns.
        better: which direction is better; None for a number that is shown and not judged.
        unit: its unit, "" for none.
        about: one line on what it is.
    """

    name: str
    better: Literal["higher", "lower"] | None
    unit: str = ""
    about: str = ""


@dataclass(frozen=True)
class Arm:
    """One contestant.

    Args:
        name: how the table calls it.
        run: `run(data, seed=…, budget=…)` trains or applies it and returns one number a metric. `data` is what the
            trial's `prepare` returned for this seed, the same for every arm, and must not be changed.
        about: one line on what it is.
    """

    name: str
    run: Callable[..., Measured]
    about: str = ""


@dataclass(frozen=True)
class Trial:
    """A method against its baselines.

    Args:
        slug: the method's slug in the catalogue.
        question: the claim under test, as a question that the verdict answers.
        subject: the kind of subject that it needs (`assay.core.subject.KINDS`).
        builtin: the built-in subject that it runs on by default, such as "builtin:ratings".
        prepare: `prepare(source, seed=…, budget=…)` makes the data that all arms of one seed share. `source` is a
            built-in name or a path. Its cost is not charged to any arm.
        arms: the method first, then its baselines.
        metrics: what is measured; the first one that has a direction is the headline.
        budgets: the settings named "quick" and "full", the same for every arm. The key "seeds" gives the default
            number of seeds.
    """

    slug: str
    question: str
    subject: str
    builtin: str
    prepare: Callable[..., Any]
    arms: tuple[Arm, ...]
    metrics: tuple[Metric, ...]
    budgets: Mapping[str, Budget] = field(default_factory=dict)

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(a for a in self.arms if a.name == name)
