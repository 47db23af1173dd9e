"""The PopART session options that `Options._Popart.set` may name, by the type of their value
(popart_compiler/source/SessionOptions.cpp:40-440); any other name, or another type, fails when the model is compiled."""
from __future__ import annotations

from typing import Any, Dict, Iterator, Set

_BOOL = """
aliasZeroCopy automaticLossScalingSettings.enabled batchSerializationSettings.concatOnExecutionPhaseChange
batchSerializationSettings.concatOnPipelineStageChange batchSerializationSettings.concatOnVirtualGraphChange compileEngine
constantWeights decomposeGradSum delayVarUpdates disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams
dotOpNames enableDistributedReplicatedGraphs enableEngineCaching enableExplicitIR enableExplicitMainLoops
enableFloatingPointChecks enableFullyConnectedPass enableGradientAccumulation enableInplaceAmbiguityChecking
enableLoadAndOffloadRNGState enableMergeExchange enableNonStableSoftmax enableOutlining enableOutliningCopyCostPruning
enablePipelining enablePrefetchDatastreams enableReplicatedGraphs enableSerializedMatmuls enableStableNorm
enableStochasticRounding enableSupportedDataTypeCasting ensureFp32LossScaleTensor explicitRecomputation
exportPoplarComputationGraph exportPoplarVertexGraph groupHostSync groupNormStridedChannelGrouping
instrumentWithHardwareCycleCounter opxAliasChecking opxModifyChecking rearrangeAnchorsOnHost rearrangeStreamsOnHost
replicatedCollectivesSettings.mergeAllReduceCollectives replicatedCollectivesSettings.prepareScheduleForMergingCollectives
scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs strictOpVersions useHostCopyOps
"""
_INT = """
accumulateOuterFragmentSettings.schedule accumulationAndReplicationReductionType accumulationFactor autoRecomputation
autodiffSettings.stitchStrategy automaticLossScalingSettings.gradientTensorTrackingMethod
automaticLossScalingSettings.updatePeriod batchSerializationSettings.batchSchedule batchSerializationSettings.factor
batchSerializationSettings.method batchSerializationSettings.transformContext compilationProgressTotal defaultBufferingDepth
defaultPrefetchBufferingDepth executionPhaseSettings.phases executionPhaseSettings.stages finalDotOp firstDotOp
globalReplicaOffset globalReplicationFactor looseThresholdAtPeak meanAccumulationAndReplicationReductionStrategy
mergeVarUpdate mergeVarUpdateMemThreshold numIOTiles subgraphCopyingStrategy swapLimitScheduler syntheticDataMode
transitiveClosureOptimizationThreshold virtualGraphMode patterns_level
"""
_FLOAT = """
automaticLossScalingSettings.binEdgeLocation automaticLossScalingSettings.thresholdUpperCountProportion
outlineSequenceBreakCost outlineThreshold timeLimitScheduler
"""
_TEXT = "cachePath customCodeletCompileFlags kahnTieBreaker logDir partialsTypeMatMuls saveInitializersToFile " \
        "serializedPoprithmsShiftGraphsDir"
_CONTAINER = "accumulateOuterFragmentSettings.excludedVirtualGraphs convolutionOptions customCodelets dotChecks engineOptions " \
             "gclOptions hardwareInstrumentations lstmOptions matmulOptions reportOptions updatableNamedBuffers patterns"
KINDS: Dict[str, Set[str]] = {"bool": set(_BOOL.split()), "uint64": set(_INT.split()), "double": set(_FLOAT.split()),
                              "string": set(_TEXT.split()), "container": set(_CONTAINER.split())}


def kind_of(value: Any) -> str:
    """The C++ type under which PopTorch passes a value on."""
    for kind, types in (("bool", bool), ("uint64", int), ("double", float), ("string", str)):
        if isinstance(value, types):
            return kind
    return "container"


def unknown(options: Dict[str, Any]) -> Iterator[str]:
    """One sentence for each option that PopART does not have under that name and type."""
    for name, value in options.items():
        kind = kind_of(value)
        if name not in KINDS[kind]:
            other = [candidate for candidate, names in KINDS.items() if name in names]
            hint = f": it is a {other[0]} option" if other else ""
            yield f"Unknown {kind} option {name}{hint}"
