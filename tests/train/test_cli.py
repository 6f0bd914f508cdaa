import pytest

from train.cli import load_config, main, parse

CONFIG = """
import pathlib
from tests.train.tiny_run import tiny_config

def get_config():
    return tiny_config(pathlib.Path({folder!r}))
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "quick.py"
    path.write_text(CONFIG.format(folder=str(tmp_path)))
    return path


def refused(capsys, tmp_path, *arguments):
    """The message for a command line that is refused with code 2 and leaves nothing behind."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert not (tmp_path / "run").exists()
    output = capsys.readouterr()
    return output.out + output.err


def test_command_line_overrides_the_file(config):
    changed = parse(
        [
            f"--config={config}",
            "--optimizer.learning-rate=3e-4",
            "--model.num_layers",
            "3",
            "--data.paths",
            "a.txt",
            "b.txt",
            "--model.no-tie-embeddings",
        ]
    ).run
    assert changed.optimizer.learning_rate == 3e-4
    assert changed.optimizer.warmup_steps == 2  # From the file.
    assert (changed.model.num_layers, changed.model.tie_embeddings) == (3, False)
    assert changed.data.paths == ("a.txt", "b.txt")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--optimizer.lerning-rate=1", "--optimizer.learning-rate"),
        ("--model.attn_res_blok_size=4", "Unrecognized options"),
        ("--step=4", "--steps"),
        ("--steps=4.5", "--steps"),
        ("--optimizer.name=adam", "'adamw'"),
        ("--steps=0", "steps: 0 must be at least 1"),
        ("--model.num-layers=0", "num_layers"),
        ("--optimizer.accumulate=3", "must divide batch_size"),
        ("--model.compute-dtype=bf16", "bfloat16"),
    ],
)
def test_bad_setting_is_refused(config, tmp_path, capsys, override, words):
    assert words in refused(capsys, tmp_path, f"--config={config}", override)


def test_missing_file_offers_the_nearest(config, tmp_path, capsys):
    message = refused(capsys, tmp_path, f"--config={tmp_path / 'quik.py'}")
    assert message.startswith("error: there is no config file")
    assert "did you mean" in message and "quick.py" in message


def test_missing_option_is_one_line(tmp_path, capsys):
    message = refused(capsys, tmp_path, "--confg=x")
    assert message.count("\n") == 1 and "--config=configs/NAME.py is missing" in message
    assert "--confg" in message


def test_config_file_that_cannot_be_used(tmp_path, capsys):
    path = tmp_path / "bad.py"
    header = "from train.config import *\nfrom attnres_jax import ModelConfig\ndef get_config():\n"
    for body, words in (
        ("    return OptimizerConfig(lerning_rate=1)", "did you mean learning_rate?"),
        ("    return OptimizerConfig(learning_rate='3e-4')", "'3e-4' must be of type float"),
        ("    return DataConfig(workers='4')", "data.workers: '4' must be of type int"),
        ("    return 3", "gives int, not a Config"),
        ("    return (", "was never closed"),
        ("    return nonsense", "nonsense"),
    ):
        path.write_text(header + body)
        message = refused(capsys, tmp_path, f"--config={path}")
        assert message.startswith("error: ") and message.count("\n") == 1
        assert words in message and "bad.py" in message
    path.write_text("x = 1")
    with pytest.raises(ValueError, match="no function get_config"):
        load_config(path)


def test_bad_data_is_one_line_and_code_2(config, tmp_path, capsys):
    message = refused(capsys, tmp_path, f"--config={config}", "--context=100000")
    assert message.startswith("error: ") and message.count("\n") == 1


def test_prints_parameter_groups_and_writes_nothing(config, tmp_path, capsys):
    assert main([f"--config={config}", "--print-parameter-groups"]) == 0
    shown = capsys.readouterr().out
    assert "reads.query" in shown and "vector" in shown
    assert not (tmp_path / "run").exists()


def test_help_needs_no_config(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--optimizer.learning-rate" in shown and "Peak learning rate" in shown
