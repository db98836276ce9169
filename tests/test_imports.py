"""What importing costs, and that the public names are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kleash


def loaded_by(code: str) -> set[str]:
    """Names of the packages loaded after `code` in a fresh interpreter."""
    script = f"import sys\n{code}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


HEAVY = {"torch", "transformers", "datasets", "accelerate", "pandas", "altair"}


@pytest.mark.parametrize("code", ["import kleash", "import kleash.cli", "import kleash.__main__"])
def test_the_command_line_does_not_wait_for_torch(code: str) -> None:
    assert loaded_by(code) & HEAVY == set()


def test_help_does_not_load_torch() -> None:
    code = "import kleash.cli\ntry: kleash.cli.command()(['train', '--help'])\nexcept SystemExit: pass"
    assert loaded_by(code) & HEAVY == set()


@pytest.mark.parametrize("name", kleash.__all__)
def test_public_name(name: str) -> None:
    assert callable(getattr(kleash, name))


def test_measure_is_a_function_and_a_package_whichever_is_asked_for_first() -> None:
    code = """
import kleash
assert callable(kleash.measure)
from kleash.measure import Evaluation, measure
assert kleash.measure.Evaluation is Evaluation and kleash.measure.measure is measure
"""
    assert "torch" in loaded_by(code)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        kleash.trane  # noqa: B018


def test_reports_need_no_model_library() -> None:
    assert loaded_by("import kleash.report") & {"torch", "transformers", "datasets", "accelerate"} == set()


def test_the_mathematics_needs_torch_alone() -> None:
    assert loaded_by("import kleash.functional") & (HEAVY - {"torch"}) == set()
