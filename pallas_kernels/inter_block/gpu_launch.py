"""Launches the Triton kernels of phase 1, which share out more sources than fit by themselves.

Triton is imported where a kernel is launched, as it is missing where no GPU is used.
"""

from jax.custom_batching import sequential_vmap

from pallas_kernels import gpus
from pallas_kernels.inter_block import triton_tiling
from pallas_kernels.inter_block.call import Call, Values
from pallas_kernels.inter_block.triton_tiling import MAX_READS


def unsupported(values: Values, num_reads: int) -> str | None:
    """Returns why the kernels cannot read these sources, or None if they can."""
    if reason := gpus.unsupported(values[0]):
        return reason
    if num_reads > MAX_READS:
        return (
            f"GPU kernels take up to {MAX_READS} reads at once, got {num_reads};"
            " set reads_per_group, or pass fewer queries at a time"
        )
    return None


def run_forward(call: Call, values, folded_sd, count, inverse_rms_nt):
    """Returns what `triton_gpu.forward` does."""
    del inverse_rms_nt  # Computed beside the logits, for no more memory traffic.

    # Examples of a vmap are computed one after another: the kernels have no axis for them.
    @sequential_vmap
    def run(values, folded_sd, count):
        from pallas_kernels.inter_block import triton_gpu

        return triton_gpu.forward(
            values,
            folded_sd,
            count=count,
            eps=call.eps,
            tiling=call.tiling or _choose_tiling(values, folded_sd.shape[0]),
        )

    return run(values, folded_sd, count)


def needs_outputs(call: Call, values: Values, num_reads: int) -> bool:
    """Whether `run_backward` wants the outputs: a launch of its own finds what it needs of them."""
    del call, values, num_reads
    return False


def run_backward(call: Call, values, folded_sd, count, statistics, outputs, doutputs, dvalues):
    """Returns dv in the form of `values`, and dw `[s, d]`, see `tpu_launch.run_backward`."""
    del outputs

    @sequential_vmap
    def run(values, folded_sd, count, statistics, doutputs, dvalues):
        from pallas_kernels.inter_block import triton_gpu

        lse_st, logits_snt, inverse_rms_nt, dlse_st, dlogits_snt = statistics
        return triton_gpu.backward(
            values,
            folded_sd,
            lse_st,
            logits_snt,
            inverse_rms_nt,
            doutputs,
            dlse_st,
            count=count,
            dlogits_snt=dlogits_snt,
            dvalues=dvalues,
            eps=call.eps,
            tiling=call.tiling or _choose_tiling(values, folded_sd.shape[0]),
        )

    return run(values, folded_sd, count, statistics, doutputs, dvalues)


def _choose_tiling(values: Values, num_reads: int) -> triton_tiling.Tiling:
    capability = gpus.compute_capability()
    assert capability is not None, "checked by unsupported"
    return triton_tiling.choose_tiling(
        len(values),
        num_reads,
        values[0].shape[-1],
        values[0].dtype,
        compute_capability=capability,
    )
