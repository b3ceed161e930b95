"""All options of a run, in groups, in the three stages in which they become known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

from settings.options import (
    AugmentationOptions,
    CheckpointOptions,
    DataOptions,
    DistributedOptions,
    ModelOptions,
    MonitoringOptions,
    OptimizationOptions,
    PrecisionOptions,
    ScheduleOptions,
    StartOptions,
)
from settings.rules import OwnCode


@dataclass(frozen=True)
class Origin:
    """Where the values come from: nothing but settings/ and the guard of a resumed run reads it."""

    given: Sequence[str] = ()  # options that the command line or its recipe gives
    typed: Sequence[str] = ()  # those of the command line itself
    code: str = ""  # hashes of the files that options name and that change numbers


@dataclass(frozen=True)
class Parsed:
    """Every option as the command line or its recipe gives it, or its default: the first of three stages."""

    start: StartOptions = field(default_factory=StartOptions)
    data: DataOptions = field(default_factory=DataOptions)
    augmentation: AugmentationOptions = field(default_factory=AugmentationOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    optimization: OptimizationOptions = field(default_factory=OptimizationOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    monitoring: MonitoringOptions = field(default_factory=MonitoringOptions)
    distributed: DistributedOptions = field(default_factory=DistributedOptions)
    origin: Origin = field(default_factory=Origin)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the groups that hold values which have the names of options; what is no option is left out."""
        groups = {}
        for group in fields(cls):
            kind: Any = group.type
            groups[group.name] = kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})
        return cls(**groups)

    def flat(self) -> dict[str, Any]:
        """Return every value by its name, as checkpoints and torchvision's scripts have them."""
        return {name: value for group in vars(self).values() for name, value in vars(group).items()}

    if not TYPE_CHECKING:  # a type checker knows the groups

        def __getattr__(self, name: str) -> Any:
            """Say where an option is, for scripts that read it as of torchvision's options or of version 1.0."""
            for group in fields(self):
                if name in [each.name for each in fields(group.type)]:
                    raise AttributeError(f"args.{name} is args.{group.name}.{name}")
            raise AttributeError(f"there is no option {name}")

    def as_saved(self) -> dict[str, Any]:
        """Return every value by its name as a checkpoint holds them, in plain types."""
        names = {"is_launched": "distributed"}  # torchvision's
        return {names.get(name, name): _plain(value) for name, value in self.flat().items()}

    def replaced(self, **changes: Any) -> Self:
        """Return options of the same stage with some values changed; TypeError for a name that no group has."""
        # `of` leaves out names that no group has: a misspelt one would change nothing, without a word.
        values = self.flat()
        if unknown := changes.keys() - values.keys():
            raise TypeError(f"there is no option {min(unknown)}")
        return self.of({**values, **changes})


Options = TypeVar("Options", bound=Parsed)  # of any stage


class Resolved(Parsed):
    """The options of this machine and of its launcher too: device, workers, output folder, rank, number of processes.

    Those of published weights are filled in, and later those of the checkpoint to evaluate.
    """


class Assigned(Resolved):
    """The global batch and its micro-batches too, a resumed run's or this one's: nothing changes any more."""


def values_of(args: Any) -> dict[str, Any]:
    """Return every value by its name, of options of a stage or of another script's namespace."""
    return args.flat() if isinstance(args, Parsed) else vars(args)


def _plain(value: Any) -> Any:
    # `Option.is_value` takes lists alone, and would refuse a tuple in a checkpoint that is evaluated.
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    # torch.load refuses a class of ours with weights_only=True, even one that is a text.
    return str(value) if isinstance(value, OwnCode) else value
