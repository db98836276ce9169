"""Loading and naming models, and what a wrong folder gets."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from families import tiny
from huggingface_hub import constants
from transformers import AutoModelForMaskedLM, BertConfig, LlamaConfig, LlamaForCausalLM

from kleash.errors import UsageError
from kleash.lab.tiny import write_tiny_model
from kleash.models import RewardModel, batch_logprobs, frozen_copy, identity, load_model
from kleash.models.load import hub_is_silent, resolve_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_a_folder_loads_in_float32_evaluation_mode(folder: Path) -> None:
    model, tokenizer = load_model(folder)
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.decode(tokenizer("On Sunday")["input_ids"]) == "On Sunday"


def test_a_run_folder_stands_for_its_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run" / "model")
    assert resolve_source(tmp_path / "run") == str(tmp_path / "run" / "model")


def test_identity_names_the_weights_and_not_the_folder(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(folder)
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    assert identity(load_model(tmp_path / "again")[0]) == identity(model)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    assert identity(load_model(tmp_path / "again")[0]) != identity(model)


def test_a_frozen_copy_neither_learns_nor_follows() -> None:
    model = tiny("llama")
    twin = frozen_copy(model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert identity(twin) != identity(model)
    assert not any(p.requires_grad for p in twin.parameters())
    assert not twin.training


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.mkdir(), "it holds nothing"),
        (lambda p: (p.mkdir(), (p / "notes.txt").write_text("x")), "it holds notes.txt"),
        (lambda p: p.write_text("x"), "it is a file"),
    ],
)
def test_a_folder_that_is_no_model_is_named(make: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    make(path)  # type: ignore[operator]
    with pytest.raises(UsageError, match=f"(?s)thing is not a model folder.*{message}"):
        load_model(path)


def test_broken_weights_and_broken_config_are_named(folder: Path, tmp_path: Path) -> None:
    for file in ("model.safetensors", "config.json"):
        broken = tmp_path / file
        shutil.copytree(folder, broken)
        (broken / file).write_bytes(b"not what it should be")
        with pytest.raises(UsageError, match="cannot load"):
            load_model(broken)


def test_a_weight_that_is_not_in_the_files_is_not_made_up(tmp_path: Path) -> None:
    sizes = {"vocab_size": 497, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    whole = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **sizes))
    whole.model.save_pretrained(tmp_path / "headless")
    with pytest.raises(
        UsageError, match=r"headless lacks lm_head.weight, of the \d+ weights .* would be random"
    ):
        load_model(tmp_path / "headless")


def test_an_encoder_is_not_a_causal_language_model(folder: Path, tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=497, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "encoder")
    load_model(folder)[1].save_pretrained(tmp_path / "encoder")
    with pytest.raises(UsageError, match="encoder is a BertLMHeadModel, whose attention looks ahead"):
        load_model(tmp_path / "encoder")


def test_a_folder_without_its_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    load_model(folder)[0].save_pretrained(tmp_path / "bare")
    with pytest.raises(UsageError, match=r"bare holds no tokenizer \(it holds config.json"):
        load_model(tmp_path / "bare")


def test_a_tokenizer_of_another_model_is_named(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_model(folder)[1]
    tiny("llama").save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    for source in (tmp_path / "small", (tiny("llama"), tokenizer)):
        with pytest.raises(UsageError, match="497 ids and the model embeddings for 61"):
            load_model(source)


def test_a_name_that_is_nowhere_says_where_it_was_looked_for() -> None:
    with pytest.raises(UsageError, match="there is no such folder .looked from .*, and Repo id must"):
        load_model("no/such/folder")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub of one's own, without a repository: as the real one answers for those missing or private."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/" else 401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits to try again"))
    yield url
    server.shutdown()
    server.server_close()


def test_a_name_that_the_hub_does_not_know_is_said_to_be_unknown(hub: str) -> None:
    assert not hub_is_silent("some/model")
    with pytest.raises(UsageError, match="there is no such folder.* is not a valid model identifier"):
        load_model("some/model")


def test_a_hub_that_cannot_be_reached_is_asked_once(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert hub_is_silent("some/model")
        with pytest.raises(UsageError, match="there is no such folder.* couldn't connect to"):
            load_model("some/model")


def test_report_77_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "pickled"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").unlink()
    marker = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (marker,)  # type: ignore[return-value]

    torch.save(Trap(), broken / "pytorch_model.bin")
    with pytest.raises(UsageError, match="cannot load"):
        load_model(broken)
    assert not marker.exists()


def test_a_bare_module_and_a_reward_model_are_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give the pair"):
        load_model(tiny("llama"))  # type: ignore[arg-type]
    model, tokenizer = load_model(folder)
    RewardModel.from_policy(model, tokenizer).save(tmp_path / "reward")
    with pytest.raises(UsageError, match="is a reward model"):
        load_model(tmp_path / "reward")


def test_remote_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "remote"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoModelForCausalLM": "mine.Mine", "AutoConfig": "mine.Cfg"},
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UsageError, match="cannot load"):
        load_model(copy)
    assert not (tmp_path / "ran").exists()


def test_loaded_twice_gives_the_same_log_probs(folder: Path) -> None:
    from kleash.sampling import sample

    (one, tokenizer), (two, _) = load_model(folder), load_model(folder)
    batch = sample(one, tokenizer, ["On Sunday"], n=2, max_new_tokens=4).to_batch()
    assert torch.equal(batch_logprobs(one, batch)[0], batch_logprobs(two, batch)[0])
