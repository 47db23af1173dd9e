"""What usually helps when `check` finds a broken rule."""

from __future__ import annotations

import re
from typing import List, Tuple

# First match wins: (rule or "", what the message says, remedy).
_REMEDIES: List[Tuple[str, str, str]] = [
    ("", r"scaled_dot_product_attention", "write attention with matmul and softmax (`model.attention: explicit` in our models)"),
    ("", r"reads a value on the host|reads values on the host", "return the tensor as an output and read it after the call"),
    ("", r"boolean mask", "use torch.where(mask, x, 0), or multiply by the mask: shapes stay as they are"),
    ("", r"shape depends on the data", "use a fixed size: topk, one_hot with num_classes, torch.where"),
    ("", r"bfloat16|complex|Unsupported tensor input type", "use float32, or float16 with `precision: fp16-ipu`"),
    ("", r"mixes them with a CPU tensor", "register it with register_buffer, or make it in forward on x.device"),
    ("", r"Illegal move to CPU", "return the tensor as an output instead"),
    ("", r"Zero-sized", "leave the empty tensor out"),
    ("", r"only supported in inference", "write the loop or the condition out; it has no gradient on the IPU"),
    ("", r"re-assigned in forward", "change buffers in place, with copy_ or add_"),
    ("", r"argsort", "use sort(stable=True)"),
    ("", r"one_hot needs", "give num_classes"),
    ("", r"rounding_mode", "use torch.floor(x / y)"),
    ("", r"index_put ignores accumulate", "use scatter_add or index_add"),
    ("", r"class weights", "weight the summed losses yourself and mark the result with identity_loss"),
    ("", r"no_grad\(\) does not stop", "use .detach() on the tensor"),
    ("", r"is no float tensor, so it is a constant", "count on the host, or keep the counter as a float buffer"),
    ("", r"gradient starts at the mark", "wrap the value that is returned in poptorch.identity_loss, last of all"),
    ("", r"in no optimizer group", "put every trainable parameter in a group"),
    ("", r"lr was not passed", "pass lr to the optimizer's constructor as well as in its groups"),
    ("", r"not in the model", "build the optimizer on the parameters of the very model that is wrapped"),
    ("", r"amsgrad", "leave amsgrad out"),
    ("", r"Unsupported optimizer type", "use SGD, Adam, AdamW, RMSprop or LAMB of poptorch.optim"),
    ("", r"Expected a number for lr", "pass lr as a Python number, not a tensor"),
    ("loss", r"Couldn't find", "return the loss, made by a torch loss function or marked with poptorch.identity_loss"),
    ("loss", r"Multiple independent", "sum them and mark the sum: one marked loss may remain; use no loss function for metrics"),
    ("loss", r"scalar", "reduce the loss with mean or sum"),
    ("op", r"", "write it with operations from PopTorch's table, or compute it on the host and feed it as an input"),
    ("block", r"", "use BeginBlock, which stays open, or put every operation into a Block"),
    ("stage", r"", "use PipelinedExecution(AutoStage.AutoIncrement), or keep the path from returning to an IPU"),
    ("tied", r"", "put all users of the weight on one IPU (`ipu.head_ipu` for a tied readout), or untie (`model.tied: false`)"),
    ("pipeline", r"deviceIterations", "raise `ipu.eval_device_iterations`, or leave it out"),
    ("pipeline", r"", "raise `batch.accumulation` (and lower `batch.micro`), or use fewer IPUs (`ipu.layers_per_ipu`)"),
    ("ipus", r"power of 2", "change `ipu.layers_per_ipu` or `batch.replicas` so that their product is a power of two"),
    ("ipus", r"", "spread the replicas over several processes with poprun"),
    ("batch", r"", "give a whole number of micro-batches: micro x accumulation x replicas x device iterations rows"),
    ("accumulation", r"", "leave gradientAccumulation at 1 in inference and use deviceIterations"),
    ("broadcast", r"", "use Options.broadcastBuffers(False), or write no buffers"),
    ("backward", r"", "write the forward pass so that its own derivative is the one you want, or use `surrogate` losses"),
    ("trainable", r"", "detach nothing on the way, or set requires_grad=False on it"),
    ("arguments", r"", "call the step with the arguments that its forward names"),
    ("trace", r"", "make forward run on shape-only tensors: no values, no host work"),
]


def remedy(rule: str, message: str) -> str:
    """One clause for a rule and its message; empty if nothing is known to help."""
    for name, pattern, text in _REMEDIES:
        if name in ("", rule) and re.search(pattern, message):
            return text
    return ""
