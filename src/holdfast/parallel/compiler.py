"""The compiler of a model's blocks: what it cannot compile runs operation by operation.

A rank whose compiler fails must not leave a forward pass in which the other ranks wait for it. The graph that failed
runs as it is, the reason is noted, and the ranks agree afterwards on what they do about it. A lack of memory alone is
raised.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from holdfast.parallel.failure.classify import is_out_of_memory

_FRONT_END = logging.getLogger("torch._dynamo.convert_frame")
"""Where dynamo logs the errors that it suppresses."""


class BlockCompiler:
    """A backend of torch.compile, and the reasons for which graphs and frames were left uncompiled.

    Args:
        backend: The compiler, by dynamo's name.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self.backend = backend
        self.reasons: list[str] = []
        """What failed on this rank, in the order in which it failed."""
        self.tell: Callable[[str], object] | None = None
        """Is told each reason as it comes; None while reasons are only collected."""
        self.begins: Callable[[], object] | None = None
        """Is called before a graph is compiled."""
        self._calls: list[tuple[nn.Module, Any]] = []

    def compile(self, block: nn.Module) -> None:
        """Compile a block's calls in place."""
        block.compile(backend=self)
        # torch keeps what `compile` made in `_compiled_call_impl` and looks there at every call.
        call: Any = block._compiled_call_impl
        self._calls.append((block, self._suppressing(call)))
        self.use(1)

    def use(self, value: int) -> None:
        """Let blocks run compiled, or for 0 uncompiled."""
        for block, call in self._calls:
            block._compiled_call_impl = call if value else None

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile a graph, as dynamo asks."""
        if self.begins is not None:
            self.begins()
        before = _copied(graph)
        try:
            if self.backend == "inductor":
                from torch._inductor.compile_fx import compile_fx

                # Inductor otherwise times reductions and products in each process and keeps the faster form: a resumed
                # run would add up in another order.
                patches = {"deterministic": True}
                return compile_fx(graph, inputs, inner_compile=self._lowered, config_patches=patches)
            return torch._dynamo.lookup_backend(self.backend)(graph, inputs)
        except Exception as error:  # noqa: BLE001 - compilers raise errors of many kinds
            self._note(error)
            return before.forward

    def _lowered(self, graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        """Compile one pass of a graph; inductor compiles a backward pass when it is first needed."""
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # torch's
        from torch._inductor.compile_fx import compile_fx_inner

        before = _copied(graph)
        try:
            return compile_fx_inner(graph, inputs, **options)
        except Exception as error:  # noqa: BLE001 - as above
            self._note(error)
            return make_boxed_func(before.forward)

    def _suppressing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call within which dynamo runs a frame uncompiled rather than raise, and its warnings come here."""
        settings = torch._dynamo.config

        def called(*args: Any, **kwargs: Any) -> Any:
            # `settings.patch` would cost a fifth of a small block's call.
            before, settings.suppress_errors = settings.suppress_errors, True
            _FRONT_END.addFilter(self._is_for_torch)
            try:
                return call(*args, **kwargs)
            finally:
                _FRONT_END.removeFilter(self._is_for_torch)
                settings.suppress_errors = before

        return called

    def _is_for_torch(self, record: logging.LogRecord) -> bool:
        """Note an error that dynamo suppressed, and let torch log everything else."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.levelno < logging.WARNING:
            return True
        self._note(error)
        return False

    def _note(self, error: BaseException) -> None:
        """Keep the reason of an error, and raise a lack of memory, which says nothing of the graph."""
        cause = error
        while isinstance(inner := getattr(cause, "inner_exception", None), BaseException):  # as dynamo wraps errors
            cause = inner
        if is_out_of_memory(cause):
            raise cause
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # A compiler's first line names the backend, and the second says what it refused.
        reason = f"{type(error).__name__}: {' '.join(lines[:2]):.400}"
        self.reasons.append(reason)
        if self.tell is not None:
            self.tell(reason)


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that passes of the compiler do not change; both have the same parameters and constants."""
    return fx.GraphModule(graph, copy.deepcopy(graph.graph))
