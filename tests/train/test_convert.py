"""`convert` from the command line: a folder becomes a run that generates, measures and trains on, and a run becomes a folder."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

from ipu_lean.cli import main
from ipu_lean.config import load_config
from ipu_lean.data import load_tokenizer, prepare
from ipu_lean.data.tokenizers import train_bpe, train_sentencepiece
from ipu_lean.models.convert import folder
from ipu_lean.train import snapshot
from ipu_lean.train.progress import Reporter
from ipu_lean.train.reuse import open_run
from ipu_lean.train.tasks import MaskedTask
from tests.train.helpers import write_corpus

if "torchvision" not in sys.modules:
    sys.modules["torchvision"] = None  # one that does not fit torch keeps transformers' models from being imported
transformers = pytest.importorskip("transformers", reason="it writes the folders that are read here")
pytest.importorskip("sentencepiece")


def run(*words, code=0):
    """The summary of one command."""
    out = StringIO()
    with redirect_stdout(out):
        assert main([*words, "--json"]) == code, out.getvalue()
    return json.loads(out.getvalue().splitlines()[-1])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", words=800)


@pytest.fixture(scope="module")
def reformer(tmp_path_factory, text):
    """A folder of transformers' with a Reformer and its SentencePiece model."""
    place = tmp_path_factory.mktemp("hub") / "small-reformer"
    tokenizer = train_sentencepiece([text.read_text()], 60)
    torch.manual_seed(0)
    config = transformers.ReformerConfig(
        hidden_size=16, num_attention_heads=2, attention_head_size=4, feed_forward_size=24, vocab_size=64, is_decoder=True,
        attn_layers=["local", "lsh"], axial_pos_shape=[8, 8], axial_pos_embds_dim=[4, 12], max_position_embeddings=64,
        lsh_attn_chunk_length=64, local_attn_chunk_length=64, initializer_range=0.3, eos_token_id=1,
    )  # fmt: skip
    transformers.ReformerModelWithLMHead(config).save_pretrained(place)
    (place / "spiece.model").write_bytes(tokenizer.model_file()[1])
    return place


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, text):
    place = tmp_path_factory.mktemp("hub") / "small-gpt2"
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(place)
    (place / "tokenizer.json").write_bytes(train_bpe([text.read_text()], 290).model_file()[1])
    return place


@pytest.mark.parametrize("kind", ["reformer", "gpt2"])
def test_a_folder_becomes_a_run_and_a_run_a_folder(request, tmp_path, text, kind):
    source, made = request.getfixturevalue(kind), tmp_path / "run"
    cache = f"data.cache={tmp_path / 'cache'}"
    summary = run("convert", str(source), "--out", str(made), f"data.corpus={text}", cache, "train.steps=4")
    assert summary["metrics"]["parameters"] == sum(t.numel() for name, t in learnt(source).items())
    spoken = run("generate", str(made), "--prompt", "the lean", "--tokens", "6", "--temperature", "0")
    assert spoken["steps"] == 0 and spoken["text"].startswith("the lean")
    assert spoken["metrics"]["reused"] > spoken["metrics"]["computed"] > 0
    before = run("eval", str(made), "--data", str(text))["metrics"]["data"]["loss"]
    back = run("convert", str(made), "--to", "hf", "--out", str(tmp_path / "back"))
    assert back["metrics"]["folded"] == []
    found, expected = folder.read_tensors(tmp_path / "back"), folder.read_tensors(source)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name != "lm_head.bias")
    # What transformers makes of the folder is what this side measured; its loss is on the same windows.
    name = json.loads((tmp_path / "back" / "config.json").read_text())["architectures"][0]
    assert before == pytest.approx(loss_of(getattr(transformers, name).from_pretrained(tmp_path / "back"), made, text), rel=1e-4)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "back"), load_tokenizer(made / "tokenizer")
    blank = " " if kind == "reformer" else ""  # as docs/convert.md says
    assert theirs.encode("the lean transformer\n  keeps") == ours.encode(blank + "the lean transformer\n  keeps")
    # Training goes on from the converted weights, not from new ones.
    trained = run("resume", str(made), "optimizer.lr=1e-6", "train.eval_every=2", "model.dropout=0", "batch.micro=2")
    assert trained["steps"] == 4 and trained["metrics"]["first_loss"] == pytest.approx(before, rel=0.1)
    assert run("resume", str(made), "train.steps=6")["steps"] == 6
    assert run("resume", str(made), "optimizer.lr=1e-3", code=2)["error"].startswith("`optimizer.lr: 0.001`")


