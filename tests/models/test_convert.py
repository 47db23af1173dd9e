"""Checkpoints of transformers read and written: the same logits in double precision, the same tensors to the bit."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError
from ipu_lean.models import build_model
from ipu_lean.models.convert import folder, read_settings, read_weights, written

if "torchvision" not in sys.modules:
    sys.modules["torchvision"] = None  # one that does not fit torch keeps transformers' models from being imported
transformers = pytest.importorskip("transformers", reason="the reference is transformers")
VOCAB = 29


def their_reformer(architecture="ReformerModelWithLMHead", **changes):
    settings = {
        "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 6, "feed_forward_size": 40, "vocab_size": VOCAB,
        "attn_layers": ["local", "lsh", "local", "lsh"], "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24],
        "max_position_embeddings": 64, "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 4, "num_buckets": [2, 4],
        "num_hashes": 2, "hash_seed": 5, "is_decoder": True, "use_cache": False, "hidden_dropout_prob": 0.1,
    }  # fmt: skip
    return randomised(getattr(transformers, architecture)(transformers.ReformerConfig(**{**settings, **changes})))


def their_gpt2(**changes):
    settings = {"vocab_size": VOCAB, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "attn_implementation": "eager"}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**settings, "bos_token_id": 0, "eos_token_id": 0, **changes}))
    return randomised(model)


def randomised(model):
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        else:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def config_of(model, mup=None):
    data = {"tokenizer": {"kind": "bpe", "path": "not read here"}}
    if model.get("head") == "classifier":
        data["labelled"] = "texts.jsonl"
    return make_config(model=model, mup=mup or {"parametrization": "standard"}, data=data)


def converted(path):
    """(config, our model) of a folder, as `convert` makes them."""
    read = read_settings(folder.read_settings(path))
    config = config_of(read.section)
    model = build_model(config, VOCAB)
    model.load_state_dict(read_weights(read.family, model, folder.read_tensors(path)))
    return config, model.eval()


def share_rotations(ours, theirs):
    """Their hash seed draws the same numbers for every layer and every call."""
    config = theirs.config
    for module in ours.modules():
        if hasattr(module, "order_of"):
            columns = module.rotations.shape[-1]
            torch.manual_seed(config.hash_seed)
            shape = (config.num_attention_heads, config.attention_head_size, config.num_hashes, columns)
            module.hashing.rotations = torch.randn(shape, dtype=torch.float64)


def tokens(length):
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize(
    "changes, length",
    [
        ({}, 64),
        ({}, 27),
        ({"attn_layers": ["lsh", "lsh"], "num_buckets": 4, "num_hashes": 1}, 64),
        ({"attn_layers": ["local"], "axial_pos_embds": False, "local_num_chunks_before": 2}, 48),
        ({"architecture": "ReformerForMaskedLM", "is_decoder": False, "lsh_num_chunks_after": 1}, 64),
        ({"architecture": "ReformerForSequenceClassification", "is_decoder": False, "num_labels": 3}, 64),
    ],
    ids=["mixed", "padded", "lsh", "local-learned", "masked", "classifier"],
)
def test_a_reformer_gives_the_same_logits(tmp_path, changes, length):
    theirs = their_reformer(**changes)
    theirs.save_pretrained(tmp_path)
    _, ours = converted(tmp_path)
    ours, theirs = ours.double(), theirs.double()
    share_rotations(ours, theirs)
    ids = tokens(length)
    expected, found = theirs(ids).logits, ours.logits(ids)
    assert expected.std() > 0.5 and (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"n_inner": 24, "activation_function": "relu"}, {"tie_word_embeddings": False}])
def test_a_gpt2_gives_the_same_logits(tmp_path, changes):
    theirs = their_gpt2(**changes)
    theirs.save_pretrained(tmp_path)
    _, ours = converted(tmp_path)
    ids = tokens(20)
    expected, found = theirs.double()(ids).logits, ours.double().logits(ids)
    assert expected.std() > 0.1 and (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def written_to(path, config, model, end=0):
    settings, tensors, changed = written(config, model, model.state_dict(), end)
    path.mkdir()
    folder.write(path, settings, tensors)
    return changed


MADE = {
    "reformer": their_reformer,
    "masked": lambda: their_reformer("ReformerForMaskedLM", is_decoder=False, lsh_num_chunks_after=1),
    "classifier": lambda: their_reformer("ReformerForSequenceClassification", is_decoder=False, num_labels=3),
    "gpt2": their_gpt2,
    "gpt2-untied": lambda: their_gpt2(tie_word_embeddings=False),
}


@pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))
def test_there_and_back_again_to_the_bit(tmp_path, make):
    theirs = make()
    theirs.save_pretrained(tmp_path / "theirs")
    config, ours = converted(tmp_path / "theirs")
    assert written_to(tmp_path / "back", config, ours) == []
    back, missing = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not missing["missing_keys"] and not missing["unexpected_keys"]
    again = back.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert name == "lm_head.bias" or torch.equal(again[name], tensor), name
    ours_again = converted(tmp_path / "back")[1].state_dict()
    assert all(torch.equal(ours_again[name], tensor) for name, tensor in ours.state_dict().items())
    unlike = {"hash_seed", "_name_or_path", "use_cache", "initializer_range", "eos_token_id", "bos_token_id"}
    kept, expected = back.config.to_dict(), theirs.config.to_dict()
    different = {key for key in expected if kept.get(key) != expected[key]} - unlike
    # One rate of dropout for both kinds of attention: the smaller one.
    assert different <= {"local_attention_probs_dropout_prob"}


def test_older_files(tmp_path):
    """A pickle with constants among the weights and a tied bias; shards; names without the model's prefix."""
    theirs = their_reformer()
    theirs.save_pretrained(tmp_path / "new")
    expected = converted(tmp_path / "new")[1].state_dict()
    old = dict(theirs.state_dict())
    old["lm_head.bias"] = old.pop("lm_head.decoder.bias")
    old["reformer.encoder.layers.1.attention.self_attention.self_mask_value_float16"] = torch.tensor(-1e3)
    old["reformer.encoder.layers.0.attention.self_attention.mask_value_float32"] = torch.tensor(-1e9)
    for name in ("pickle", "shards"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((tmp_path / "new" / "config.json").read_bytes())
    torch.save(old, tmp_path / "pickle" / "pytorch_model.bin")
    places = {}
    for number in range(2):
        part = {name: tensor for place, (name, tensor) in enumerate(old.items()) if place % 2 == number}
        torch.save(part, tmp_path / "shards" / f"part-{number}.bin")
        places.update(dict.fromkeys(part, f"part-{number}.bin"))
    (tmp_path / "shards" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    for name in ("pickle", "shards"):
        found = converted(tmp_path / name)[1].state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    gpt2 = their_gpt2()
    gpt2.save_pretrained(tmp_path / "gpt2")
    bare = {name.replace("transformer.", ""): tensor for name, tensor in gpt2.state_dict().items()}
    bare["h.0.attn.bias"], bare["h.1.attn.masked_bias"] = torch.ones(1, 1, 24, 24), torch.tensor(-1e4)
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    torch.save(bare, tmp_path / "gpt2" / "pytorch_model.bin")
    found = converted(tmp_path / "gpt2")[1]
    assert torch.equal(found.embedding.token.weight, gpt2.transformer.wte.weight)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    their_reformer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin cannot be read: .* no code in it is run") as caught:
        folder.read_tensors(tmp_path)
    assert "weights_only" not in str(caught.value)  # torch's own words say how to run the code


CLASSIFIER = {"architectures": ["ReformerForSequenceClassification"], "is_decoder": False}
REFUSED = [
    ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
    ({"attn_layers": ["local", "full"]}, "`attn_layers` is 'full'"),
    ({"tie_word_embeddings": True}, "`tie_word_embeddings` is True"),
    ({"axial_pos_shape": [4, 4, 4]}, "`axial_pos_shape` is"),
    ({"architectures": ["ReformerForQuestionAnswering"]}, "ReformerForQuestionAnswering"),
    ({"is_decoder": False}, "`is_decoder` is False"),
    ({"model_type": "bert"}, "model_type 'bert'"),
    ({**CLASSIFIER, "problem_type": "regression"}, "`problem_type` is 'regression'"),
]


@pytest.mark.parametrize("changes, words", REFUSED, ids=[words for _, words in REFUSED])
def test_settings_without_a_counterpart_are_refused_by_name(tmp_path, changes, words):
    their_reformer().save_pretrained(tmp_path)
    found = {**folder.read_settings(tmp_path), **changes}
    with pytest.raises(ConfigError) as caught:
        read_settings(found)
    assert words in str(caught.value)


def test_the_names_of_classes_are_told_because_labels_are_numbered_by_the_data(tmp_path):
    names = {0: "yes", 1: "no", 2: "?"}
    their_reformer("ReformerForSequenceClassification", is_decoder=False, id2label=names).save_pretrained(tmp_path)
    read = read_settings(folder.read_settings(tmp_path))
    assert read.section["classes"] == 3
    assert [remark for remark in read.remarks if "(0 is yes, 1 is no, 2 is ?)" in remark and "data.labelled" in remark]


@pytest.mark.parametrize("name", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_settings_of_gpt2_are_refused_by_name(tmp_path, name):
    their_gpt2().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=name):
        read_settings({**folder.read_settings(tmp_path), name: True})


def test_tensors_that_do_not_belong_are_refused_by_name(tmp_path):
    their_reformer().save_pretrained(tmp_path)
    read = read_settings(folder.read_settings(tmp_path))
    model = build_model(config_of(read.section), VOCAB)
    whole, name = folder.read_tensors(tmp_path), "reformer.encoder.layers.0.attention.self_attention.key.weight"
    for changed, words in (
        ({key: tensor for key, tensor in whole.items() if key != name}, f"lacks {name}"),
        ({**whole, "reformer.adapter.weight": torch.zeros(2)}, "no place for: reformer.adapter.weight"),
        ({**whole, name: whole[name][:3]}, f"{name} has the shape [3, 32], and config.json makes it [12, 32]"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_weights(read.family, model, changed)
        assert words in str(caught.value)


CONCAT = {"kind": "reversible", "output": "concat"}
OURS = {
    "width": 16, "depth": 2, "heads": 2, "seq": 32, "positions": "axial", "norm_eps": 1e-12, "tied": False, "bias": True,
    "attention_bias": False, "readout_bias": True, "attention": ["local", "lsh"], "stack": CONCAT, "activation": "relu",
    "local": {"chunk": 8}, "lsh": {"chunk": 8, "buckets": 4},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    [OURS, {**OURS, "attention": "local", "lsh": {}, "positions": "learned", "tied": False},
     {"width": 16, "depth": 2, "heads": 2, "seq": 24, "positions": "learned", "stack": {"kind": "residual"}}],
    ids=["reformer", "local", "gpt2"],
)  # fmt: skip
def test_multipliers_are_folded_into_the_weights(tmp_path, model):
    """muP's factors, every one of them away from 1, and a peer that knows none of them."""
    mup = {"base_width": 8, "base_depth": 1, "attention_mult": 1.5, "embedding_mult": 3.0, "output_mult": 0.7}
    config = config_of(model, mup)
    ours = build_model(config, VOCAB).eval()
    generator = torch.Generator().manual_seed(4)
    for parameter in ours.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.4 if parameter.dim() > 1 else 0.9))
    assert len(written_to(tmp_path / "folder", config, ours)) > 5
    name = json.loads((tmp_path / "folder" / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "folder").eval()
    theirs.config.hash_seed, lengths = 5, (24, 21)
    ours, theirs = ours.double(), theirs.double()
    for module in theirs.modules():
        if hasattr(module, "hash_seed"):
            module.hash_seed = 5
    if "axial_pos_shape" in theirs.config.to_dict():
        share_rotations(ours, theirs)
    for length in lengths:
        ids = tokens(length)
        expected, found = ours.logits(ids), theirs(ids).logits
        assert expected.std() > 0.1 and (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"attention": "full", "lsh": {}, "local": {}}, "model.attention"),
        ({"stack": {"kind": "reversible", "output": "mean"}}, "model.stack.output"),
        ({"norm": "rmsnorm"}, "model.norm"),
        ({"activation": "swiglu"}, "model.activation"),
        ({"positions": "rotary"}, "model.positions"),
        ({"lsh": {"chunk": 8, "full_below": 16}}, "model.lsh.full_below"),
        ({"attention_bias": True}, "model.attention_bias"),
        ({"local": {"chunk": 8, "after": 1}}, "model.local.after"),
        ({"lsh": {"chunk": 8, "after": 1}}, "model.lsh.after"),
    ],
)
def test_what_transformers_has_not_is_refused_by_its_key(changes, key):
    config = config_of({**OURS, **changes})
    model = build_model(config, VOCAB)
    with pytest.raises(ConfigError) as caught:
        written(config, model, model.state_dict(), None)
    assert caught.value.key == key


def test_a_reformer_without_a_bias_in_its_readout_gets_zeros(tmp_path):
    config = config_of({**OURS, "readout_bias": False})
    model = build_model(config, VOCAB)
    written_to(tmp_path / "folder", config, model)
    found = folder.read_tensors(tmp_path / "folder")
    for name in ("lm_head.decoder.bias", "lm_head.bias"):
        assert torch.equal(found[name], torch.zeros(VOCAB))
