"""Other packages on the same cases: whole blocks and single reads, in torch.

Each does what its own documentation shows: a read per sub-layer of the finished blocks and the
partial sum (fla, torch.compile), or two phases (flash_attn_res). Sub-layers are cut out as in
`gpu_programs`. Calls are captured in CUDA graphs where that works, so that the host costs nothing.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.gpu_programs import EPS, Case

NAMES = ("fla", "flash_attn_res", "torch_compile")


def warm_calls(case: Case, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """For each package a call without arguments that has been made before, or why there is none."""
    try:
        import torch

        if not torch.cuda.is_available():
            return dict.fromkeys(names, "torch sees no GPU")
    except Exception as error:
        return dict.fromkeys(names, _reason(error))
    found: dict[str, Any] = {}
    for name in names:
        try:
            call = _block_of(torch, name, case)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:
            found[name] = _reason(error)
        torch.cuda.empty_cache()
    return found


def captured(call: Callable) -> tuple[Callable, str]:
    """Captures a warm call in a CUDA graph if it can be; returns what to call, and a note."""
    import torch

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        torch.cuda.synchronize()
        return call, f"without CUDA graph: {_reason(error)}"
    return graph.replay, "CUDA graph"


def synchronize() -> None:
    """Waits for torch's GPU work."""
    import torch

    torch.cuda.synchronize()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:160]


def _block_of(torch, name: str, case: Case) -> Callable:
    """A call that computes the case once."""
    gradients = case.direction != "forward"

    def rows(count):
        return [
            torch.randn(1, case.t, case.d, device="cuda", dtype=torch.bfloat16)
            for _ in range(count)
        ]

    def vectors(count):
        scale = case.d**-0.5
        return [
            (scale * torch.randn(case.d, device="cuda")).bfloat16().requires_grad_(gradients)
            for _ in range(count)
        ]

    values = [x.requires_grad_(gradients) for x in rows(case.n)]
    updates = rows(case.s if case.what == "block" else 0)
    cotangents = rows(case.s + 1 if gradients else 0)
    queries = vectors(case.s)
    ones = torch.ones(case.d, device="cuda", dtype=torch.bfloat16)
    gains = [ones.clone().requires_grad_(gradients) for _ in range(case.s)]
    norm_gain = ones.clone().requires_grad_(gradients)
    parameters = [*values, *queries, *gains, norm_gain]

    class Sublayer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, update, dhidden):
            ctx.dhidden = dhidden
            return update.view_as(update)

        @staticmethod
        def backward(ctx, dupdate):
            return ctx.dhidden, None, None

    def sublayer(hidden, s):
        if not gradients:
            return updates[s]
        return Sublayer.apply(hidden, updates[s], cotangents[s])

    def one_read_a_sublayer(read):
        hidden = read(queries[0], values, gains[0], None)
        if case.what == "phase 1":
            return [hidden]
        partial = sublayer(hidden, 0)
        for s in range(1, case.s):
            hidden = read(queries[s], [*values, partial], gains[s], norm_gain)
            if s + 1 < case.s:
                partial = partial + sublayer(hidden, s)
        return [hidden, partial]

    if name == "fla":
        from fla.ops.attnres import fused_attnres

        def read(query, sources, gain, norm):
            return fused_attnres(query, sources, gain, norm, rms_eps=EPS)

        def forward():
            return one_read_a_sublayer(read)

    elif name == "torch_compile":

        @torch.compile(dynamic=False)
        def equation(query, sources, gain, norm):
            v = torch.stack(tuple(sources)).float()
            key = (query * gain).float()
            logits = (v * key).sum(-1) * (v.square().mean(-1) + EPS).rsqrt()
            h = (logits.softmax(0)[..., None] * v).sum(0)
            if norm is not None:
                h = h * (h.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.float()
            return h.bfloat16()

        def forward():
            return one_read_a_sublayer(equation)

    else:
        from flash_attn_res.ops.phase_1 import phase_1_batched_attention_triton_op
        from flash_attn_res.ops.phase_2 import phase_2_online_softmax_merge_triton_op

        def forward():
            stacked, query_sd = torch.stack(values), torch.stack(queries)
            outputs, lse = phase_1_batched_attention_triton_op(stacked, query_sd, EPS)
            if case.what == "phase 1":
                return [outputs[0]]
            hidden = outputs[0]
            partial = sublayer(hidden, 0)
            for s in range(1, case.s):
                hidden = phase_2_online_softmax_merge_triton_op(
                    partial, queries[s], outputs[s], lse[s], EPS
                )
                hidden = torch.nn.functional.rms_norm(hidden, (case.d,), norm_gain, EPS)
                if s + 1 < case.s:
                    partial = partial + sublayer(hidden, s)
            return [hidden, partial]

    def call():
        if not gradients:
            with torch.no_grad():
                return forward()
        results = forward()
        used = [x for x in parameters if x.requires_grad]
        return torch.autograd.grad(results, used, cotangents[-len(results) :], allow_unused=True)

    return call
