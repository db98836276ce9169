"""The tiny models and data of the training tests, which another folder's conftest cannot import by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).parents[1] / "training" / "conftest.py"
_spec = importlib.util.spec_from_file_location("training_conftest", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

tiny = _module.tiny
one_thread_and_own_cache = _module.one_thread_and_own_cache
