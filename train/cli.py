"""The command line of a run: a config file in python, and settings that override it.

    python -m train --config=configs/quickstart.py --steps=500 --optimizer.learning-rate=3e-4

Exit codes: 0 done, 1 stopped by an error while running, 2 refused before anything was compiled or
written, 130 and 143 stopped by Ctrl-C and SIGTERM with everything saved.
"""

import dataclasses
import difflib
import logging
import pathlib
import re
import runpy
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import rich.console
import tyro

from train.arguments import read_arguments
from train.checkpoint import CheckpointError
from train.config import Config
from train.distributed import DistributedConfig
from train.loop import NonFiniteError, prepare, train
from train.optimizer import parameter_table
from train.setup import abstract_setup


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Trains a language model. Settings come from a config file; every one can be overridden."""

    config: pathlib.Path
    """Python file whose get_config() gives a train.config.Config, such as configs/quickstart.py."""
    print_parameter_groups: bool = False
    """List shape, optimizer group, update rule and decay of every parameter, and exit."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    run: Annotated[Config, tyro.conf.arg(name="")]


@dataclasses.dataclass(frozen=True)
class _ConfigOption:
    config: pathlib.Path | None = None


def main(
    arguments: Sequence[str], join: Callable[[DistributedConfig], None] = lambda config: None
) -> int:
    """Runs the command line and returns the exit code.

    Args:
        arguments: Those after `python -m train`.
        join: Brings the processes of the run together; by default this one trains alone.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)
    # Orbax logs housekeeping as warnings, and errors that it also raises with their tracebacks.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        command_line = parse(arguments)
        if command_line.print_parameter_groups:
            params = abstract_setup(command_line.run).stored.params
            rich.console.Console().print(parameter_table(params, command_line.run.optimizer))
            return 0
        join(command_line.distributed)
        run = prepare(command_line.run)
    except (ValueError, NotImplementedError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return 130
    try:
        return train(run, shlex.join(["python", "-m", "train", *arguments]))
    except (CheckpointError, NonFiniteError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def parse(arguments: Sequence[str]) -> CommandLine:
    """Reads the config file and lays the settings of the command line over it.

    Raises:
        ValueError: There is no usable config file, or a setting is refused.
        SystemExit: Help was asked for.
    """
    return parse_run(CommandLine, arguments, prog="python -m train")


def parse_run(command_line: Any, arguments: Sequence[str], *, prog: str, **required: Any) -> Any:
    """The same for any command line that has a config file and overrides the run in it.

    Args:
        command_line: A dataclass with fields `config` and `run`.
        arguments: Words of the command line.
        prog: What to call it in help texts.
        **required: Its other fields that have no default.

    Raises:
        ValueError: There is no usable config file, or a setting is refused.
        SystemExit: Help was asked for.
    """
    # The file gives the defaults of every other option, so its name has to be known first.
    option, _ = read_arguments(
        _ConfigOption, arguments, prog=prog, add_help=False, return_unknown_args=True
    )
    if option.config is None:
        if not {"-h", "--help"} & set(arguments):
            given = [argument for argument in arguments if argument.startswith("--")]
            near = difflib.get_close_matches("--config", [word.split("=")[0] for word in given])
            hint = f" (is {near[0]} a slip?)" if near else ""
            raise ValueError(
                f"--config=configs/NAME.py is missing{hint}; --help lists every setting"
            )
        return read_arguments(command_line, arguments, prog=prog)
    default = command_line(config=option.config, run=load_config(option.config), **required)
    return read_arguments(command_line, arguments, default=default, prog=prog)


def load_config(path: pathlib.Path) -> Config:
    """Runs a config file.

    Raises:
        ValueError: The file is missing, fails, or does not give a Config.
    """
    if not path.is_file():
        near = difflib.get_close_matches(
            path.name, [other.name for other in path.parent.glob("*.py")]
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"there is no config file {path}{hint}")
    try:
        config = runpy.run_path(str(path))["get_config"]()
    except KeyError as error:
        raise ValueError(f"{path} has no function get_config()") from error
    except (AttributeError, ImportError, NameError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}{_nearest_setting(str(error))}") from error
    if not isinstance(config, Config):
        raise ValueError(f"{path}: get_config() gives {type(config).__name__}, not a Config")
    return config


def _nearest_setting(message: str) -> str:
    """Offers the nearest name where a dataclass says only that it does not know one."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", message)
    near = difflib.get_close_matches(unknown[1], _setting_names(Config), n=1) if unknown else []
    return f"; did you mean {near[0]}?" if near else ""


def _setting_names(settings: Any) -> list[str]:
    names = []
    for name, annotation in typing.get_type_hints(settings).items():
        names.append(name)
        names += _setting_names(annotation) if dataclasses.is_dataclass(annotation) else []
    return names


def _fail(error: Exception, code: int) -> int:
    # Newlines inside would make two messages of one.
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code
