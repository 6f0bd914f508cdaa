"""One self-contained page about runs: what each sub-layer reads, and how depth changes training."""
