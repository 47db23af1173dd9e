"""How blocks become stages: pipelined, sharded, phased (python/options.py:668-1142, python/_options_impl.py:192-268)."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from . import enums
from .tracestate import current_recorder


class Stage:
    """One or more blocks that run together on one IPU."""

    def __init__(self, *block_ids: str) -> None:
        assert all(isinstance(block, str) for block in block_ids), f"block ids are strings, got {block_ids}"
        self._blocks = block_ids
        self._stage_id = -1
        self._phase_id = -1
        self._ipu: Optional[int] = None

    @property
    def blocks(self) -> Tuple[str, ...]:
        return self._blocks

    def ipu(self, ipu: int) -> Stage:
        """The IPU of the stage; it overrides the blocks' own `ipu_id`. AssertionError unless an int."""
        assert isinstance(ipu, int), f"ipu must be an int, got {ipu!r}"
        self._ipu = ipu
        return self


class Phase:
    """Stages that run in parallel in one phase of a phased execution."""

    def __init__(self, *arg: Union[str, Stage]) -> None:
        if all(isinstance(item, Stage) for item in arg):
            self.stages: List[Stage] = list(arg)  # type: ignore[arg-type]
        else:
            assert all(isinstance(item, str) for item in arg), "a Phase takes Stages only or block ids only"
            self.stages = [Stage(*arg)]  # type: ignore[arg-type]

    def stage(self, idx: int) -> Stage:
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """One IPU for each stage, AssertionError otherwise."""
        assert len(ipus) == len(self.stages), f"{len(self.stages)} stages but {len(ipus)} ipus"
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)


class _StageManager:
    """Numbers the blocks of one trace and tells the tracer where each begins."""

    def __init__(self, find: Callable[[str, Optional[int]], Stage]) -> None:
        self._find = find
        self._next_auto_id = 0

    def nextAutoId(self) -> str:
        self._next_auto_id += 1
        return str(self._next_auto_id - 1)

    def resetAutoId(self) -> None:
        self._next_auto_id = 0

    def beginStage(self, user_id: Optional[str], ipu_id_from_block: Optional[int]) -> None:
        """The stage's own IPU first, then the block's, then the stage's number."""
        stage = self._find(user_id or self.nextAutoId(), ipu_id_from_block)
        ipu = stage._ipu if stage._ipu is not None else ipu_id_from_block
        if ipu is None:
            ipu = stage._stage_id
        recorder = current_recorder()
        if recorder is not None:
            recorder.begin_block(stage._stage_id, stage._phase_id, ipu)


class _AutoStages:
    """Stage numbers when no list was given: the IPU's number, or 1, 2, 3 … in order of appearance."""

    def __init__(self, auto_stage: enums.AutoStage) -> None:
        self.auto_stage = auto_stage
        self.stages: Dict[str, Stage] = {}
        self.next_id = 1

    def __call__(self, block_id: str, ipu: Optional[int]) -> Stage:
        if block_id not in self.stages:
            stage = Stage(block_id)
            if self.auto_stage == enums.AutoStage.SameAsIpu:
                assert ipu is not None, f"AutoStage.SameAsIpu needs an ipu_id, but block {block_id} has none"
                stage._stage_id = ipu
            else:
                stage._stage_id = self.next_id
                self.next_id += 1
            self.stages[block_id] = stage
        return self.stages[block_id]


class _ListedStages:
    """Stages that the user listed; a block that is in none of them is an AssertionError."""

    def __init__(self, block_map: Dict[str, Stage]) -> None:
        self.block_map = block_map

    def __call__(self, block_id: str, ipu: Optional[int]) -> Stage:
        assert block_id in self.block_map, f"Unknown Block '{block_id}', expected one of {sorted(self.block_map)}"
        return self.block_map[block_id]


