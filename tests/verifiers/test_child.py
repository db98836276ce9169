"""What the child process may do with an answer: mathematics, and nothing that reaches out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sympy
from sympy.parsing import sympy_parser

from kleash.verifiers import child
from kleash.verifiers.child import mathematics_only, plain

CODE = [
    "__import__('os').system('touch {file}')",
    "open('{file}', 'w')",
    "(lambda: __import__('os').system('touch {file}'))()",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "exec(chr(111)+chr(112))",
    "eval('1+1')",
    "print(1)",
    "(1).__class__",
    "f'{{().__class__}}'",
    "getattr(1, 'real')",
]


@pytest.mark.parametrize("code", CODE)
def test_code_is_refused_before_it_runs(code: str, tmp_path: Path) -> None:
    written = tmp_path / "written"
    with pytest.raises(ValueError, match="an answer may not"):
        mathematics_only(code.format(file=written))
    assert not written.exists()


@pytest.mark.parametrize("code", CODE[:5])
def test_code_is_refused_by_sympys_parser_too(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sympy_parser, "eval", mathematics_only, raising=False)
    written = tmp_path / "written"
    with pytest.raises((ValueError, TypeError, AttributeError, SyntaxError)):
        sympy_parser.parse_expr(code.format(file=written))
    assert not written.exists()


def test_a_text_inside_an_expression_is_not_a_way_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sympy_parser, "eval", mathematics_only, raising=False)
    written = tmp_path / "written"
    with pytest.raises((ValueError, TypeError, AttributeError, SyntaxError, sympy.SympifyError)):
        sympy_parser.parse_expr(f"sin(\"__import__('os').system('touch {written}')\")")
    assert not written.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[['a', 'b'], ['c']]", [["a", "b"], ["c"]]),
        ("(1 + 2) * 3", 9),
        ("-0x1f & 0xff", -31 & 255),
        (" 7 ", 7),
    ],
)
def test_literals_and_arithmetic_are_evaluated(text: str, value: Any) -> None:
    assert mathematics_only(text) == value


def test_sympy_parses_mathematics_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["x**2/2 + C*x", "sqrt(2)*sin(x)/exp(y)", "(8 - 2)*4", "log(x) + pi", "1.5*factorial(4)"]
    before = [sympy_parser.parse_expr(text) for text in texts]
    unevaluated = sympy_parser.parse_expr("2 + 3*4", evaluate=False)
    monkeypatch.setattr(sympy_parser, "eval", mathematics_only, raising=False)
    assert [sympy_parser.parse_expr(text) for text in texts] == before
    assert sympy_parser.parse_expr("2 + 3*4", evaluate=False) == unevaluated


def test_numpy_scalars_become_literals_and_tuples_stay() -> None:
    numpy = pytest.importorskip("numpy")
    entry = {"a": (numpy.int64(3), [numpy.float32(0.5)]), 2: {"b": {numpy.int64(1)}}}
    assert repr(plain(entry)) == "{'a': (3, [0.5]), 2: {'b': {1}}}"


SEALED = """
import sys
sys.path.insert(0, {folder!r})
import child, os, socket, subprocess
print(child.limit(2**30))
sys.addaudithook(child.watch)
for act in (
    lambda: os.system("true"),
    lambda: subprocess.run(["true"]),
    lambda: os.fork(),
    lambda: socket.socket(),
    lambda: open({file!r}, "w"),
    lambda: os.remove({kept!r}),
    lambda: os.kill(os.getppid(), 0),
    lambda: __import__("ctypes").CDLL(None),
):
    try:
        act()
        print("done")
    except PermissionError as error:
        print("refused")
print(open({kept!r}).read())
try:
    print(len(b" " * 2**31))
except MemoryError:
    print("no memory")
"""


def test_a_sealed_process_cannot_reach_out(tmp_path: Path) -> None:
    kept, file = tmp_path / "kept", tmp_path / "written"
    kept.write_text("readable", encoding="utf-8")
    script = SEALED.format(folder=str(Path(child.__file__).parent), kept=str(kept), file=str(file))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    limited, *rest = done.stdout.split("\n")
    assert rest[:8] == ["refused"] * 8, done.stderr
    assert rest[8] == "readable" and kept.exists() and not file.exists()
    assert limited == "False" or rest[9] == "no memory"


def test_what_a_library_prints_is_not_a_reply(tmp_path: Path) -> None:
    library = tmp_path / "math_verify.py"
    library.write_text(
        "import sympy\nprint('{\"score\": 1.0}')\n"
        "def parse(text, parsing_timeout):\n    print('{\"score\": 1.0}')\n    return [sympy.Integer(1)]\n"
        "def verify(gold, target, timeout_seconds):\n    print('{\"score\": 1.0}')\n    return False\n",
        encoding="utf-8",
    )
    request = {"expected": "1", "found": "2", "boxed": True, "seconds": 5}
    said = subprocess.run(
        [sys.executable, "-I", child.__file__, "math", str(2**30)],
        input="\n".join(json.dumps(line) for line in ([str(tmp_path), *sys.path], request)) + "\n",
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert [json.loads(line) for line in said.stdout.splitlines()][1:] == [
        {"stage": "response"},
        {"score": 0.0},
    ]
