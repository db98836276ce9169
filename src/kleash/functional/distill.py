"""On-policy distillation: a teacher's opinion of the student's own tokens."""

from __future__ import annotations

from torch import Tensor

from ._checks import check_floats, wide


def distillation_advantages(logp_teacher: Tensor, logp: Tensor) -> Tensor:
    """A_t = log π_teacher(a_t) - log π_student(a_t), detached (seed 000; Lu & Thinking Machines Lab 2025).

    Any shape, elementwise, nats, of tokens sampled *from the student*. The expectation over the student's
    samples is -KL(student‖teacher), the reverse KL; a single value is only an estimate of it. Use it as the
    advantage of `reinforce_loss`.

    >>> import torch
    >>> distillation_advantages(torch.tensor([0.80, 0.19]).log(), torch.tensor([0.5754, 0.3715]).log())
    tensor([ 0.3295, -0.6705])
    """
    check_floats(logp_teacher=logp_teacher, logp=logp)
    return (wide(logp_teacher) - wide(logp)).detach()
