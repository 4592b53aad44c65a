"""Methods that combine finished runs of other methods: find, check and load these runs from their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from duplex.artifacts import ArtifactPaths
from duplex.errors import DuplexError, UsageError
from duplex.options import CombinedOptions
from duplex.training.checkpoint import CheckpointHeader, load_checkpoint, read_checkpoint
from duplex.training.inputs import RunInputs
from duplex.training.run import MethodSpec


@dataclass(frozen=True)
class Members:
    """Checkpoints of the finished runs that a method combines, ordered by method, then by seed."""

    headers: tuple[CheckpointHeader, ...] = ()

    @property
    def fingerprints(self) -> list[str]:
        """One digest per combined run, which changes with the run's tensors and metadata."""
        return [header.fingerprint for header in self.headers]

    def add_to(self, inputs: RunInputs) -> RunInputs:
        """Return a copy of the inputs of a method that combines runs, with these runs (its members) loaded.

        Raises `DuplexError` if a run has other labels or another encoder than the inputs.
        """
        return replace(inputs, members=tuple(_load(header, inputs) for header in self.headers))


def find_members(
    spec: MethodSpec, dataset: str, seed: int, seeds: Sequence[int], paths: ArtifactPaths
) -> tuple[MethodSpec, Members]:
    """Find the finished runs (members) that a method combines; return the method, completed, and the runs' checkpoints.

    The completed method's options list its members. A method that combines no runs is returned unchanged, without
    members. Raises `DuplexError` for a missing run, `UsageError` for a run with another seed or world.

    seed: seed of the members, unless the method has the option `seeds: all`.
    seeds: seeds of the members if it has this option.
    """
    options = spec.options
    if not isinstance(options, CombinedOptions):
        return spec, Members()
    if spec.finetune is not None:
        raise UsageError(f"{spec.name} trains nothing, so it cannot fine-tune the encoder; remove `finetune`")
    headers, members = [], []
    for method in options.of:
        for number in seeds if options.seeds == "all" else (seed,):
            header = read_checkpoint(paths.run(dataset, method, number).checkpoint)
            _check(spec, header, number)
            headers.append(header)
            members.append(_member(method, header))
    finetunes = [header.record.finetune for header in headers if header.record.finetune is not None]
    largest = max(finetunes, key=lambda finetune: finetune.blocks, default=None)  # whose block inputs serve all members
    return replace(spec, options=replace(options, members=tuple(members)), finetune=largest), Members(tuple(headers))


def _check(spec: MethodSpec, header: CheckpointHeader, seed: int) -> None:
    """Raise `UsageError` unless a finished run can be combined with others by the method `spec`.

    The run must have the seed `seed` and the method's worlds, and must not be a combination itself.
    """
    record = header.record
    if record.seed != seed:
        raise UsageError(f"{header.path} has seed {record.seed}; {spec.name} combines runs with seed {seed}")
    if record.world != spec.trained_for:
        raise UsageError(
            f"{header.path} was trained for the {record.world} world and {spec.name} is for the {spec.trained_for} "
            f"world; combine runs of one world, or set `world` of {spec.name}"
        )
    if missing := [world for world in spec.worlds if world not in (record.calibration or {})]:
        raise UsageError(
            f"{header.path} is not for the {missing[0]} world, which {spec.name} is for; set `world` of {spec.name}"
        )
    if isinstance(record.options, CombinedOptions):
        raise UsageError(
            f"{header.path} combines runs and cannot be combined again; list its methods in `of` of {spec.name} instead"
        )


def _member(method: str, header: CheckpointHeader) -> dict[str, Any]:
    record = header.record
    return {
        "method": method,
        "seed": record.seed,
        "kind": record.kind,
        "options": record.options.to_dict(),
        "world": record.world,
        "finetune": None if record.finetune is None else record.finetune.to_dict(),
        "temperature": record.confidence.temperature,
    }


def _load(header: CheckpointHeader, inputs: RunInputs) -> Any:
    finetune = header.record.finetune
    member_blocks = inputs.member_blocks
    blocks = None
    if finetune is not None:
        if member_blocks is None:
            raise DuplexError(
                f"{header.path} has fine-tuned blocks, and the feature cache has no inputs for them; "
                "set encoder.block_inputs in params.yaml and extract again"
            )
        blocks = lambda: member_blocks(finetune)  # noqa: E731
    return load_checkpoint(header, replace(inputs.context(), finetuned_blocks=blocks, members=()), inputs.encoder)