def learnt(source):
    tensors = folder.read_tensors(source)
    spare = {"lm_head.bias"} if "lm_head.decoder.bias" in tensors else set()
    return {name: tensor for name, tensor in tensors.items() if name not in spare}


@torch.no_grad()
def loss_of(theirs, made, text):
    """Mean loss over the text's windows by transformers' model; LSH draws other rotations, so chunks hold all there is."""
    seq = load_config(made).model.seq
    tokenizer = load_tokenizer(made / "tokenizer")
    ids = tokenizer.encode(text.read_text()) + [tokenizer.end]
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, seq):
        window = torch.tensor([ids[start : start + seq + 1]])
        logits = theirs.eval()(window[:, :-1]).logits
        total += float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum"))
        count += window.shape[1] - 1
    return total / count


def test_the_models_own_keys_stay_while_weights_are_fresh(tmp_path, gpt2, text):
    made = tmp_path / "run"
    run("convert", str(gpt2), "--out", str(made), f"data.corpus={text}", f"data.cache={tmp_path / 'cache'}")
    for key in ("model.depth=3", "mup.embedding_mult=2", "data.tokenizer.path=elsewhere"):
        assert run("resume", str(made), key, code=2)["error"].startswith(f"`{key.partition('=')[0]}")
    assert load_config(made).data.tokenizer.path == str(made / "tokenizer")
    best = snapshot.read(made / "checkpoints" / "step-00000000", weights_only=True)
    assert best.trainer["fresh"] and best.trainer["step"] == 0


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
def test_the_next_commands_are_those_that_the_head_allows(tmp_path, reformer, text, head, capsys):
    source, made = tmp_path / "theirs", tmp_path / "run"
    config = transformers.ReformerConfig.from_pretrained(reformer, is_decoder=False, num_labels=2)
    getattr(transformers, f"Reformer{head}")(config).save_pretrained(source)
    (source / "spiece.model").write_bytes((reformer / "spiece.model").read_bytes())
    data = "labelled" if head == "ForSequenceClassification" else "corpus"
    if data == "labelled":
        error = run("convert", str(source), "--out", str(made), code=2)["error"]
        assert error.startswith(f"{source / 'config.json'}: `data.labelled`: ")
    place = "docs-or-code" if data == "labelled" else str(text)
    capsys.readouterr()
    assert main(["convert", str(source), "--out", str(made), f"data.{data}={place}"]) == 0
    said, notes = capsys.readouterr()
    assert "ipu-lean generate" not in said and f"data.{data}=FILE" in said
    # What stands before a text decides what a classifier says of it.
    assert ("behind an end-of-text token" in notes) == (data == "labelled")
    back = run("convert", str(made), "--to", "hf", "--out", str(tmp_path / "back"))["metrics"]["remarks"]
    assert any("put id 1 before" in remark for remark in back) == (data == "labelled")


def masked_lm(place, reformer, file, content, spare, mask):
    """A folder of transformers' with `spare` rows behind the pieces, whose tokenizer calls `mask` (or nothing) its mask."""
    place.mkdir()
    (place / file).write_bytes(content)
    (place / "tokenizer_config.json").write_text(json.dumps({"mask_token": mask} if mask else {}))
    tokenizer = load_tokenizer(place)
    config = transformers.ReformerConfig.from_pretrained(reformer, is_decoder=False, vocab_size=tokenizer.vocab + spare)
    torch.manual_seed(1)
    transformers.ReformerForMaskedLM(config).save_pretrained(place)
    return tokenizer


def bpe_with_mask(text):
    """A tokenizer.json among whose pieces is the mask, as transformers writes it after `add_special_tokens`."""
    from tokenizers import Tokenizer

    model = Tokenizer.from_str(train_bpe([text.read_text()], 270).model_file()[1].decode())
    model.add_special_tokens(["[MASK]"])
    return model.to_str().encode()


