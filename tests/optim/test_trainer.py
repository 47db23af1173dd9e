"""AnyPrecisionAdamW under transformers.Trainer: the steps of a plain loop, and a resumed run that is the uninterrupted one."""

from __future__ import annotations

import sys

import pytest
import torch

from ipu_lean.optim import AnyPrecisionAdamW

sys.modules.setdefault("torchvision", None)  # one that does not fit torch breaks the import of transformers
transformers = pytest.importorskip("transformers", reason="the Trainer is transformers'")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

BF16 = torch.bfloat16
SETTINGS = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "momentum_dtype": BF16}
STEPS, ROWS = 6, 4


def model():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32,
        word_embed_proj_dim=32, dropout=0.0, pad_token_id=None, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).to(BF16)


def rows():
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (STEPS * ROWS, 16), generator=draw)
    return [{"input_ids": row, "labels": row} for row in tokens]


def factor(step):
    return 1 - step / STEPS


def trainer(net, folder, optimizer, steps=STEPS, **more):
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=ROWS, max_steps=steps, use_cpu=True, report_to=[], save_steps=3, logging_steps=1,
        max_grad_norm=0.0, disable_tqdm=True, dataloader_pin_memory=False, **more,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder(model=net, args=arguments, train_dataset=rows(), optimizers=(optimizer, schedule))


@pytest.mark.parametrize("summation", ["kahan", "split"])
def test_a_trainers_steps_are_those_of_a_plain_loop(summation, tmp_path):
    one, other = model(), model()
    found = trainer(one, tmp_path, AnyPrecisionAdamW(one.parameters(), summation=summation, **SETTINGS))
    found.train()
    optimizer = AnyPrecisionAdamW(other.parameters(), summation=summation, **SETTINGS)
    data = rows()
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = SETTINGS["lr"] * factor(step)
        batch = torch.stack([row["input_ids"] for row in data[step * ROWS : (step + 1) * ROWS]])
        loss = other.train()(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        assert a.dtype == BF16 and torch.equal(a, b), name
    logged = [entry["loss"] for entry in found.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-3) and losses[-1] < losses[0]


def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path):
    """torch's own optimizers would come back with their state cast to the weights' type."""
    weights = []
    for part in ("whole", "resumed"):
        net = model()
        optimizer = AnyPrecisionAdamW(net.parameters(), **{**SETTINGS, "momentum_dtype": torch.float32})
        begin = None if part == "whole" else str(tmp_path / "checkpoint-3")
        trainer(net, tmp_path, optimizer).train(resume_from_checkpoint=begin)
        assert {value["exp_avg"].dtype for value in optimizer.state.values()} == {torch.float32}
        assert all(float(value["step"]) == STEPS for value in optimizer.state.values())
        weights.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))
    saved = transformers.OPTForCausalLM.from_pretrained(str(tmp_path / "checkpoint-6"), dtype=BF16)
    assert all(torch.equal(a, b) for a, b in zip(weights[0], saved.parameters()))


def test_by_class(tmp_path):
    """`optimizer_cls_and_kwargs` lets the Trainer make its groups: vectors do not decay."""
    net = model()
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no",
                                               disable_tqdm=True, per_device_train_batch_size=ROWS, weight_decay=0.1)  # fmt: skip
    chosen = (AnyPrecisionAdamW, SETTINGS)
    made = transformers.Trainer(model=net, args=arguments, train_dataset=rows(), optimizer_cls_and_kwargs=chosen)
    made.train()
    inner = getattr(made.optimizer, "optimizer", made.optimizer)
    assert isinstance(inner, AnyPrecisionAdamW) and [group["weight_decay"] for group in inner.param_groups] == [0.1, 0.0]
    assert all("compensation" in state for state in inner.state.values())
