"""The chunked kernels against the plain computation they replace."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kleash.functional.chunked import linear_kl, linear_logprobs

OPTIONS = [
    {},
    {"temperature": 0.6},
    {"scale": 0.0625},
    {"softcap": 3.0},
    {"forbidden": [0, 5, 6, 36]},
    {"scale": 1.7, "softcap": 2.0, "temperature": 1.5, "forbidden": torch.tensor([3])},
]
IDS = ["plain", "temperature", "scale", "softcap", "forbidden", "all"]


def plain_logits(hidden, weight, bias=None, scale=1.0, softcap=None, temperature=1.0, forbidden=()):
    z = hidden @ weight.t()
    z = (z if bias is None else z + bias) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return (z / temperature).index_fill(1, torch.as_tensor(forbidden, dtype=torch.long), -torch.inf)


def entropy_of(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -torch.where(logp.isinf(), 0.0, logp.exp() * logp).sum(-1)


def make(rows=7, width=6, vocabulary=37, dtype=torch.float32, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype) * spread
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    bias = torch.randn(vocabulary, generator=generator, dtype=dtype)
    targets = torch.randint(7, 36, (rows,), generator=generator)
    return hidden, weight, bias, targets


@pytest.mark.parametrize("chunk", [None, 1, 21, 70])
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_values_and_gradients_equal_the_plain_computation(options, chunk):
    hidden, weight, bias, targets = make(dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)

    logp, entropy = linear_logprobs(hidden, weight, targets, bias=bias, chunk=chunk, **options)
    got = torch.autograd.grad(logp @ upstream, inputs)

    logits = plain_logits(hidden, weight, bias, **options)
    want_logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    want = torch.autograd.grad(want_logp @ upstream, inputs)
    torch.testing.assert_close(logp, want_logp)
    torch.testing.assert_close(entropy, entropy_of(logits))
    assert not entropy.requires_grad
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_gradcheck(options):
    hidden, weight, bias, targets = make(rows=3, width=2, vocabulary=37, dtype=torch.float64)
    inputs = tuple(x.requires_grad_() for x in (hidden, weight, bias))
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_logprobs(h, w, targets, bias=b, chunk=20, **options)[0], inputs
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_inputs_get_no_gradient_and_the_others_keep_theirs(frozen):
    hidden, weight, bias, targets = make()
    inputs = {"hidden": hidden, "weight": weight, "bias": bias}
    for name, x in inputs.items():
        x.requires_grad_(name != frozen)
    linear_logprobs(hidden, weight, targets, bias=bias)[0].sum().backward()
    for name, x in inputs.items():
        assert (x.grad is None) == (name == frozen)


def test_float32_within_1e_5_on_peaked_logits():
    hidden, weight, bias, targets = make(rows=32, width=16, vocabulary=512, spread=4.0)
    logp, entropy = linear_logprobs(hidden, weight, targets, bias=bias, chunk=1000)
    exact = plain_logits(hidden.double(), weight.double(), bias.double())
    want = exact.log_softmax(-1).gather(1, targets[:, None])[:, 0].float()
    torch.testing.assert_close(logp, want, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy, entropy_of(exact).float(), atol=1e-5, rtol=1e-5)


def test_report_33_temperature_on_the_logits():
    """Logits [0, 1]: logp of token 1 is -0.126928 at T = 0.5 and -0.313262 at T = 1."""
    hidden, weight, targets = torch.ones(1, 1), torch.tensor([[0.0], [1.0]]), torch.tensor([1])
    for temperature, want in ((0.5, -0.126928), (1.0, -0.313262)):
        logp, _ = linear_logprobs(hidden, weight, targets, temperature=temperature)
        assert logp.item() == pytest.approx(want, abs=1e-6)


def test_forbidden_slice_in_front_leaves_no_trace():
    """Slices made of forbidden tokens alone, first and last, even where all real logits are very negative."""
    hidden, weight, _, targets = make()
    options = {"bias": torch.full((37,), -1e4), "forbidden": [0, 1, 2, 35, 36], "chunk": 14}
    logp, entropy = linear_logprobs(hidden, weight, targets, **options)
    logits = plain_logits(hidden, weight, forbidden=[0, 1, 2, 35, 36])
    torch.testing.assert_close(
        logp, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], atol=2e-3, rtol=0
    )
    torch.testing.assert_close(entropy, entropy_of(logits), atol=2e-3, rtol=0)


def test_extreme_logits_stay_finite():
    hidden, weight = torch.tensor([[1.0], [-1.0]], requires_grad=True), torch.tensor([[1e4], [-1e4], [0.0]])
    logp, entropy = linear_logprobs(hidden, weight, torch.tensor([0, 0]))
    logp.sum().backward()
    assert logp.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_no_rows_gives_empty_result_and_zero_gradient():
    hidden, weight, _, targets = make(rows=0)
    weight.requires_grad_()
    logp, entropy = linear_logprobs(hidden, weight, targets)
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()


def test_under_autocast_products_are_bfloat16_and_the_rest_float32():
    hidden, weight, bias, targets = make(rows=64, width=32, vocabulary=500, spread=0.3)
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logp, entropy = linear_logprobs(hidden, weight, targets, bias=bias)
    logp.sum().backward()
    exact = plain_logits(hidden, weight, bias).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    want = torch.autograd.grad(exact.sum(), (hidden, weight))
    assert logp.dtype == entropy.dtype == torch.float32
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert 0 < (logp - exact).abs().mean() < 0.02
    assert (logp - exact).mean().abs() < 0.005
    for got, full in zip((hidden.grad, weight.grad), want, strict=True):
        assert (got - full).norm() < 0.01 * full.norm()


def test_confident_prediction_is_exact_in_bfloat16():
    """The target's own logit is not rounded: plain bfloat16 would make it 18.0 here."""
    hidden = torch.tensor([[1.0] + 15 * [0.0625]]).bfloat16()
    weight = torch.tensor([[17.0] + 15 * [1.0], [13.0] + 15 * [1.0]]).bfloat16()  # logits 17.9375, 13.9375
    exact = plain_logits(hidden.double(), weight.double()).log_softmax(-1)[0, 0]
    logp, _ = linear_logprobs(hidden, weight, torch.tensor([0]))
    rounded = torch.mm(hidden, weight.t()).float().log_softmax(-1)[0, 0]
    assert abs(logp - exact) < 1e-6 < 1e-3 < abs(rounded - exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [None, 21])
