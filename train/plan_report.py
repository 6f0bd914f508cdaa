"""The report of `python -m train.plan` as tables for people."""

from typing import Any

import rich.console
import rich.table


def print_report(report: dict[str, Any]) -> None:
    """Prints tables for people."""
    console = rich.console.Console()
    axes = ", ".join(f"{name}={size}" for name, size in report["mesh"].items() if size > 1)
    title = f"Training step on {report['topology']}: {report['devices']} devices ({axes or 'one'})"
    table = rich.table.Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    memory, flops, bound = report["memory"], report["flops"], report["bound"]
    rows: list[tuple[str, str] | None] = [
        ("parameters", f"{report['parameters']:,}"),
        ("tokens in a step", f"{report['tokens']:,}"),
        None,
        ("state of a device", gib(memory["state"])),
        ("temporary", gib(memory["temporary"])),
        ("program", gib(memory["program"])),
        (
            f"of {gib(memory['capacity'])}",
            f"{gib(memory['total'])} ({memory['total'] / memory['capacity']:.0%})",
        ),
        None,
        ("model flops of a device", f"{flops['model']:.4g}"),
        ("matrix products of the program", f"{flops['program']:.4g}"),
    ]
    if (pipeline := report["pipeline"]) is not None:
        rows += [
            None,
            ("schedule", pipeline["schedule"]),
            (
                "stages x virtual stages, microbatches",
                f"{pipeline['stages']} x {pipeline['virtual_stages']}, {pipeline['microbatches']}",
            ),
            ("bubble", f"{pipeline['bubble']:.1%} of {pipeline['ticks_each_way']} ticks each way"),
            ("blocks in a hop", str(pipeline["blocks_in_a_hop"])),
            ("a stage sends, by formula", gib(pipeline["exchanged_bytes_formula"])),
            ("a stage sends, in the program", gib(pipeline["exchanged_bytes_program"])),
        ]
    rows += [
        None,
        ("bound from compute", _seconds(bound["compute"])),
        ("bound from memory traffic", _seconds(bound["memory"])),
        ("bound from exchange", _seconds(bound["exchange"])),
        ("a step takes at least", _seconds(bound["seconds"])),
        ("so at most", f"{bound['tokens_per_second']:,.0f} tokens/s"),
        ("and at most of the peak, in model flops", f"{bound['model_flops_utilisation']:.0%}"),
        None,
        ("compiled in", f"{report['compile_seconds']:.0f} s"),
    ]
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    console.print(table)
    table = rich.table.Table(title="Collectives of a device in a step")
    for column in ("kind", "count", "of them in loops", "bytes"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in report["collectives"]:
        counts = f"{row['count']:,}", f"{row['in_loops']:,}"
        table.add_row(row["kind"], *counts, gib(row["bytes"]))
    console.print(table)
    console.print(
        "Counted and bounded, not timed: memory is the compiler's plan; bounds divide counts by the"
        " maker's figures and take all else to be free and to overlap. Products inside kernels are"
        " not counted, and memory traffic counts every loop once."
    )


def gib(size: float) -> str:
    """Bytes in GiB, or in MiB below an eighth of one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