class _IExecutionStrategy:
    """What all strategies share."""

    def __init__(self, find: Callable[[str, Optional[int]], Stage], block_map: Dict[str, Stage]) -> None:
        self._block_map = block_map
        self._find = find
        self._stages_manager = _StageManager(find)

    def stage(self, block_id: str) -> Stage:
        """The stage that a block was listed in; AssertionError when it was not."""
        assert block_id in self._block_map, f"Unknown block {block_id}"
        return self._block_map[block_id]

    def onStartTracing(self) -> None:
        from .blocks import Block

        Block._stages_manager = self._stages_manager

    def onEndTracing(self) -> None:
        from .blocks import Block

        Block._stages_manager = None

    def backendOptions(self) -> Dict[str, Any]:
        return {}


def _add_blocks(stage: Stage, block_map: Dict[str, Stage]) -> None:
    for block in stage.blocks:
        assert block not in block_map, f"{block} is in more than one stage"
        block_map[block] = stage


class PipelinedExecution(_IExecutionStrategy):
    """Nothing, one AutoStage, or the stages in order (a block id, a list of block ids, or a Stage).

    The default is AutoStage.SameAsIpu. A pipeline of F forward stages has 2F-1 in training.
    """

    def __init__(self, *args: Any) -> None:
        if len(args) == 1 and isinstance(args[0], enums.AutoStage):
            super().__init__(_AutoStages(args[0]), {})
            return
        block_map: Dict[str, Stage] = {}
        for number, item in enumerate(args):
            if isinstance(item, Stage):
                stage = item
            else:
                stage = Stage(item) if isinstance(item, str) else Stage(*item)
            stage._stage_id = number
            _add_blocks(stage, block_map)
        super().__init__(_ListedStages(block_map) if block_map else _AutoStages(enums.AutoStage.SameAsIpu), block_map)

    def backendOptions(self) -> Dict[str, Any]:
        return {"execution_mode": 0}


class ShardedExecution(PipelinedExecution):
    """The same arguments; stages run one after another, so accumulation has no minimum."""

    def backendOptions(self) -> Dict[str, Any]:
        return {"execution_mode": 1}


class _IPhasedExecution(_IExecutionStrategy):
    """Phases must be listed: Phase, list of Stages, list of block ids, or one block id."""

    def __init__(self, *phases: Any) -> None:
        assert phases, "PhasedExecution has no automatic stages: list the phases"
        self._tensors_liveness = enums.Liveness.AlwaysLive
        self._separate_backward_phase = False
        self._phases: List[Phase] = []
        block_map: Dict[str, Stage] = {}
        for number, item in enumerate(phases):
            phase = item if isinstance(item, Phase) else Phase(*(item if isinstance(item, list) else [item]))
            self._phases.append(phase)
            for stage in phase.stages:
                stage._phase_id = number
                _add_blocks(stage, block_map)
        super().__init__(_ListedStages(block_map), block_map)

    def phase(self, phase: int) -> Phase:
        assert isinstance(phase, int) and phase >= 0, "phases are numbered from 0"
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> _IPhasedExecution:
        assert isinstance(use, bool), "use must be a bool"
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> Dict[str, Any]:
        return {"execution_mode": 2, "separate_backward_phase": self._separate_backward_phase,
                "tensors_liveness": self._tensors_liveness.value}


class ParallelPhasedExecution(_IPhasedExecution):
    """Even phases on even IPUs and odd phases on odd ones, in parallel."""

    def backendOptions(self) -> Dict[str, Any]:
        return dict(super().backendOptions(), serial_phases_execution=False)

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        assert isinstance(off_chip, bool), "off_chip must be a bool"
        self._tensors_liveness = enums.Liveness.OffChipAfterFwd if off_chip else enums.Liveness.AlwaysLive
        return self


class SerialPhasedExecution(_IPhasedExecution):
    """One phase after another."""

    def setTensorsLiveness(self, liveness: enums.Liveness) -> SerialPhasedExecution:
        assert isinstance(liveness, enums.Liveness), f"{liveness!r} is not a poptorch.Liveness"
        self._tensors_liveness = liveness
        return self

    def backendOptions(self) -> Dict[str, Any]:
        return dict(super().backendOptions(), serial_phases_execution=True)
