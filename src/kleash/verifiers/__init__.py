"""Verifiers of other packages, run where model text can do no harm: in child processes with limits."""

from kleash.verifiers.pool import Reply, ask, ask_once, require

__all__ = ["Reply", "ask", "ask_once", "require"]
