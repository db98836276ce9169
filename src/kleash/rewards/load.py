"""What the option `reward` (or `gold`) may hold, turned into a callable."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from kleash.errors import UsageError
from kleash.models import RewardModel
from kleash.models.forward import Dtype
from kleash.rewards.call import Reward, line_of, reward_name
from kleash.rewards.combine import CombinedReward
from kleash.rewards.language import Language, codes_of
from kleash.rewards.rules import Boxed, ExactMatch, Number, Regex, Tags, length
from kleash.rewards.trained import ModelReward
from kleash.rewards.verified import Math, gym

RULES: dict[str, Callable[[str, str], Reward]] = {
    "exact": lambda argument, option: ExactMatch(argument or "answer", option=option),
    "number": lambda argument, option: Number(argument or "answer", option=option),
    "boxed": lambda argument, option: Boxed(argument or "answer", option=option),
    "math": lambda argument, option: Math(column=argument or "answer", option=option),
    "gym": gym,
    "language": lambda argument, option: Language(codes_of(argument), option=option),
    "regex": lambda argument, option: Regex(argument, option=option),
    "length": length,
    "format": lambda argument, option: Tags(tuple((argument or "think,answer").split(",")), option=option),
}
"""Rules by name: from what follows the colon, and the option it is in, to the rule."""

EXPECTED = (
    "a reward is `file.py:function`, the folder of a reward model or of its run, a rule "
    f"({', '.join(RULES)}), a Python callable, a list of these, or a mapping from these to weights"
)


def rule(spec: str, option: str = "reward") -> Reward | None:
    """The rule that `name` or `name:argument` stands for, None where the name is no rule's."""
    name, _, argument = spec.partition(":")
    return RULES[name](argument, option) if name in RULES else None


def load_reward(
    spec: Any, *, standardise: bool = False, dtype: Dtype = "auto", option: str = "reward"
) -> Reward:
    """A reward from an option's value.

    `file.py:function`; a folder or hub id of a reward model; a rule by name (RULES); a RewardModel; any
    callable; a list of these (weights 1); or a mapping from these to weights. `standardise` and `dtype`
    concern reward models only (see ModelReward); `option` is the one the value came from, reward or gold.
    What is already loaded is returned as it is. UsageError says what is wrong with it.
    """
    options = {"standardise": standardise, "dtype": dtype, "option": option}
    if isinstance(spec, Mapping):
        return _combined(list(spec.items()), options)
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return _combined([(part, 1.0) for part in spec], options)
    if isinstance(spec, RewardModel):
        return ModelReward(spec, **options)  # type: ignore[arg-type]
    if isinstance(spec, nn.Module):
        raise UsageError(
            f"{option}: a {type(spec).__name__} cannot be called on text. Save it with save_pretrained and "
            "give its folder, or wrap it in a function (prompts, responses, **columns) -> list of floats."
        )
    if callable(spec):
        return spec
    if isinstance(spec, (str, Path)) and str(spec).strip():
        return _from_text(str(spec), options)
    raise UsageError(f"{option}: {spec!r} is not a reward; {EXPECTED}.")


def _from_text(spec: str, options: dict[str, Any]) -> Reward:
    option = options["option"]
    if spec.endswith(".py") or ".py:" in spec:
        return function_from_file(spec, option)
    found = rule(spec, option)
    if found is not None:
        return found
    near = difflib.get_close_matches(spec.partition(":")[0], RULES, n=1)
    if near and not Path(spec).exists():
        raise UsageError(
            f"{option}: there is no rule {spec!r}; did you mean {near[0]!r}? In full, {EXPECTED}."
        )
    try:
        return ModelReward.load(spec, **options)
    except UsageError as error:  # of a loader that knows models and rewards, but not the option
        raise UsageError(re.sub(r"^(reward|model):", f"{option}:", str(error))) from error


def _combined(weighted: list[tuple[Any, Any]], options: dict[str, Any]) -> Reward:
    """Rewards with weights as one; the same name twice becomes `name` and `name_2`."""
    option = options["option"]
    if not weighted:
        raise UsageError(f"{option}: the list is empty; {EXPECTED}.")
    rewards: dict[str, Reward] = {}
    weights: dict[str, float] = {}
    for spec, weight in weighted:
        if (
            isinstance(weight, bool)
            or not isinstance(weight, (int, float))
            or weight != weight
            or abs(weight) == float("inf")
        ):
            raise UsageError(
                f"{option}: the weight of {spec} is {weight!r}; expected a finite number, for example 0.5."
            )
        part = load_reward(spec, **options)
        if isinstance(part, CombinedReward):
            raise UsageError(
                f"{option}: {spec} is itself a combination; list its parts with their weights instead."
            )
        name, number = reward_name(part), 2
        while name in rewards:
            name, number = f"{reward_name(part)}_{number}", number + 1
        rewards[name], weights[name] = part, float(weight)
    return CombinedReward(rewards, weights)


def function_from_file(spec: str, option: str = "reward") -> Callable[..., Any]:
    """The function that `path/to/file.py:name` names.

    The file is run as a module, with its own folder importable while it loads. UsageError: no such file, no
    such function (with those it has), or the file itself raises (with the line).
    """
    file, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(
            f"{option}={spec}: there is no file {path} (looked from {Path.cwd()}). Give a path to a Python "
            "file, a colon, and the name of a function in it."
        )
    module = _run_file(path.resolve(), spec, option)
    function = getattr(module, name, None) if name else None
    if callable(function):
        return function
    defined = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    listing = f"it defines {', '.join(defined)}" if defined else "it defines no function"
    near = difflib.get_close_matches(name, defined, n=1)
    if not name:
        problem = "the name of the function is missing"
    else:
        problem = (
            f"{path} has no function {name!r}"
            if function is None
            else f"{name!r} in {path} is not a function"
        )
    hint = (
        f" Did you mean {path}:{near[0]}?"
        if near
        else f" Write {option}={path}:{defined[0] if defined else 'function'}."
    )
    raise UsageError(f"{option}={spec}: {problem}; {listing}.{hint}")


def _run_file(path: Path, spec: str, option: str) -> ModuleType:
    # Named by the whole path: two files called rewards.py stay apart, and what a file defines can be pickled
    # and inspected.
    module_name = "kleash_reward_" + "".join(c if c.isalnum() else "_" for c in str(path))
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None and found.loader is not None  # a .py suffix always has a loader
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        where = (
            f"{path}, line {error.lineno}" if isinstance(error, SyntaxError) else line_of(error, str(path))
        )
        raise UsageError(
            f"{option}={spec}: the file cannot be imported: {type(error).__name__}: {error} ({where}). Run "
            f"`python {path}` to see the same error, mend it, and start again."
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module
