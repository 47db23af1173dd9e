"""The executor's arguments: matched to `forward`'s signature, narrowed to a micro-batch, compared with the compiled ones
(python/_args_parser.py)."""
from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .errors import createPoptorchError
from .log import logger
from .options import Options
from .structures import flatten, map_tensors

_END = ("\nThe inputs at run time must match those the model was compiled for. To compile again make a new wrapper, or call "
        "destroy() on this one")


class Arguments(NamedTuple):
    """Values by position and by name, as they are passed to `forward`; `names` says how each position is called."""

    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    names: Tuple[str, ...]

    def tensors(self) -> List[torch.Tensor]:
        return flatten([list(self.args), self.kwargs])

    def map(self, function: Callable[[torch.Tensor], Any]) -> Arguments:
        return Arguments(map_tensors(self.args, function), map_tensors(self.kwargs, function), self.names)

    def match(self, given: Arguments) -> None:
        """Error: another number of arguments, type, shape, dtype, or a changed value that is no tensor."""
        if len(self.args) != len(given.args):
            raise createPoptorchError(f"Number of positional arguments mismatch: expected {len(self.args)} but got "
                                      f"{len(given.args)}.{_END}")
        for name, compiled, value in zip(self.names, self.args, given.args):
            _same(name, compiled, value)
        _same("named arguments", self.kwargs, given.kwargs)


def _same(name: str, compiled: Any, given: Any) -> None:
    if type(compiled) is not type(given) and not isinstance(compiled, torch.Tensor):
        raise createPoptorchError(f"Type mismatch for {name}: expected {type(compiled)} but got {type(given)}.{_END}")
    if isinstance(compiled, torch.Tensor):
        if not isinstance(given, torch.Tensor):
            raise createPoptorchError(f"Type mismatch for {name}: expected a tensor but got {type(given)}.{_END}")
        if compiled.dtype != given.dtype:
            raise createPoptorchError(f"Data type mismatch for {name}: expected {compiled.dtype} but got {given.dtype}.{_END}")
        if compiled.shape != given.shape:
            raise createPoptorchError(f"Shape mismatch for {name}: expected {tuple(compiled.shape)} but got "
                                      f"{tuple(given.shape)}.{_END}")
    elif isinstance(compiled, (tuple, list)):
        if len(compiled) != len(given):
            raise createPoptorchError(f"Length mismatch for {name}: expected {len(compiled)} but got {len(given)}.{_END}")
        for index, (one, other) in enumerate(zip(compiled, given)):
            _same(f"{name}[{index}]", one, other)
    elif isinstance(compiled, dict):
        if set(compiled) != set(given):
            raise createPoptorchError(f"Keys mismatch for {name}: expected {sorted(compiled)} but got {sorted(given)}.{_END}")
        for key, value in compiled.items():
            _same(f"{name}[{key}]", value, given[key])
    elif compiled != given:
        raise createPoptorchError(f"Value mismatch for {name}: expected {compiled} but got {given}: values that are no tensors "
                                  f"are part of the compiled graph.{_END}")


class ArgsParser:
    """Reads `forward`'s signature once, before the model is wrapped."""

    def __init__(self, model: Any) -> None:
        function = model.forward if isinstance(model, nn.Module) else model
        if not callable(function):
            raise TypeError("Expected a torch.nn.Module or a callable")
        self._signature: Optional[inspect.Signature]
        try:
            self._signature = inspect.signature(function)
        except ValueError:
            self._signature = None
        self._warned = False

    def __call__(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], check_dicts: bool = True) -> Arguments:
        """AssertionError: too many or unknown arguments; Error: one is missing. Defaults are filled in."""
        if self._signature is None:
            parsed = Arguments(tuple(args), dict(kwargs), tuple(f"*args[{index}]" for index in range(len(args))))
        else:
            parsed = self._match(args, kwargs)
        if check_dicts and any(isinstance(value, dict) for value in (*parsed.args, *parsed.kwargs.values())):
            logger.warning("Dicts as inputs have partial support only: literal keys. Consider a tuple")
        return parsed.map(self._contiguous)

    def _contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor
        if not self._warned:
            self._warned = True
            logger.warning("At least one input tensor is not contiguous: it will be converted")
        return tensor.contiguous()

    def _match(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Arguments:
        parameters = list(self._signature.parameters.values())  # type: ignore[union-attr]
        variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        known = [p.name for p in parameters]
        assert variadic or len(args) + len(kwargs) <= len(known), (
            f"Too many arguments provided: expected {known} ({len(known)}) but got {len(args) + len(kwargs)}")
        unknown = [name for name in kwargs if name not in known]
        assert variadic or not unknown, f"{unknown} are not valid parameters. Allowed values are {known}"
        rest, named = list(args), dict(kwargs)
        values: List[Any] = []
        names: List[str] = []
        by_name: Dict[str, Any] = {}
        keyword_only = False
        for parameter in parameters:
            if parameter.kind == parameter.VAR_KEYWORD:
                by_name.update(named)
                named = {}
                continue
            if parameter.kind == parameter.VAR_POSITIONAL:
                names += [f"*{parameter.name}[{index}]" for index in range(len(rest))]
                values, rest, keyword_only = values + rest, [], True
                continue
            keyword_only = keyword_only or parameter.kind == parameter.KEYWORD_ONLY
            if rest and not keyword_only:
                assert parameter.name not in named, f"Parameter {parameter.name} was passed more than once"
                value = rest.pop(0)
            elif parameter.name in named:
                value = named.pop(parameter.name)
            elif parameter.default is not parameter.empty:
                value = parameter.default
            else:
                raise createPoptorchError(f"Mandatory parameter {parameter.name} missing")
            if keyword_only:
                by_name[parameter.name] = value
            else:
                values.append(value)
                names.append(parameter.name)
        return Arguments(tuple(values), by_name, tuple(names))


def micro_batch(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    """The first micro-batch of a host tensor (_poplar_executor.py:1503-1537); AssertionError when the batch does not divide."""
    groups = options.replication_factor // options.input_group_size
    iterations, accumulation = options.device_iterations, options.Training.gradient_accumulation
    factor = iterations * groups * accumulation
    rows = tensor.shape[0] if tensor.dim() else 1
    assert rows % factor == 0, (
        f"Invalid batch dimension: In the input {tuple(tensor.shape)}, the batch dimension ({rows}) must be a multiple of "
        f"Options.deviceIterations({iterations}) * (Options.replicationFactor({options.replication_factor}) / "
        f"Options.inputReplicaGrouping.input_group_size({options.input_group_size})) * "
        f"Options.Training.gradientAccumulation({accumulation}) = {factor}")
    return tensor if tensor.dim() == 0 else tensor.narrow(0, 0, rows // factor)