@torch.no_grad()
@pytest.mark.parametrize(
    "kind, spare, mask", [("added", 1, "[MASK]"), ("piece", 0, "t"), ("none", 0, None), ("bpe", 0, "[MASK]")]
)
def test_a_masked_lm_finds_what_its_own_mask_hides(tmp_path, reformer, text, kind, spare, mask):
    """With one more row and token, as transformers' documentation has it; with a piece for it (of either kind); with nothing."""
    source, made, spiece = tmp_path / "theirs", tmp_path / "run", (reformer / "spiece.model").read_bytes()
    content = ("tokenizer.json", bpe_with_mask(text)) if kind == "bpe" else ("spiece.model", spiece)
    tokenizer = masked_lm(source, reformer, *content, spare, mask)
    pieces = tokenizer.vocab
    hidden = pieces if spare else tokenizer.id_of(mask or "")
    settings = [f"data.corpus={text}", f"data.cache={tmp_path / 'cache'}", "data.mask_share=0.3", "train.steps=2"]
    summary = run("convert", str(source), "--out", str(made), *settings)
    remarks = [remark for remark in summary["metrics"]["remarks"] if "mask" in remark]
    assert len(remarks) == 1 - spare and load_config(made).model.vocab == pieces + 1
    ours, theirs = open_run(str(made), "best", Reporter("none")), transformers.ReformerForMaskedLM.from_pretrained(source).eval()
    task = MaskedTask(ours.config, prepare(ours.config))
    windows, labels = (torch.from_numpy(part).long() for part in task.train_batches(rows=2).next())
    assert bool((windows == pieces).any())
    if hidden is not None:
        found, expected = ours.model.eval()(windows), theirs(torch.where(windows == pieces, hidden, windows)).logits
        assert (found[..., : pieces + spare] - expected).abs().max() < 1e-4 * expected.abs().max()
    assert run("eval", str(made), "--data", str(text))["metrics"]["data"]["tokens"] > 100
    assert run("resume", str(made))["steps"] == 2
    run("convert", str(made), "--to", "hf", "--out", str(tmp_path / "back"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back").mask_token_id == pieces


@pytest.mark.parametrize("command", ["explain", "train", "eval", "generate", "resume"])
def test_a_folder_of_transformers_is_told_where_to_go(reformer, command):
    assert f"ipu-lean convert {reformer}" in run(command, str(reformer), code=2)["error"]


@pytest.mark.parametrize(
    "words, error",
    [
        (["convert", "nowhere", "--out", "x"], "`SOURCE: 'nowhere'`: this is neither a run directory"),
        (["convert", "{gpt2}", "--to", "hf", "--out", "x"], "`--to: 'hf'`: this is what the source is already"),
        (["convert", "{gpt2}", "--to", "onnx"], "`--to: 'onnx'`: it is `hf`"),
        (["convert", "{gpt2}", "--out", "{gpt2}"], "`--out`: the output directory"),
        (["convert", "{bare}", "--out", "{new}"], "`SOURCE`: {bare} holds no tokenizer that can be read"),
    ],
)
def test_mistakes(tmp_path, gpt2, words, error, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((gpt2 / name).read_bytes())
    places = {"gpt2": str(gpt2), "bare": str(bare), "new": str(tmp_path / "new")}
    found = run(*(word.format(**places) for word in words), code=2)
    assert found["error"].startswith(error.format(**places))
    assert not (tmp_path / "new").exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize("head", [{}, {"head": "masked-lm", "causal": False}])
def test_bytes_come_back(tmp_path, text, head):
    from ipu_lean.config.yaml_text import to_text

    model = {"width": 16, "depth": 1, "heads": 2, "seq": 16, "positions": "learned", **head}
    if head:
        model.update(attention=["local"], local={"chunk": 4}, stack={"kind": "reversible", "output": "concat"})
        model.update(tied=False, attention_bias=False)
    else:
        model.update(stack={"kind": "residual"})
    sections = {"model": model, "mup": {"parametrization": "standard"}, "batch": {"micro": 2}, "train": {"steps": 1}}
    sections["data"] = {"corpus": str(text), "cache": str(tmp_path / "cache"), "validation": {"valid": 0.2}}
    there, back, again = (str(tmp_path / name) for name in ("there", "back", "again"))
    run("train", to_text(sections), "--out", str(tmp_path / "run"))
    run("convert", str(tmp_path / "run"), "--to", "hf", "--out", there)
    assert run("convert", there, "--out", back)["metrics"]["parameters"] > 0
    config = load_config(tmp_path / "back" / "config.yaml")
    assert (config.data.tokenizer.kind, config.data.tokenizer.path) == ("bytes", None)
    losses = [run("eval", str(tmp_path / name), "--data", str(text))["metrics"]["data"]["loss"] for name in ("run", "back")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    (tmp_path / "there" / "ipu_lean_tokenizer.json").unlink()  # as in a folder that somebody else made
    assert "or give data.tokenizer.kind=bytes" in run("convert", there, "--out", again, code=2)["error"]
    run("convert", there, "data.tokenizer.kind=bytes", "--out", again)