@pytest.mark.parametrize("options", [OPTIONS[i] for i in (0, 1, 4)], ids=[IDS[i] for i in (0, 1, 4)])
def test_linear_kl_equals_the_plain_computation(options, chunk, dtype):
    hidden_p, weight_p, bias_p, targets = make(dtype=dtype)
    hidden_q, weight_q, _, _ = make(dtype=dtype, seed=1, width=4)
    got = linear_kl(
        hidden_p, weight_p, hidden_q, weight_q, targets,
        bias_p=bias_p, scale_p=0.5, softcap_q=3.0, chunk=chunk, **options,
    )  # fmt: skip
    logits_p = plain_logits(hidden_p.double(), weight_p.double(), bias_p.double(), scale=0.5, **options)
    logits_q = plain_logits(hidden_q.double(), weight_q.double(), softcap=3.0, **options)
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    kl = torch.where(log_p.isinf(), 0.0, log_p.exp() * (log_p - log_q)).sum(-1)
    at = targets[:, None]
    want = (kl, log_p.gather(1, at)[:, 0], log_q.gather(1, at)[:, 0], entropy_of(logits_p))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w.to(dtype), atol=tolerance, rtol=tolerance)


def test_linear_kl_of_a_model_with_itself_is_exactly_zero():
    hidden, weight, bias, targets = make(rows=50, vocabulary=301, spread=5.0)
    kl, logp_p, logp_q, _ = linear_kl(
        hidden, weight, hidden, weight, targets, bias_p=bias, bias_q=bias, chunk=900, forbidden=[0]
    )
    assert not kl.any()
    assert torch.equal(logp_p, logp_q)
    logp, _ = linear_logprobs(hidden, weight, targets, bias=bias, chunk=900, forbidden=[0])
    assert torch.equal(logp, logp_p)


