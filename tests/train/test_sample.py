import jax
import numpy as np
import pytest
from flax import nnx

from tests.train.tiny_run import StandIn, tiny_config
from train import setup
from train.generate import generate, make_next_token
from train.loop import prepare, train
from train.sample import main
from train.setup import load_run
from train.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the stand-in, restored."""
    patch = pytest.MonkeyPatch()
    patch.setattr(setup, "TransformerLM", lambda config, rngs: StandIn(vocab_size=300))
    config = tiny_config(tmp_path_factory.mktemp("sample"), model__vocab_size=300, steps=4)
    train(prepare(config), "x")
    yield load_run(config.workdir)
    patch.undo()


def sampled(trained, **options):
    config, graphdef, params = trained
    tokenizer = load_tokenizer("byte")
    return "".join(generate(graphdef, params, tokenizer, context=config.context, **options))


def test_same_seed_same_text(trained):
    first = sampled(trained, tokens=30, seed=1)
    assert first == sampled(trained, tokens=30, seed=1)
    assert first != sampled(trained, tokens=30, seed=2)


def test_temperature_zero_takes_the_likeliest_of_the_right_window(trained):
    config, graphdef, params = trained
    next_token = make_next_token(graphdef, 257, temperature=0, top_k=0)
    model = nnx.merge(graphdef, params)
    ids = np.random.default_rng(0).integers(0, 257, config.context, dtype=np.int32)
    for length in (1, 5, config.context):
        window = ids.copy()
        window[length:] = 0
        logits = model(ids[None, :length])[0, -1]
        assert int(next_token(params, window, length, jax.random.key(0))) == np.argmax(logits[:257])


def test_top_one_is_the_likeliest(trained):
    greedy = sampled(trained, tokens=10, prompt="ab", temperature=0)
    assert sampled(trained, tokens=10, prompt="ab", top_k=1, temperature=2.0) == greedy


def test_rows_beyond_the_tokenizer_are_never_drawn(trained):
    config, graphdef, params = trained
    params = params | {"embedding_table": np.array(params["embedding_table"])}
    params["embedding_table"][257:] *= 1000
    next_token = make_next_token(graphdef, 257, temperature=1.0, top_k=0)
    window = np.zeros(config.context, np.int32)
    draws = [int(next_token(params, window, 3, jax.random.key(seed))) for seed in range(50)]
    assert max(draws) < 257 and len(set(draws)) > 5


def test_characters_are_never_cut(trained, monkeypatch):
    ids = iter([*"aé☃".encode(), 256, 65])
    draw = "train.generate.make_next_token"
    monkeypatch.setattr(draw, lambda *a, **k: lambda *arguments: next(ids))
    config, graphdef, params = trained
    tokenizer = load_tokenizer("byte")
    pieces = generate(graphdef, params, tokenizer, context=config.context, prompt="x", tokens=9)
    # The end of the document ends the text.
    assert list(pieces) == ["a", "é", "☃"]


def test_folder_without_checkpoint_is_refused(tmp_path, capsys):
    assert main([f"--workdir={tmp_path}"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--temperature=-1", "--tokens=0", "--promt=x"])
def test_bad_option_is_refused(option, capsys):
    assert main(["--workdir=x", option]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
