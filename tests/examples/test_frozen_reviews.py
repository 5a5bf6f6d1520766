"""A linear layer on the frozen features of an encoder."""

from __future__ import annotations

from pathlib import Path

import frozen_reviews as script
import pytest
import torch

transformers = pytest.importorskip("transformers")

WORDS = ["a", "dull", "fine", "film", "number"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder, its tokenizer, and reviews that it can tell apart."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("encoder")
    numbers = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    raw = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(numbers), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(path)
    rows = "".join(
        f"a {('dull', 'fine')[i % 2]} film{' film' * (i % 5)}\t{i % 2}\n" for i in range(300)
    )
    (path / "data.tsv").write_text("text\tlabel\n" + rows)
    return path


def options(folder: Path) -> list[str]:
    argv = [f"--model={folder}", f"--data={folder / 'data.tsv'}", "--layers", "1", "2"]
    return [*argv, "--batch-size=100", "--delta=1e-3", "--epochs=8", "--lr=0.1", "--seed=1"]


@pytest.mark.filterwarnings("ignore")  # of a seed
@pytest.mark.parametrize("more", [[], ["--held-out"]])
def test_reviews_are_told_apart(folder: Path, more: list[str], capsys) -> None:
    outcome, plain = script.main([*options(folder), *more])
    assert outcome.accuracy > 0.9 and plain == 1.0
    assert 7.5 < outcome.epsilon <= 8.0
    assert "without privacy 100.0%" in capsys.readouterr().out


def test_features_do_not_depend_on_other_texts(folder: Path) -> None:
    args = script.argparse.Namespace(layers=(1, 2), seq_length=64)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["a fine film", "a dull film film film film"]
    together = script.features(model, tokenizer, texts, args)
    alone = torch.cat([script.features(model, tokenizer, [text], args) for text in texts])
    assert together.shape == (2, 32)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_a_layer_that_the_encoder_has_not(folder: Path) -> None:
    with pytest.raises(SystemExit, match="--layers must be from 0 to 2"):
        script.main([*options(folder), "--layers", "9"])


def test_a_folder_without_a_model_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(["--model", str(tmp_path)])
    assert "no folder with a config.json" in capsys.readouterr().err
