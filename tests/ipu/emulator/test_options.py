"""`poptorch.Options`: defaults, validation, freezing (python/options.py)."""
from __future__ import annotations

import copy
import json

import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu import contract

pytestmark = pytest.mark.pod


def test_defaults_are_the_contracts() -> None:
    """python/options.py:1179-1192."""
    options = poptorch.Options()
    for name, text in contract.load()["classes"]["poptorch.Options"]["option_defaults"].items():
        assert getattr(options, name) == eval(text, {"enums": poptorch}), name


def test_setters_return_the_options_except_anchor_tensor() -> None:
    """python/options.py:1669: anchorTensor returns None."""
    options = poptorch.Options()
    assert options.deviceIterations(2).replicationFactor(2).randomSeed(1) is options
    assert options.anchorTensor("loss", "Gradient___w") is None
    training = options.Training
    assert training.gradientAccumulation(4) is training and training.gradient_accumulation == 4


def test_a_value_of_another_type_is_an_assertion() -> None:
    """python/_options_impl.py:70."""
    with pytest.raises(AssertionError):
        poptorch.Options().deviceIterations(2.0)
    with pytest.raises(AssertionError):
        poptorch.Options().Training.gradientAccumulation("8")


def test_frozen_options_cannot_change_and_a_clone_can() -> None:
    """python/_options_impl.py:126: every setter, in every group."""
    options = poptorch.Options()
    options._freeze()
    for change in (lambda: options.deviceIterations(2), lambda: options.Training.gradientAccumulation(2),
                   lambda: options._Popart.set("a", 1), lambda: options.Precision.enableStochasticRounding(True),
                   lambda: options.TensorLocations.numIOTiles(32)):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            change()
    twin = options.clone()
    assert twin.deviceIterations(3).device_iterations == 3 and options.device_iterations == 1
    assert copy.deepcopy(options).Training.gradientAccumulation(2).gradient_accumulation == 2


def test_a_model_and_a_loader_freeze_the_options_they_are_given() -> None:
    """python/_poplar_executor.py:150, python/__init__.py:311."""
    options = poptorch.Options()
    poptorch.inferenceModel(torch.nn.Linear(2, 2), options)
    with pytest.raises(AttributeError):
        options.deviceIterations(2)


def test_output_mode_every_n_needs_a_period() -> None:
    """python/options.py:1692."""
    with pytest.raises(AssertionError):
        poptorch.Options().outputMode(poptorch.OutputMode.EveryN)
    options = poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 4)
    assert options.output_return_period == 4 and not options.defaultOutputMode()


def test_input_replica_grouping_must_divide() -> None:
    """python/options.py:1474-1506."""
    options = poptorch.Options().replicationFactor(4)
    for size, kind in ((8, "Consecutive"), (3, "Consecutive"), (2, "All")):
        with pytest.raises(ValueError):
            options.inputReplicaGrouping(size, getattr(poptorch.CommGroupType, kind))
    assert options.inputReplicaGrouping(2, poptorch.CommGroupType.Orthogonal).input_group_size == 2


def test_reduction_type_refuses_no_reduction() -> None:
    """python/options.py:269-276."""
    with pytest.raises(ValueError):
        poptorch.Options().Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction)


def test_partials_and_dithering_overwrite_each_other() -> None:
    """python/options.py:190,371: both replace `convolutionOptions`, the last call wins."""
    options = poptorch.Options()
    options.Precision.setPartialsType(torch.half)
    options.Training.setConvolutionDithering(True)
    assert options._Popart.options["convolutionOptions"] == {"enableConvDithering": True}
    assert options._Popart.options["partialsTypeMatMuls"] == "half"
    with pytest.raises(ValueError):
        options.Precision.setPartialsType(torch.bfloat16)


def test_io_tiles_are_even_from_32_to_192() -> None:
    """python/options.py:606-625."""
    for tiles in (30, 33, 194):
        with pytest.raises(AssertionError):
            poptorch.Options().TensorLocations.numIOTiles(tiles)
    assert poptorch.Options().TensorLocations.numIOTiles(64).toDict() == {"numIOTiles": 64}


def test_optimizer_state_off_chip() -> None:
    """python/options.py:515-587."""
    location = poptorch.TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    options = poptorch.Options()
    options.TensorLocations.setOptimizerLocation(location)
    assert options.toDict()["location_optimizer"] == {"onChip": 0, "useReplicatedTensorSharding": 1}
    with pytest.raises(AssertionError):
        options.TensorLocations.setWeightLocation({"onChip": 0})


def test_memory_proportion_keys() -> None:
    """python/options.py:1426."""
    assert poptorch.Options().setAvailableMemoryProportion({"IPU1": 0.2}).available_memory_proportion == {1: 0.2}
    with pytest.raises(AssertionError):
        poptorch.Options().setAvailableMemoryProportion({"1": 0.2})


def test_offline_target_never_connects() -> None:
    """python/options.py:1656."""
    assert poptorch.Options().useOfflineIpuTarget().connection_type == poptorch.ConnectionType.Never


def test_random_seed_seeds_the_host_too() -> None:
    """python/options.py:1740."""
    poptorch.Options().randomSeed(7)
    first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(3))
    with pytest.raises(AssertionError):
        poptorch.Options().randomSeed(1.5)


def test_from_json_file_and_environment(tmp_path, monkeypatch) -> None:
    """python/options.py:1193-1263."""
    text = {"deviceIterations": 3, "outputMode": "OutputMode.Sum", "Training.gradientAccumulation": 5, "_Popart.set": ["x", 1]}
    options = poptorch.Options().from_json(json.dumps(text))
    assert (options.device_iterations, options.output_mode, options.Training.gradient_accumulation) == (3, 3, 5)
    path = tmp_path / "options.cfg"
    path.write_text("# a comment\ndeviceIterations(6)\noutputMode(poptorch.OutputMode.All)\n")
    assert options.loadFromFile(str(path)).device_iterations == 6
    path.write_text("noSuchOption(1)\n")
    with pytest.raises(poptorch.ConfigFileError, match="noSuchOption"):
        options.loadFromFile(str(path))
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"replicationFactor": 2}')
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "cache")
    options = poptorch.Options()
    assert options.replication_factor == 2 and (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    assert options._Popart.options["cachePath"] == "cache"


def test_strategies() -> None:
    """python/options.py:806-921, 949-1142."""
    options = poptorch.Options()
    with pytest.raises(AssertionError):
        options.setExecutionStrategy("pipelined")
    with pytest.raises(AssertionError, match="more than one stage"):
        poptorch.PipelinedExecution(poptorch.Stage("a"), poptorch.Stage("a", "b"))
    strategy = poptorch.PipelinedExecution("a", ["b", "c"], poptorch.Stage("d").ipu(1))
    assert strategy.stage("c").blocks == ("b", "c") and strategy.stage("d")._ipu == 1
    assert options.setExecutionStrategy(poptorch.ShardedExecution()).toDict()["execution_mode"] == 1
    with pytest.raises(AssertionError):
        poptorch.SerialPhasedExecution()