@pytest.mark.parametrize("chunk", [None, 1, 21, 70])
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_linear_kl_gradient_equals_the_plain_computation(options, chunk):
    """On the policy's side alone: the reference and the other outputs carry none."""
    options = dict(options)
    shared = {k: options.pop(k) for k in ("temperature", "forbidden") if k in options}
    hidden, weight, bias, targets = make(dtype=torch.float64)
    hidden_q, weight_q, bias_q, _ = make(dtype=torch.float64, seed=1)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    others = [x.requires_grad_() for x in (hidden_q, weight_q, bias_q)]
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    sides = {f"{k}_{side}": v for k, v in options.items() for side in "pq"}
    kl, *rest = linear_kl(
        hidden,
        weight,
        hidden_q,
        weight_q,
        targets,
        bias_p=bias,
        bias_q=bias_q,
        chunk=chunk,
        **shared,
        **sides,
    )
    got = torch.autograd.grad(kl @ upstream, [*inputs, *others], allow_unused=True)
    logp = plain_logits(hidden, weight, bias, **options, **shared).log_softmax(-1)
    logq = plain_logits(hidden_q, weight_q, bias_q, **options, **shared).log_softmax(-1).detach()
    gap = torch.where(logp.isinf(), 0.0, logp - logq)
    gap = torch.where(gap.isfinite(), gap, 0.0)
    want_kl = (torch.where(logp.isinf(), 0.0, logp.exp()) * gap).sum(-1)
    want = torch.autograd.grad(want_kl @ upstream, inputs)
    torch.testing.assert_close(kl, want_kl)
    for g, w in zip(got[:3], want, strict=True):
        torch.testing.assert_close(g, w)
    assert got[3:] == (None, None, None) and not any(x.requires_grad for x in rest)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_report_61_no_operation_ever_returns_full_logits():
    """128 positions over 32k tokens: all three passes stay at one slice, a sixteenth of the logits."""
    rows, vocabulary, chunk = 128, 32_000, 1 << 18
    hidden, weight, _, targets = make(rows=rows, width=8, vocabulary=vocabulary)
    hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor() as seen:
        linear_logprobs(hidden, weight, targets, chunk=chunk)[0].sum().backward()
        linear_kl(hidden, weight, hidden, weight, targets, chunk=chunk)
    assert seen.elements <= chunk
    with LargestTensor() as seen:
        plain_logits(hidden, weight)
    assert seen.elements == rows * vocabulary  # the recorder does see a plain computation


def test_report_61_peak_memory_is_far_below_the_logits():
    """Resident memory while the kernels run, sampled from a thread; the logits alone would be 128 MB."""
    statm = "/proc/self/statm"
    try:
        open(statm).close()
    except OSError:
        pytest.skip(f"needs {statm}")
    hidden, weight, _, targets = make(rows=512, width=8, vocabulary=64_000)
    hidden.requires_grad_(), weight.requires_grad_()
    peak, done = [0], threading.Event()

    def resident() -> int:
        with open(statm) as f:
            return int(f.read().split()[1]) * 4096

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], resident())

    linear_logprobs(hidden[:8], weight, targets[:8])[0].sum().backward()
    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    linear_logprobs(hidden, weight, targets)[0].sum().backward()
    done.set()
    watcher.join()
    assert peak[0] > 0
    assert peak[0] - before < 48 * 2**20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": torch.zeros(7, 5)}, "hidden must be"),
        ({"hidden": torch.zeros(7, 6, dtype=torch.long)}, "floating point"),
        ({"targets": torch.zeros(6, dtype=torch.long)}, "targets must be"),
        ({"targets": torch.zeros(7)}, "int64"),
        ({"targets": torch.full((7,), 37)}, "found 37"),
        ({"targets": torch.full((7,), -100)}, "found -100"),
        ({"bias": torch.zeros(36)}, "bias must be"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"chunk": 0}, "at least 1, got 0"),
        ({"forbidden": [37]}, "forbidden must be"),
        (
            {"forbidden": [9], "targets": torch.tensor([8, 8, 9, 8, 8, 8, 8])},
            "target 9 at row 2 is forbidden",
        ),
    ],
)
def test_wrong_input_is_named(change, words):
    hidden, weight, _, targets = make()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(ValueError, match=words):
        linear_logprobs(**arguments)


def test_linear_kl_refuses_two_vocabularies():
    hidden, weight, _, targets = make()
    with pytest.raises(ValueError, match="p has 7 rows over 37 tokens, q has 7 over 36"):
        linear_kl(hidden, weight, hidden, weight[:36], targets)
